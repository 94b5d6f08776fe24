"""A short report as Markdown and as one self-contained HTML page, from the same blocks.

Owns the blocks (text, list, table, picture) and their two spellings. Pictures are PNG files beside the
Markdown and are carried inside the page. Knows nothing of what is reported.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment

from specdec.provenance import write_text_atomic

# four significant digits: more than any interval here supports
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings; `verdicts` names the columns that say pass or fail."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG file and what it shows."""

    path: Path
    caption: str


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Short remarks, one a line."""

    lines: Sequence[str]


Block = str | Table | Picture | Notes


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A whole report; `lead` is the verdict in a sentence or two."""

    title: str
    lead: str
    sections: Sequence[Section] = field(default_factory=tuple)


def cell_text(value: Any) -> str:
    """A cell as both spellings write it: a dash for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    if isinstance(value, list | tuple):
        return "..".join(cell_text(part) for part in value)
    return str(value)


def to_markdown(paper: Paper) -> str:
    """The report as Markdown; pictures are linked by file name."""
    parts = [f"# {paper.title}", paper.lead]
    for section in paper.sections:
        parts.append(f"## {section.title}")
        parts += [_markdown_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Notes):
        return "\n".join(f"- {line}" for line in block.lines)
    if isinstance(block, Picture):
        return f"![{block.caption}]({block.path.name})"
    lines = [_markdown_row(block.columns), _markdown_row(["---"] * len(block.columns))]
    lines += [_markdown_row([cell_text(value) for value in row]) for row in block.rows]
    return (f"{block.caption}\n\n" if block.caption else "") + "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ paper.title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #ccc }
.lead { font-size: 1.1rem } .wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid #e2e2e2; vertical-align: top }
td.number { text-align: right } caption { text-align: left; padding: .4rem 0; color: #555 }
ul { color: #444; font-size: .9rem } img { max-width: 100% }
figure { margin: 1rem 0 } figcaption { color: #555 }
@media print { body { margin: 0; max-width: none } h2 { break-after: avoid }
  table, figure { break-inside: avoid } }
</style></head><body>
<h1>{{ paper.title }}</h1><p class="lead">{{ paper.lead }}</p>
{% for section in paper.sections %}<h2>{{ section.title }}</h2>
{% for kind, block in blocks(section) %}
{% if kind == "text" %}<p>{{ block }}</p>
{% elif kind == "notes" %}<ul>{% for line in block.lines %}<li>{{ line }}</li>{% endfor %}</ul>
{% elif kind == "picture" %}<figure>
<img alt="{{ block.caption }}" src="data:image/png;base64,{{ encoded(block) }}">
<figcaption>{{ block.caption }}</figcaption></figure>
{% else %}<div class="wide"><table>{% if block.caption %}<caption>{{ block.caption }}</caption>{% endif %}
<tr>{% for column in block.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in block.rows %}<tr>{% for value in row %}<td{% if is_number(value) %} class="number"{% endif %}>
{{- cell(value) }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endif %}{% endfor %}{% endfor %}</body></html>
"""


def to_html(paper: Paper) -> str:
    """The report as one page without outside parts."""
    page = Environment(autoescape=True).from_string(_PAGE)
    return page.render(
        paper=paper,
        blocks=lambda section: [(_kind(block), block) for block in section.blocks],
        encoded=lambda picture: base64.b64encode(picture.path.read_bytes()).decode(),
        is_number=lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        cell=cell_text,
    )


def _kind(block: Block) -> str:
    if isinstance(block, str):
        return "text"
    return {Notes: "notes", Picture: "picture", Table: "table"}[type(block)]


def write_paper(paper: Paper, folder: Path, name: str) -> None:
    """Write NAME.md and NAME.html into a folder."""
    write_text_atomic(folder / f"{name}.md", to_markdown(paper))
    write_text_atomic(folder / f"{name}.html", to_html(paper))
