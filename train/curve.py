"""The course of a training run as a picture, from its `metrics.jsonl`.

Owns the picture. Reads the log alone, so that a picture can be made again, and of a run that still goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.layer_select.picture_theme import MARKERS, SCREEN, figure_with_canvas, png_bytes
from specdec.provenance import write_bytes_atomic
from specdec.train.metrics import METRICS_NAME

CURVE_NAME = "curve.png"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# of the points kept as they are, the line is the mean of so many around
SMOOTHING = 9


def write_curve(folder: Path) -> Path | None:
    """Draw a run folder's log into `curve.png`; None where the log holds no step yet."""
    path = folder / METRICS_NAME
    if not path.exists():
        return None
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not any("loss" in entry for entry in entries):
        return None
    write_bytes_atomic(folder / CURVE_NAME, png_bytes(draw_curve(entries)))
    return folder / CURVE_NAME


def draw_curve(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss, simulated acceptance by depth, and measured acceptance length, over optimiser steps."""
    steps = [entry for entry in entries if "loss" in entry]
    measured = [entry for entry in entries if "eval" in entry]
    figure = figure_with_canvas(11.0, 3.6)
    loss, simulated, length = figure.subplots(1, 3)
    at = [entry["step"] for entry in steps]
    values = [entry["loss"] for entry in steps]
    loss.plot(at, values, ".", color=SCREEN.other, markersize=3)
    loss.plot(at, _smooth(values), color=SCREEN.profile, linewidth=1.5)
    loss.set_title("loss a trained token", fontsize=10)
    for depth in range(max((len(entry["greedy"]) for entry in steps), default=0)):
        simulated.plot(
            at,
            _smooth([entry["greedy"][depth] for entry in steps]),
            color=COLOURS[depth % len(COLOURS)],
            linewidth=1.5,
            label=f"depth {depth + 1}",
        )
    simulated.set_title("simulated acceptance, greedy", fontsize=10)
    simulated.legend(fontsize=8, frameon=False)
    _lengths(length, measured)
    length.set_title("acceptance length, held out", fontsize=10)
    for axes in (loss, simulated, length):
        axes.set_xlabel("optimiser step")
        axes.grid(color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
    return figure


def _lengths(axes: Axes, measured: Sequence[Mapping[str, Any]]) -> None:
    for number, (key, label) in enumerate((("offline_acceptance", "offline"), ("engine", "in the engine"))):
        points = [
            (entry["step"], entry["eval"][key]["acceptance_length"])
            for entry in measured
            if entry["eval"].get(key) and entry["eval"][key]["acceptance_length"] is not None
        ]
        if points:
            axes.plot(
                [step for step, _ in points],
                [value for _, value in points],
                marker=MARKERS[number],
                markersize=4,
                color=COLOURS[number],
                label=label,
            )
    if axes.lines:
        axes.legend(fontsize=8, frameon=False)
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes, color="0.5")


def _smooth(values: Sequence[float]) -> list[float]:
    """Means over `SMOOTHING` points, fewer at the ends."""
    half = SMOOTHING // 2
    parts = [values[max(0, index - half) : index + half + 1] for index in range(len(values))]
    return [sum(part) / len(part) for part in parts]
