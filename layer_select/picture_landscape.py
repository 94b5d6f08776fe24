"""The landscape of all sets as a picture: where the choice stands, and where simple rules stand.

Owns the drawing; reads only a selection document.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from specdec.layer_select.picture_theme import (
    MARKERS,
    SCREEN,
    Theme,
    figure_with_canvas,
    headline,
    spelled,
)

NAMES = {
    "default": "default [2, N/2, N-3]",
    "uniform": "uniform",
    "last_third": "last third",
    "last": "last boundary",
}


def draw_landscape(document: dict[str, Any], theme: Theme = SCREEN) -> Figure:
    """Draw the histogram of the objective over all sets, and named sets in rows beneath it."""
    landscape = document["landscape"]
    rows = _rows(document)
    figure = figure_with_canvas(10.5, 3.6 + 0.34 * len(rows))
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.0, 0.34 * len(rows) + 0.3])
    edges, counts = landscape["edges"], landscape["counts"]
    widths = [high - low for low, high in pairwise(edges)]
    top.bar(
        edges[:-1], counts, width=widths, align="edge", color=theme.other, edgecolor="white", linewidth=0.4
    )
    top.axvline(document["objective"]["value"], color=theme.chosen, linewidth=1.8)
    top.axvline(landscape["mean"], color="0.35", linewidth=1.2, linestyle=(0, (2, 2)))
    top.set_ylabel("sets")
    kind = (
        f"a random sample of {landscape['sets']:,} sets"
        if landscape["sampled"]
        else f"all {landscape['sets']:,} sets"
    )
    top.set_title(f"Objective of {kind} that may be chosen", fontsize=11)
    for height, (_, value, note, is_chosen) in enumerate(rows):
        color = theme.chosen if is_chosen else theme.profile
        below.axhline(height, color="0.9", linewidth=0.8, zorder=0)
        below.plot(value, height, MARKERS[min(height, len(MARKERS) - 1)], color=color, markersize=8, zorder=3)
        below.text(
            1.012, height, note, transform=below.get_yaxis_transform(), fontsize=9, verticalalignment="center"
        )
    below.axvline(document["objective"]["value"], color=theme.chosen, linewidth=1.0, zorder=1)
    below.axvline(landscape["mean"], color="0.35", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    below.set_yticks(range(len(rows)), [label for label, *_ in rows])
    below.set_ylim(len(rows) - 0.4, -0.6)
    below.set_xlabel(_axis_name(document))
    for side in ("top", "right"):
        top.spines[side].set_visible(False)
        below.spines[side].set_visible(False)
    figure.suptitle(headline(document, f"found by {document['search']} search"), fontsize=12)
    return figure


def _rows(document: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """Label, objective, remark and whether it is the choice, of each named set."""
    best = document["objective"]
    rows = [(f"chosen  {spelled(best['boundaries'])}", best["value"], "", True)]
    if document["runners_up"]:
        second = document["runners_up"][0]
        rows.append((f"runner-up  {spelled(second['boundaries'])}", second["value"], "", False))
    for name, reference in document["references"].items():
        label = f"{NAMES[name]}  {spelled(reference['boundaries'])}"
        remark = f"{100 * reference['better']:.1f} % of sets are better"
        rows.append((label, reference["value"], remark, False))
    rows.append(("a random set, on average", document["landscape"]["mean"], "dashed line", False))
    return rows


def _axis_name(document: dict[str, Any]) -> str:
    terms = document["objective"]["terms"]
    if len(terms) == 1:
        [name] = terms
        if name == "probe":
            return "overlap of the ridge probe"
        return f"J = mean z-scored {name.removesuffix('+cka')} - {document['lambda']:g} x mean pairwise CKA"
    parts = ", ".join(f"{name} x {weight:g}" for name, weight in terms.items())
    return f"objective ({parts}; lambda {document['lambda']:g})"
