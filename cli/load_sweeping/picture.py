"""The picture of a load sweep: adaptive speculation over none and over the best fixed setting, by clients.

One panel for each prompt set. Told apart without colour by markers and lines; whiskers are intervals over
turns, and the shaded band is what the policy promises: never below 0.97 of no speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from specdec.cli.load_sweeping.turns import ADAPTIVE, OFF
from specdec.layer_select.picture_theme import MARKERS, SCREEN, figure_with_canvas, png_bytes
from specdec.provenance import write_bytes_atomic

FLOOR = 0.97


def load_sweep_figure(points: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draw the points of a sweep."""
    sets = list(dict.fromkeys(point["data"] for point in points))
    figure = figure_with_canvas(4.6 * len(sets), 4.4)
    figure.suptitle(title, fontsize=9)
    for axes, name in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
        _panel(axes, [point for point in points if point["data"] == name], name)
    return figure


def draw_load_sweep(points: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the picture as a PNG, whole or not at all."""
    write_bytes_atomic(path, png_bytes(load_sweep_figure(points, title=title)))


def _panel(axes: Axes, points: Sequence[dict[str, Any]], name: str) -> None:
    clients = sorted(point["clients"] for point in points)
    axes.axhspan(FLOOR, 1.0, color="#dddddd", linewidth=0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    fixed = sorted({one for point in points for one in point["settings"]} - {ADAPTIVE, OFF})
    for index, setting in enumerate(fixed):
        drawn = [
            (point["clients"], point["settings"][setting]["over_off"]["value"])
            for point in points
            if setting in point["settings"] and point["settings"][setting]["over_off"]
        ]
        axes.plot(
            *zip(*sorted(drawn), strict=True),
            color="0.6",
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=0.7,
            linestyle=":",
            label=f"{setting} / off",
        )
    _ratio(axes, points, "adaptive_over_off", "adaptive / off", SCREEN.chosen, "o", "-")
    _ratio(axes, points, "adaptive_over_best_fixed", "adaptive / best fixed", SCREEN.profile, "s", "--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(clients))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(count) for count in clients])
    axes.set_xlabel("clients at once")
    axes.set_ylabel("tokens per second, ratio")
    axes.set_title(name, fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def _ratio(
    axes: Axes, points: Sequence[dict[str, Any]], name: str, label: str, color: str, marker: str, style: str
) -> None:
    drawn = sorted(
        ((point["clients"], point[name]) for point in points if point[name] is not None),
        key=lambda pair: pair[0],
    )
    values = [found["value"] for _, found in drawn]
    bounds = [found["interval"] or (found["value"], found["value"]) for _, found in drawn]
    axes.errorbar(
        [clients for clients, _ in drawn],
        values,
        yerr=[
            [max(0.0, value - low) for value, (low, _) in zip(values, bounds, strict=True)],
            [max(0.0, high - value) for value, (_, high) in zip(values, bounds, strict=True)],
        ],
        color=color,
        marker=marker,
        linestyle=style,
        label=label,
        markersize=5,
        linewidth=1.4,
        capsize=3,
    )
