"""A study as one picture: acceptance lengths of sets or recipes, and paired differences from the reference.

Owns the drawing; reads findings only. The intervals of a length are wide because conversations differ; what
tells sets apart are the differences paired by conversation, so these get panels of their own. Numbers stand
at the marks and the kinds of sets differ in shape as well as in colour, so that it reads the same in grey
print.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specdec.cli.studying.report import Finding
from specdec.layer_select.picture_theme import figure_with_canvas, png_bytes
from specdec.layer_select.references import DEFAULT, LAST, LAST_THIRD, UNIFORM
from specdec.provenance import write_bytes_atomic
from specdec.train.study_arms import is_rule
from specdec.train.study_recipes import BASE

RULES = (UNIFORM, LAST_THIRD, LAST)
# kind of set -> marker, colour
STYLES = {
    "chosen by measurement": ("D", "#b3301a"),
    "recipe": ("D", "#b3301a"),
    "study's own training": ("s", "#1f3a5f"),
    "default triple": ("s", "#1f3a5f"),
    "fixed rule": ("o", "#4f7f3a"),
    "random": ("x", "0.45"),
}
LENGTH = "acceptance_length"
DIFFERENCES = (
    (LENGTH, "acceptance length"),
    ("overlap", "overlap, mean sum min(p, q)"),
)


def kind_of(finding: Finding) -> str:
    """Which row of the legend a set belongs to."""
    names = finding.taps.names
    if finding.recipe is not None:
        return "recipe"
    if names == (BASE,):
        return "study's own training"
    if any(not is_rule(name) for name in names):
        return "chosen by measurement"
    if DEFAULT in names:
        return "default triple"
    return "fixed rule" if any(name in RULES for name in names) else "random"


def study_figure(findings: Sequence[Finding], *, title: str) -> Figure:
    """Draw findings, sets of equal size together, the longest acceptance on top."""
    ordered = sorted(findings, key=lambda f: (-len(f.taps.boundaries), f.values["acceptance_length"]))
    figure = figure_with_canvas(14, 1.9 + 0.34 * len(ordered))
    left, *others = figure.subplots(1, 1 + len(DIFFERENCES), sharey=True)
    _panel(left, ordered, [(f.values[LENGTH], f.intervals[LENGTH]) for f in ordered], "{:.3f}")
    left.set_xlabel("acceptance length, tokens per verify step")
    for axes, (name, label) in zip(others, DIFFERENCES, strict=True):
        found = [f.differences.get(name) for f in ordered]
        _panel(
            axes, ordered, [None if one is None else (one.value, one.interval) for one in found], "{:+.3f}"
        )
        axes.axvline(0.0, color="0.3", linewidth=0.9, linestyle="--")
        axes.set_xlabel(f"{label}:\npaired difference from the reference")
    left.set_yticks(range(len(ordered)))
    left.set_yticklabels(
        [f"{f.label}  [{', '.join(str(b) for b in f.taps.boundaries)}]" for f in ordered], fontsize=9
    )
    handles, labels = left.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    figure.legend(first.values(), first.keys(), loc="outside lower center", ncols=4, frameon=False)
    seeds = sorted({f.seeds for f in ordered})
    recipes = any(f.recipe is not None for f in ordered)
    figure.suptitle(
        f"{title}; {' to '.join(str(s) for s in dict.fromkeys((seeds[0], seeds[-1])))} seeds a "
        f"{'recipe' if recipes else 'set'}, 95 % intervals; reference: "
        + (
            "the study's own training"
            if recipes
            else "the default triple, or the uniform set where K is not 3"
        ),
        fontsize=11,
    )
    return figure


Mark = tuple[float, tuple[float, float]]


def _panel(axes: Axes, ordered: Sequence[Finding], marks: Sequence[Mark | None], number: str) -> None:
    """Draw a value with its interval for every set; a set without one is its own reference."""
    for height, (finding, mark) in enumerate(zip(ordered, marks, strict=True)):
        if mark is None:
            continue
        marker, color = STYLES[kind_of(finding)]
        value, (low, high) = mark
        axes.plot([low, high], [height, height], color=color, linewidth=1.1)
        axes.plot(value, height, marker, color=color, markersize=6, linestyle="none", label=kind_of(finding))
        axes.annotate(
            number.format(value),
            (high, height),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.margins(x=0.2)
    axes.locator_params(axis="x", nbins=6)
    sizes = [len(f.taps.boundaries) for f in ordered]
    for height in range(1, len(ordered)):
        if sizes[height] != sizes[height - 1]:
            axes.axhline(height - 0.5, color="0.6", linewidth=0.8)
    axes.grid(axis="x", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)


def draw_study(findings: Sequence[Finding], path: Path, *, title: str) -> None:
    """Write the picture as a PNG, whole or not at all."""
    write_bytes_atomic(path, png_bytes(study_figure(findings, title=title)))
