"""The picture of a sweep: fidelity against cost, and against the linear front of section 3.0.

Left: total variation a token against the target's processor time a committed token; points that another
dominates are hollow. Right: total variation at drafted positions against the share of drafts rejected there,
where drafts were drawn; no rule that verifies one draft can lie below the line TV = TV(p, q) - rejection.
Printable without colour: drafts differ by marker, and rules are numbered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from specdec.cli.sweeping.points import PLAIN
from specdec.layer_select.picture_theme import figure_with_canvas, png_bytes
from specdec.provenance import write_bytes_atomic

MARKERS = ("o", "s", "^", "D", "v", "P")
# where the number of a point stands: points of neighbouring settings lie close together
OFFSETS = ((6, 4), (6, -11), (-14, 4), (-14, -11))
LEGEND_COLUMNS = 4
INK, FAINT = "#222222", "#999999"


def sweep_figure(records: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draw the measured points of a sweep."""
    drafts = list(dict.fromkeys(record["draft"] for record in records))
    markers = {draft: MARKERS[index % len(MARKERS)] for index, draft in enumerate(drafts)}
    labels = list(dict.fromkeys(_rule_and_shape(record) for record in records))
    numbers = {label: number for number, label in enumerate(labels, start=1)}
    texts = [f"{number}  {label}" for label, number in numbers.items()] + drafts
    figure = figure_with_canvas(12, 5.2 + 0.17 * -(-len(texts) // LEGEND_COLUMNS))
    left, right = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=9)
    _cost_panel(left, records, markers, numbers)
    _front_panel(right, records, markers, numbers)
    handles = [Line2D([], [], linestyle="", marker="") for _ in numbers]
    handles += [Line2D([], [], linestyle="", marker=markers[draft], color=INK) for draft in drafts]
    figure.legend(
        handles,
        texts,
        loc="outside lower center",
        ncols=LEGEND_COLUMNS,
        fontsize=7,
        frameon=False,
        handlelength=1.2,
    )
    return figure


def draw_sweep(records: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Write the picture as a PNG, whole or not at all."""
    write_bytes_atomic(path, png_bytes(sweep_figure(records, title=title)))


def _rule_and_shape(record: dict[str, Any]) -> str:
    if record["draft"] == PLAIN:
        return f"plain, batch {record['batch_size']}"
    return f"{record['rule']}, {record['shape']}, batch {record['batch_size']}"


def _cost_panel(
    axes: Axes, records: Sequence[dict[str, Any]], markers: dict[str, str], numbers: dict[str, int]
) -> None:
    for record in records:
        if record["total_variation"] is None:
            continue
        _point(axes, record, record["verify_cpu_ms_per_token"], record["total_variation"], markers, numbers)
    axes.set_xlabel("processor ms of the target per committed token")
    axes.set_ylabel("total variation from the target's law, per token")
    axes.set_title("cost and fidelity: lower left is better; hollow: dominated", fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.6)


def _front_panel(
    axes: Axes, records: Sequence[dict[str, Any]], markers: dict[str, str], numbers: dict[str, int]
) -> None:
    drawn = []
    for record in records:
        variation, rejection = record["total_variation_drafted"], record["rejection_rate"]
        # deterministic drafts have a front of their own, that of a one-hot q
        if variation is None or rejection is None or record["draft_total_variation"] is None:
            continue
        drawn.append(record)
        _point(axes, record, rejection, variation, markers, numbers)
    gaps = [
        record["draft_total_variation"] for record in drawn if record["draft_total_variation"] is not None
    ]
    if gaps:
        middle = sum(gaps) / len(gaps)
        axes.plot([0, middle], [middle, 0], color=FAINT, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"linear front, TV(p, q) = {middle:.2f}",
            (middle / 2, middle / 2),
            color=FAINT,
            fontsize=8,
            rotation=-35,
            ha="center",
            va="bottom",
        )
    axes.set_xlabel("share of drafted tokens rejected")
    axes.set_ylabel("total variation at drafted tokens")
    axes.set_title("what giving up fidelity buys, drawn drafts", fontsize=9)
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd", linewidth=0.6)


def _point(
    axes: Axes,
    record: dict[str, Any],
    x: float,
    y: float,
    markers: dict[str, str],
    numbers: dict[str, int],
) -> None:
    axes.plot(
        [x],
        [y],
        marker=markers[record["draft"]],
        markersize=7,
        color=INK,
        markerfacecolor="white" if record["dominated"] else INK,
        linestyle="",
    )
    number = numbers[_rule_and_shape(record)]
    axes.annotate(
        str(number),
        (x, y),
        textcoords="offset points",
        xytext=OFFSETS[number % len(OFFSETS)],
        fontsize=8,
        color=INK,
    )
