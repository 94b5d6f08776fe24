"""A report as Markdown and as one self-contained HTML page, from the same blocks.

Owns the blocks (text, list, key figures, terms, table, picture, chart) and their Markdown; the page is
:mod:`specdec.cli.paper_page`'s. Pictures are PNG files beside the Markdown and are carried inside the page,
charts as SVG. Knows nothing of what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# four significant digits: more than any interval here supports
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings."""

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


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing with what it says in words and in numbers.

    Attributes:
        file: name of its PNG beside the Markdown.
        title: a few words above it.
        alt: what it shows, for who does not see it.
        caption: definitions and counts, below it.
        svg: an <svg> element for the page, with its colours as the page's variables.
        numbers: the figures that are drawn.
    """

    file: str
    title: str
    alt: str
    caption: str
    svg: str
    numbers: Table


@dataclass(frozen=True, kw_only=True)
class KeyFigures:
    """The few numbers to be seen first: (what, number, a remark on its certainty)."""

    figures: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What words mean, beside the figures that use them."""

    meanings: Sequence[tuple[str, str]]


Block = str | Table | Picture | Notes | Chart | KeyFigures | Terms


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
    parts = [f"# {_text(paper.title)}", _text(paper.lead)]
    for section in paper.sections:
        parts.append(f"## {_text(section.title)}")
        parts += [_markdown_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block) -> str:
    if isinstance(block, str):
        return _text(block)
    if isinstance(block, Notes):
        return "\n".join(f"- {_text(line)}" for line in block.lines)
    if isinstance(block, Picture):
        return f"![{_text(block.caption)}]({block.path.name})"
    if isinstance(block, Chart):
        parts = (
            f"**{_text(block.title)}**",
            f"![{_text(block.alt)}]({block.file})",
            _text(block.caption),
            _markdown_table(block.numbers),
        )
        return "\n\n".join(parts)
    if isinstance(block, KeyFigures):
        return "\n".join(f"- {_text(what)}: **{_text(n)}** {_text(why)}" for what, n, why in block.figures)
    if isinstance(block, Terms):
        return "\n".join(f"- *{_text(word)}*: {_text(meaning)}" for word, meaning in block.meanings)
    return _markdown_table(block)


def _markdown_table(table: Table) -> str:
    lines = [_markdown_row(table.columns), _markdown_row(["---"] * len(table.columns))]
    lines += [_markdown_row([cell_text(value) for value in row]) for row in table.rows]
    return (f"{_text(table.caption)}\n\n" if table.caption else "") + "\n".join(lines)


def _text(text: str) -> str:
    """Text as Markdown shows it: markup of HTML stays text."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_text(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
