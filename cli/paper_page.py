"""A report as one page without outside parts: light, dark, on a phone and on paper.

Owns the page and its style sheet. Nothing is fetched and no script runs: pictures are data URIs, charts are
SVG whose colours are the variables below, fonts are the reader's own. A page that is printed is light. Every
text goes in through the template's escaping; only charts, which are drawn here, are put in as they are.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from specdec.cli.palette import DARK, LIGHT
from specdec.cli.paper import (
    Block,
    Chart,
    Paper,
    Table,
    cell_text,
    to_markdown,
)
from specdec.provenance import write_text_atomic

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
*, ::before, ::after { box-sizing: border-box }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 66rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: break-word }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0 }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .8rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--grid) }
h3 { font-size: 1rem; margin: 0 0 .3rem }
.lead { font-size: 1.12rem; margin: .6rem 0 1.2rem; padding: .8rem 1rem; background: var(--panel);
  border-left: .3rem solid var(--mark) }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: 0; padding: 0;
  font-size: .9rem }
a { color: var(--mark) }
.key { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .8rem;
  margin: 1rem 0; padding: 0 }
.key > div { background: var(--panel); padding: .7rem .9rem; border-radius: .3rem }
.key dt { color: var(--soft); font-size: .85rem } .key dd { margin: 0 }
.key dd.number { font-size: 1.5rem; font-variant-numeric: tabular-nums; line-height: 1.3 }
.key dd.why { color: var(--soft); font-size: .82rem; line-height: 1.35 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr));
  gap: 1.5rem 2rem; margin: 1.2rem 0 }
figure { margin: 0; min-width: 0 }
figure svg { display: block; width: 100%; max-width: 34rem; height: auto }
figure svg * { stroke-linejoin: round; stroke-linecap: butt }
figure svg text { fill: var(--ink) }
figure img { max-width: 100%; background: #fff }
figcaption, .caption { color: var(--soft); font-size: .85rem; line-height: 1.4; text-align: left }
.caption { margin: 1rem 0 0 }
.wide { overflow-x: auto; margin: .3rem 0 1rem }
.wide:focus-visible, summary:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem .25rem 0; text-align: left; border-bottom: 1px solid var(--grid);
  vertical-align: top; min-width: 3.5rem; max-width: 38rem }
th { font-weight: 600 } td.number, th.number { text-align: right }
details { font-size: .85rem; margin-top: .3rem } summary { color: var(--soft); cursor: pointer }
ul.notes { padding-left: 1.2rem }
dl.terms { font-size: .85rem; columns: 20rem 2; column-gap: 2rem; margin: 1.2rem 0 }
dl.terms div { break-inside: avoid; margin-bottom: .4rem }
dl.terms dt { font-weight: 600 } dl.terms dd { margin: 0; color: var(--soft) }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
@media (max-width: 30rem) { body { font-size: 15px; padding: .8rem .8rem 3rem } h1 { font-size: 1.35rem } }
@media print { body { max-width: none; padding: 0; font-size: 10pt } nav, details { display: none }
  h2, h3, .caption { break-after: avoid } figure, tr, .key > div { break-inside: avoid }
  .charts { grid-template-columns: 1fr 1fr } .wide { overflow: visible } table { font-size: 8pt }
  a { color: inherit } .lead, .key > div { print-color-adjust: exact } }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ paper.title }}</title>
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<style>{{ style }}</style></head><body>
{% macro table(block, label) %}{% if block.caption %}
<p class="caption">{{ block.caption }}</p>{% endif %}
<div class="wide" tabindex="0" role="region" aria-label="{{ label }}"><table>
<thead><tr>{% for column in block.columns %}<th scope="col"{% if numeric(block, loop.index0) %} class="number"
{%- endif %}>{{ column }}</th>{% endfor %}</tr></thead><tbody>
{% for row in block.rows %}<tr>{% for value in row %}<td{% if numeric(block, loop.index0) %} class="number"
{%- endif %}>{{ cell(value) }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endmacro %}
<h1>{{ paper.title }}</h1><p class="lead">{{ paper.lead }}</p>
{% if paper.sections|length > 2 %}<nav aria-label="Sections"><ul>{% for section in paper.sections -%}
<li><a href="#s{{ loop.index }}">{{ section.title }}</a></li>{% endfor %}</ul></nav>{% endif %}
{% for section in paper.sections %}<section aria-labelledby="s{{ loop.index }}">
<h2 id="s{{ loop.index }}">{{ section.title }}</h2>
{% for kind, block in grouped(section) %}
{% if kind == "str" %}<p>{{ block }}</p>
{% elif kind == "Notes" %}<ul class="notes">{% for line in block.lines %}<li>{{ line }}</li>{% endfor %}</ul>
{% elif kind == "KeyFigures" %}<dl class="key">{% for what, number, why in block.figures %}<div>
<dt>{{ what }}</dt><dd class="number">{{ number }}</dd><dd class="why">{{ why }}</dd></div>{% endfor %}</dl>
{% elif kind == "Terms" %}<dl class="terms">{% for word, meaning in block.meanings %}
<div><dt>{{ word }}</dt><dd>{{ meaning }}</dd></div>{% endfor %}</dl>
{% elif kind == "Picture" %}<figure>
<img alt="{{ block.caption }}" src="data:image/png;base64,{{ encoded(block) }}">
<figcaption>{{ block.caption }}</figcaption></figure>
{% elif kind == "charts" %}<div class="charts">{% for chart in block %}<figure>
<h3>{{ chart.title }}</h3><div role="img" aria-label="{{ chart.alt }}">{{ drawn(chart) }}</div>
<figcaption>{{ chart.caption }}</figcaption>
<details><summary>The numbers<span class="unseen"> of {{ chart.title }}</span></summary>
{{ table(chart.numbers, chart.title) }}</details></figure>
{% endfor %}</div>
{% else %}{{ table(block, block.caption or section.title) }}
{% endif %}{% endfor %}</section>
{% endfor %}</body></html>
"""


def to_html(paper: Paper) -> str:
    """The report as one page without outside parts."""
    page = Environment(autoescape=True).from_string(_PAGE)
    return page.render(
        paper=paper,
        policy=_POLICY,
        style=Markup(style_sheet()),
        grouped=lambda section: _grouped(section.blocks),
        encoded=lambda picture: base64.b64encode(picture.path.read_bytes()).decode(),
        drawn=lambda chart: Markup(chart.svg),
        numeric=_is_numeric,
        cell=cell_text,
    )


def style_sheet() -> str:
    """The page's style: the dark colours where the reader asks for them, never on paper."""
    light, dark = (
        ":root { " + "; ".join(f"--{name}: {color}" for name, color in colors.items()) + " }"
        for colors in (LIGHT, DARK)
    )
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}{_STYLE}"


def _grouped(blocks: Sequence[Block]) -> list[tuple[str, object]]:
    """Blocks with the name of their kind; neighbouring charts stand in one group, side by side."""
    groups: list[tuple[str, object]] = []
    for block in blocks:
        if not isinstance(block, Chart):
            groups.append((type(block).__name__, block))
        elif groups and groups[-1][0] == "charts":
            charts = groups[-1][1]
            assert isinstance(charts, list), "a group of charts is a list"
            charts.append(block)
        else:
            groups.append(("charts", [block]))
    return groups


def _is_numeric(table: Table, column: int) -> bool:
    """Whether a column holds numbers, which are set to the right; what was not measured does not count."""
    values = [row[column] for row in table.rows if row[column] is not None]
    return bool(values) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)


def write_paper(paper: Paper, folder: Path, name: str) -> None:
    """Write NAME.md and NAME.html into a folder."""
    write_text_atomic(folder / f"{name}.md", to_markdown(paper))
    write_text_atomic(folder / f"{name}.html", to_html(paper))
