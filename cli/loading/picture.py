"""The picture of a sweep over clients: throughput, time to first token, time per token.

Printable without colour: medians are whole lines, 99th percentiles dashed, each with a marker of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from specdec.layer_select.picture_theme import SCREEN, figure_with_canvas, png_bytes
from specdec.provenance import write_bytes_atomic


def load_figure(points: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draw the points of a sweep."""
    figure = figure_with_canvas(12, 4)
    figure.suptitle(title, fontsize=9)
    throughput, first, each = figure.subplots(1, 3)
    _curve(throughput, points, lambda point: point["output_throughput"], "tokens", SCREEN.profile, "o", "-")
    _label(throughput, points, "output tokens per second", "throughput: higher is better")
    for axes, name, text in ((first, "ttft_ms", "time to first token"), (each, "tpot_ms", "time per token")):
        _curve(axes, points, _of(name, "median"), "median", SCREEN.profile, "o", "-")
        _curve(axes, points, _of(name, "p99"), "99th percentile", SCREEN.chosen, "s", "--")
        _label(axes, points, "ms", f"{text}: lower is better")
        axes.legend(fontsize=8, frameon=False)
    return figure


def draw_load(points: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the picture as a PNG, whole or not at all."""
    write_bytes_atomic(path, png_bytes(load_figure(points, title=title)))


def _of(name: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda point: (point[name] or {}).get(key)


def _curve(
    axes: Axes,
    points: Sequence[dict[str, Any]],
    value: Callable[[dict[str, Any]], float | None],
    label: str,
    color: str,
    marker: str,
    style: str,
) -> None:
    drawn = sorted((point["concurrency"], y) for point in points if (y := value(point)) is not None)
    axes.plot(
        [x for x, _ in drawn],
        [y for _, y in drawn],
        color=color,
        marker=marker,
        linestyle=style,
        label=label,
        markersize=5,
        linewidth=1.4,
    )


def _label(axes: Axes, points: Sequence[dict[str, Any]], unit: str, title: str) -> None:
    clients = sorted(point["concurrency"] for point in points)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(clients))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(count) for count in clients])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients at once")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.6)
