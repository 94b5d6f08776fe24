"""The kinds of charts a report has, each from plain numbers.

Owns their drawing, their tables of numbers and their texts for who does not see them. Every kind takes its
series in the looks of :mod:`specdec.cli.palette`, in order. Knows nothing of records.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from specdec.cli.palette import INK, LOOKS, MAX_SERIES, PAPER
from specdec.cli.paper import Table, cell_text
from specdec.cli.reporting.chart_render import FONT_PT, HEIGHT_IN, Drawing

# inches that one row of a forest and one line of a legend take
_ROW_IN, _LEGEND_IN, _AXIS_IN = 0.42, 0.19, 0.75

# a name of this many points a character keeps clear of the number at its right
_NAME_PT = 420.0
# letters of a name in a legend before it goes on in a second line
_LEGEND_LETTERS = 40

Interval = tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A value with its interval, under a name."""

    label: str
    value: float
    interval: Interval = None


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One point of a plane, by its number in a table; a group looks alike, `hollow` ones are beaten."""

    number: int
    label: str
    x: float
    y: float
    group: str
    hollow: bool = False


def forest(
    key: str,
    title: str,
    marks: Sequence[Mark],
    *,
    unit: str,
    caption: str,
    reference: float | None = None,
    digits: int = 2,
) -> Drawing:
    """Values with their intervals, one under another, each named above its line."""

    def draw(axes: Axes) -> None:
        for row, mark in enumerate(reversed(marks)):
            if mark.interval is not None:
                axes.plot(mark.interval, [row, row], color=LOOKS[0].color, linewidth=2.2)
            axes.plot([mark.value], [row], "D", color=LOOKS[0].color, markersize=5.5, markeredgecolor=PAPER)
            # no line crosses a name
            beside = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}
            axes.text(
                0.01,
                row + 0.2,
                mark.label,
                transform=axes.get_yaxis_transform(),
                fontsize=min(FONT_PT - 0.5, _NAME_PT / max(1, len(mark.label))),
                bbox=beside,
            )
            axes.text(
                0.99,
                row + 0.2,
                f"{mark.value:.{digits}f}",
                transform=axes.get_yaxis_transform(),
                ha="right",
                fontsize=FONT_PT - 0.5,
                bbox=beside,
            )
        if reference is not None:
            axes.axvline(reference, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.5)
        axes.set_ylim(-0.5, len(marks) - 0.3)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_xlabel(unit)

    rows = [[one.label, one.value, *(one.interval or (None, None))] for one in marks]
    return Drawing(
        key=key,
        title=title,
        alt=alt_text(title, [f"{one.label} {number_with(one.value, one.interval, digits)}" for one in marks]),
        caption=caption,
        numbers=Table(columns=["what", unit, "low", "high"], rows=rows),
        draw=draw,
        height=_AXIS_IN + _ROW_IN * len(marks),
    )


def lines(
    key: str,
    title: str,
    series: Mapping[str, Sequence[tuple[float, float, Interval]]],
    *,
    x: str,
    y: str,
    caption: str,
    names: Mapping[float, str] | None = None,
    whole: bool = False,
    log_x: bool = False,
    bottom: float | None = 0.0,
    joined: bool = True,
) -> Drawing:
    """Curves of (x, y, interval); `names` spells the places of x, `whole` has them integers.

    Not `joined`: places have no order, so that no line leads from one to the next.
    """
    shown = dict(list(series.items())[:MAX_SERIES])

    def draw(axes: Axes) -> None:
        # intervals of curves at the same places would cover one another
        places = sorted({point[0] for points in shown.values() for point in points})
        gap = min((b - a for a, b in pairwise(places)), default=1.0)
        for number, (name, points) in enumerate(shown.items()):
            look = LOOKS[number]
            shift = 0.0 if log_x else 0.07 * gap * (number - (len(shown) - 1) / 2)
            at = [point[0] + shift for point in points]
            axes.plot(
                at,
                [point[1] for point in points],
                color=look.color,
                marker=look.marker,
                linestyle=look.line if joined else "",
                label=name,
                markersize=4.5 if joined else 5.5,
                markeredgecolor=PAPER,
                markeredgewidth=0.4,
                linewidth=1.4,
            )
            for place, point in zip(at, points, strict=True):
                if point[2] is not None:
                    axes.plot([place, place], point[2], color=look.color, linewidth=1.1)
        if log_x:
            axes.set_xscale("log", base=2)
        if log_x or names or (whole and len(places) <= 12):
            axes.xaxis.set_major_locator(FixedLocator(places))
            axes.xaxis.set_minor_locator(NullLocator())
            texts = [(names or {}).get(place, f"{place:g}") for place in places]
            long = max(map(len, texts), default=0) * len(texts) > 44
            axes.set_xticklabels(texts, rotation=30 if long else 0, ha="right" if long else "center")
        elif whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if bottom is not None:
            axes.set_ylim(bottom=bottom)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _legend(axes, len(shown))

    rows = [
        [name, (names or {}).get(point[0], point[0]), point[1], *(point[2] or (None, None))]
        for name, points in series.items()
        for point in points
    ]
    ends = [
        f"{name}: from {cell_text(points[0][1])} at {(names or {}).get(points[0][0], f'{points[0][0]:g}')} "
        f"to {cell_text(points[-1][1])} at {(names or {}).get(points[-1][0], f'{points[-1][0]:g}')}"
        for name, points in series.items()
        if points
    ]
    return Drawing(
        key=key,
        title=title,
        alt=alt_text(f"{title}; {y} over {x}", ends),
        caption=_some(caption, len(series)),
        numbers=Table(columns=["series", x, y, "low", "high"], rows=rows),
        draw=draw,
        height=HEIGHT_IN + _legend_height(list(shown)),
    )


def shares(
    key: str,
    title: str,
    samples: Mapping[str, Sequence[float]],
    *,
    unit: str,
    caption: str,
) -> Drawing:
    """Distributions: which share of the samples is at most x (no bins to be chosen)."""
    shown = dict(list(samples.items())[:MAX_SERIES])

    def draw(axes: Axes) -> None:
        for number, (name, values) in enumerate(shown.items()):
            look, ordered = LOOKS[number], np.sort(values)
            heights = np.arange(1, len(ordered) + 1) / len(ordered)
            axes.plot(
                np.concatenate([ordered[:1], ordered]),
                np.concatenate([[0.0], heights]),
                color=look.color,
                linestyle=look.line,
                drawstyle="steps-post",
                label=name,
                linewidth=1.5,
            )
            axes.plot(float(np.median(ordered)), 0.5, look.marker, color=look.color, markersize=5.5)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel(unit)
        axes.set_ylabel("share at most this")
        _legend(axes, len(shown))

    rows = [
        [name, len(values), *(float(np.percentile(values, p)) for p in (5, 25, 50, 75, 95))]
        for name, values in samples.items()
    ]
    return Drawing(
        key=key,
        title=title,
        alt=alt_text(f"{title}, {unit}", [f"{row[0]}: median {cell_text(row[4])}" for row in rows]),
        caption=_some(caption, len(samples)),
        numbers=Table(columns=["series", "n", "5 %", "25 %", "50 %", "75 %", "95 %"], rows=rows),
        draw=draw,
        height=HEIGHT_IN + _legend_height(list(shown)),
    )


def plane(key: str, title: str, dots: Sequence[Dot], *, x: str, y: str, caption: str) -> Drawing:
    """Points of two measures, numbered as in the table of numbers."""
    groups = list(dict.fromkeys(dot.group for dot in dots))

    def draw(axes: Axes) -> None:
        for number, group in enumerate(groups):
            look = LOOKS[number % MAX_SERIES]
            for dot in (one for one in dots if one.group == group):
                axes.plot(
                    [dot.x],
                    [dot.y],
                    look.marker,
                    color=look.color,
                    markersize=6.5,
                    markerfacecolor=PAPER if dot.hollow else look.color,
                )
            axes.plot([], [], look.marker, color=look.color, label=group)
        for dot in dots:
            above = dot.number % 2 == 0
            axes.annotate(
                str(dot.number),
                (dot.x, dot.y),
                xytext=(4, 4 if above else -10),
                textcoords="offset points",
                fontsize=FONT_PT - 1,
            )
        axes.margins(0.08)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        _legend(axes, len(groups))

    rows = [[dot.number, dot.label, dot.x, dot.y, "hollow" if dot.hollow else ""] for dot in dots]
    best = [f"{dot.label}: {cell_text(dot.x)}, {cell_text(dot.y)}" for dot in dots if not dot.hollow]
    return Drawing(
        key=key,
        title=title,
        alt=alt_text(f"{title}; {y} over {x}; points that no other beats", best),
        caption=caption,
        numbers=Table(columns=["number", "point", x, y, ""], rows=rows),
        draw=draw,
        height=HEIGHT_IN + 0.2 + _legend_height(groups),
    )


def parts(
    key: str,
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    *,
    caption: str,
    unit: str = "share of a step",
) -> Drawing:
    """Bars cut into parts, each part with a hatching of its own."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))

    def draw(axes: Axes) -> None:
        for height, (label, row) in enumerate(reversed(list(rows.items()))):
            left = 0.0
            for number, name in enumerate(names):
                width, look = row.get(name, 0.0), LOOKS[number % MAX_SERIES]
                axes.barh(
                    height,
                    width,
                    left=left,
                    height=0.42,
                    color=look.color,
                    hatch=look.hatch,
                    edgecolor=PAPER,
                    linewidth=0.8,
                    label=name if height == 0 else None,
                )
                left += width
            axes.text(0.0, height + 0.28, label, transform=axes.get_yaxis_transform(), fontsize=FONT_PT - 0.5)
        axes.set_ylim(-0.4, len(rows) - 0.25)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        _legend(axes, len(names), columns=2)

    table = [[label, *(row.get(name) for name in names)] for label, row in rows.items()]
    told = [
        f"{label}: " + ", ".join(f"{name} {value:.0%}" for name, value in row.items())
        for label, row in rows.items()
    ]
    return Drawing(
        key=key,
        title=title,
        alt=alt_text(title, told),
        caption=caption,
        numbers=Table(columns=["what", *names], rows=table),
        draw=draw,
        height=_AXIS_IN + _LEGEND_IN * -(-len(names) // 2) + 0.45 * len(rows),
    )


def number_with(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    """A number with its interval in brackets; a dash for what was not measured."""
    if value is None:
        return "-"
    text = f"{value:.{digits}f}"
    return text if interval is None else f"{text} ({interval[0]:.{digits}f}..{interval[1]:.{digits}f})"


def _legend(axes: Axes, count: int, columns: int = 1) -> None:
    if count > 1:
        handles, names = axes.get_legend_handles_labels()
        axes.legend(
            handles,
            [textwrap.fill(name, _LEGEND_LETTERS) for name in names],
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=columns,
            frameon=False,
            borderaxespad=0.2,
            borderpad=0.1,
            labelspacing=0.2,
            handlelength=2.6,
        )


def _legend_height(names: Sequence[str]) -> float:
    """Inches of a legend in one column; one name alone needs none."""
    lines_of = [max(1, len(textwrap.wrap(name, _LEGEND_LETTERS))) for name in names]
    return _LEGEND_IN * sum(lines_of) if len(names) > 1 else 0.0


def alt_text(what: str, told: Sequence[str]) -> str:
    """What a chart says, for who does not see it."""
    return f"Chart: {what}. " + "; ".join(told) + "."


def _some(caption: str, count: int) -> str:
    if count <= MAX_SERIES:
        return caption
    return f"{caption} The first {MAX_SERIES} of {count} series are drawn; the numbers have all."
