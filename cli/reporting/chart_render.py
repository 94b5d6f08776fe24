"""Charts as files: one drawing as an SVG that follows the page's theme, and as a PNG.

Owns the sizes and the translation of matplotlib's SVG into one that can stand inside a page:
no outside reference, ids of its own, text as text, and colours as CSS variables, so that one drawing serves
a light page, a dark one and paper. Knows nothing of what is drawn.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.cli.palette import DRAWN, GRID, INK, LIGHT
from specdec.cli.paper import Chart, Table
from specdec.layer_select.picture_theme import figure_with_canvas, png_bytes

# one chart is as wide as a phone, so that its text is as large there as on a desk
WIDTH_IN = 4.1
HEIGHT_IN = 2.9
FONT_PT = 9.5
# what a chart's title takes on a sheet
_TITLE_IN = 0.4
_RC = {
    "svg.fonttype": "none",
    # a name from a data file may hold a dollar sign; it is text, not mathematics
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": FONT_PT,
    "axes.labelsize": FONT_PT,
    "xtick.labelsize": FONT_PT - 0.5,
    "ytick.labelsize": FONT_PT - 0.5,
    "legend.fontsize": FONT_PT - 0.5,
    "axes.formatter.useoffset": False,
    "hatch.linewidth": 0.6,
    "hatch.color": INK,
}
# placeholder colour -> variable of the page's style sheet
VARIABLES = {color: f"--{name}" for name, color in LIGHT.items() if name in DRAWN}


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One chart before it is a file.

    Attributes:
        key: unique in its report; part of file names.
        title: a few words above it.
        alt: what it shows, with its figures, for who does not see it.
        caption: definitions and counts, printed below it.
        numbers: the same figures as a table.
        draw: draws it into empty axes.
        height: inches.
    """

    key: str
    title: str
    alt: str
    caption: str
    numbers: Table
    draw: Callable[[Axes], None]
    height: float = HEIGHT_IN

    def chart(self, stem: str) -> Chart:
        """The block of a report; its PNG is named after `stem`."""
        with _drawn(self) as figure:
            return Chart(
                file=f"{stem}-{self.key}.png",
                title=self.title,
                alt=self.alt,
                caption=self.caption,
                svg=inline_svg(figure, self.key),
                numbers=self.numbers,
            )

    def png(self) -> bytes:
        """The chart alone, on white."""
        with _drawn(self) as figure:
            figure.suptitle(self.title, fontsize=FONT_PT + 1)
            return png_bytes(figure)


def sheet_png(drawings: Sequence[Drawing], *, title: str, columns: int = 2) -> bytes:
    """All charts on one sheet, each under its title, in columns of about the same height."""
    assert drawings, "a sheet needs a chart"
    stacks: list[list[Drawing]] = [[] for _ in range(min(columns, len(drawings)))]
    for drawing in drawings:
        min(stacks, key=_height).append(drawing)
    tallest = max(map(_height, stacks))
    with _theme():
        figure = figure_with_canvas(len(stacks) * WIDTH_IN, tallest + _TITLE_IN)
        # what fills a column up is as tall as what the tallest has more
        columns_of = figure.subfigures(1, len(stacks), squeeze=False)[0]
        for column, stack in zip(columns_of, stacks, strict=True):
            heights = [*(one.height + _TITLE_IN for one in stack), max(tallest - _height(stack), 1e-3)]
            places = column.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
            for place, drawing in zip(places, stack, strict=False):
                axes = place.add_subplot()
                _prepare(axes)
                drawing.draw(axes)
                place.suptitle(drawing.title, fontsize=FONT_PT + 1)
        figure.suptitle(title, fontsize=FONT_PT + 2, wrap=True)
        return png_bytes(figure)


def _height(stack: Sequence[Drawing]) -> float:
    return sum(drawing.height + _TITLE_IN for drawing in stack)


@contextmanager
def _theme() -> Iterator[None]:
    with matplotlib.rc_context(_RC), warnings.catch_warnings():
        # a script that the font lacks shows as boxes in the PNG, as itself in the page
        warnings.filterwarnings("ignore", message="Glyph")
        yield


@contextmanager
def _drawn(drawing: Drawing) -> Iterator[Figure]:
    with _theme():
        figure = figure_with_canvas(WIDTH_IN, drawing.height)
        axes = figure.add_subplot()
        _prepare(axes)
        drawing.draw(axes)
        yield figure


def _prepare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


_STYLE = re.compile(r"<style[^>]*>.*?</style>", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FAMILY = re.compile(r"('[^']*',\s*)*'[^']*'(, sans-serif)")
_ATTRIBUTE = re.compile(r'(fill|stroke)="(var\([^"]*\))"')
_HEX = re.compile("|".join(VARIABLES))


def inline_svg(figure: Figure, key: str) -> str:
    """A figure as an <svg> element for a page.

    Args:
        figure: drawn in the palette.
        key: makes its ids unique in the page.
    """
    buffer = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for pattern in (_STYLE, _METADATA, _COMMENT):
        text = pattern.sub("", text)
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(width|height|version|xmlns(:\w+)?)="[^"]*"', "", opening)
    # the text that says what it shows stands beside it in the page
    text = f'{opening} aria-hidden="true" focusable="false">{rest}'
    text = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', text)
    text = re.sub(r'(xlink:)?href="#([^"]+)"', rf'href="#{key}-\2"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", text)
    text = _FAMILY.sub("sans-serif", text)
    text = _HEX.sub(lambda found: f"var({VARIABLES[found[0]]})", text)
    # variables are certain to count in a style, not in an attribute
    return _ATTRIBUTE.sub(r'style="\1: \2"', text).strip()
