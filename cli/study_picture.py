"""A study as one picture: every tap set's acceptance length and overlap, with intervals.

Owns the drawing; reads findings only. Numbers stand at the marks and the kinds of sets differ in shape as
well as in colour, so that it reads the same in grey print.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.cli.study_report import Finding
from specdec.layer_select.picture_theme import figure_with_canvas, png_bytes
from specdec.layer_select.references import DEFAULT, LAST, LAST_THIRD, UNIFORM
from specdec.provenance import write_bytes_atomic

RULES = (UNIFORM, LAST_THIRD, LAST)
# kind of set -> marker, colour
STYLES = {
    "chosen by measurement": ("D", "#b3301a"),
    "default triple": ("s", "#1f3a5f"),
    "fixed rule": ("o", "#4f7f3a"),
    "random": ("x", "0.45"),
}
PANELS = (
    ("acceptance_length", "acceptance length, tokens per verify step"),
    ("overlap", "overlap, mean sum min(p, q)"),
)


def kind_of(finding: Finding) -> str:
    """Which row of the legend a set belongs to."""
    names = finding.taps.names
    if any(not _is_baseline(name) for name in names):
        return "chosen by measurement"
    if DEFAULT in names:
        return "default triple"
    return "fixed rule" if any(name in RULES for name in names) else "random"


def _is_baseline(name: str) -> bool:
    return name in (DEFAULT, *RULES) or name.startswith("random")


def study_figure(findings: Sequence[Finding], *, title: str) -> Figure:
    """Draw findings, sets of equal size together, the longest acceptance on top."""
    ordered = sorted(findings, key=lambda f: (-len(f.taps.boundaries), f.values["acceptance_length"]))
    figure = figure_with_canvas(11, 1.6 + 0.3 * len(ordered))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, (name, label) in zip((left, right), PANELS, strict=True):
        _panel(axes, ordered, name)
        axes.set_xlabel(label)
    left.set_yticks(range(len(ordered)))
    left.set_yticklabels(
        [f"{f.label}  [{', '.join(str(b) for b in f.taps.boundaries)}]" for f in ordered], fontsize=9
    )
    handles, labels = left.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    figure.legend(first.values(), first.keys(), loc="outside lower center", ncols=4, frameon=False)
    seeds = sorted({f.seeds for f in ordered})
    figure.suptitle(
        f"{title}; {' to '.join(str(s) for s in {seeds[0], seeds[-1]})} seeds a set, 95 % intervals",
        fontsize=11,
    )
    return figure


def _panel(axes: Axes, ordered: Sequence[Finding], name: str) -> None:
    for height, finding in enumerate(ordered):
        marker, color = STYLES[kind_of(finding)]
        low, high = finding.intervals[name]
        axes.plot([low, high], [height, height], color=color, linewidth=1.1)
        axes.plot(
            finding.values[name],
            height,
            marker,
            color=color,
            markersize=6,
            linestyle="none",
            label=kind_of(finding),
        )
    sizes = [len(f.taps.boundaries) for f in ordered]
    for height in range(1, len(ordered)):
        if sizes[height] != sizes[height - 1]:
            axes.axhline(height - 0.5, color="0.6", linewidth=0.8)
    axes.grid(axis="x", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)


def draw_study(findings: Sequence[Finding], path: Path, *, title: str) -> None:
    """Write the picture as a PNG, whole or not at all."""
    write_bytes_atomic(path, png_bytes(study_figure(findings, title=title)))
