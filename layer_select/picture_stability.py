"""How sure the choice is, as a picture.

Owns the drawing; reads only a selection document. Above: how often each boundary is chosen when texts are
resampled. Below: what is chosen from fewer texts, from one domain, or by another estimator, one row each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.layer_select.picture_theme import (
    SCREEN,
    Theme,
    boundary_axis,
    figure_with_canvas,
    headline,
    setting,
)

FRACTIONS = {0.125: "1/8", 0.25: "1/4", 0.5: "1/2", 1.0: "all"}
ROW_HEIGHT = 0.27
# a dot of this area stands for a boundary that is always chosen.
FULL_DOT = 90.0


@dataclass(frozen=True)
class _Row:
    """A condition: its name, how often it chooses each boundary, and a remark."""

    group: str
    label: str
    frequency: dict[int, float]
    remark: str


def draw_stability(document: dict[str, Any], theme: Theme = SCREEN) -> Figure:
    """Draw bootstrap frequencies and the choice under other conditions."""
    stability = document["stability"]
    bootstrap = stability["bootstrap"]
    rows = _rows(document)
    gaps = len({row.group for row in rows}) - 1
    below_height = ROW_HEIGHT * (len(rows) + max(gaps, 0) + 1)
    figure = figure_with_canvas(10.5, 3.4 + below_height)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, below_height])
    _draw_bootstrap(top, document, bootstrap, theme)
    _draw_rows(below, rows, document["boundaries"], theme)
    boundary_axis(below, document["target"]["num_layers"])
    for axes in (top, below):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    rest = f"{setting(document)}{_region(document['lambda_sweep'])}"
    figure.suptitle(headline(document, rest), fontsize=12)
    return figure


def _draw_bootstrap(
    axes: Axes, document: dict[str, Any], bootstrap: dict[str, Any] | None, theme: Theme
) -> None:
    chosen = set(document["boundaries"])
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.set_ylabel("chosen in")
    if bootstrap is None:
        axes.set_title("Texts were not resampled", fontsize=11)
        return
    for boundary, part in enumerate(bootstrap["boundary_frequency"]):
        mine = boundary in chosen
        axes.bar(
            boundary,
            part,
            width=0.78,
            color="white" if mine and theme.hatch else theme.chosen if mine else theme.other,
            edgecolor=theme.chosen if mine else theme.profile,
            hatch=theme.hatch if mine else None,
            linewidth=0.8,
        )
    axes.set_title(
        f"{bootstrap['resamples']} resamples of {bootstrap['units']} {bootstrap['unit']}: the same set in "
        f"{100 * bootstrap['subset_frequency']:.0f} %",
        fontsize=11,
    )


def _draw_rows(axes: Axes, rows: list[_Row], chosen: list[int], theme: Theme) -> None:
    heights: list[float] = []
    for row in rows:
        new_group = bool(heights) and row.group != rows[len(heights) - 1].group
        heights.append((heights[-1] + 1 + new_group) if heights else 0.0)
    for boundary in chosen:
        axes.axvline(boundary, color=theme.chosen, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    for row, height in zip(rows, heights, strict=True):
        axes.axhline(height, color="0.92", linewidth=0.8, zorder=0)
        for boundary, part in row.frequency.items():
            mine = boundary in chosen
            axes.scatter(
                boundary,
                height,
                s=FULL_DOT * part,
                marker="D" if mine else "o",
                facecolor=theme.chosen if mine else "white",
                edgecolor=theme.chosen if mine else theme.profile,
                linewidth=1.3,
                zorder=3,
            )
        axes.text(
            1.012,
            height,
            row.remark,
            transform=axes.get_yaxis_transform(),
            fontsize=9,
            verticalalignment="center",
        )
    axes.set_yticks(heights, [row.label for row in rows])
    axes.set_title(
        "The choice from other evidence (area: how often; diamond: also in the choice)", fontsize=11
    )
    axes.set_ylim((heights[-1] if heights else 0) + 0.7, -0.7)


def _rows(document: dict[str, Any]) -> list[_Row]:
    stability, count = document["stability"], len(document["boundaries"])
    rows = []
    for size in stability["sizes"]:
        sample = size["sample"]
        frequency = {b: part for b, part in enumerate(sample["boundary_frequency"]) if part > 0}
        label = f"{FRACTIONS[size['fraction']]} of the texts ({size['tokens']:,} tokens)"
        remark = f"same set in {100 * sample['subset_frequency']:.0f} %"
        rows.append(_Row("size", label, frequency, remark))
    for group, title in (("domains", "only {name} ({tokens:,} tokens)"), ("estimators", "{name}")):
        for choice in stability[group]:
            shared = round(choice["overlap"] * count)
            label = title.format(name=choice["name"], tokens=choice["tokens"] or 0)
            remark = "same set" if shared == count else f"{shared} of {count} the same"
            rows.append(_Row(group, label, dict.fromkeys(choice["boundaries"], 1.0), remark))
    return rows


def _region(sweep: dict[str, Any] | None) -> str:
    if sweep is None:
        return ""
    high = "any more" if sweep["stable_high"] is None else f"{sweep['stable_high']:.2f}"
    return f", same set from {sweep['stable_low']:.2f} to {high}"
