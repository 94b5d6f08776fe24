"""The selection as pictures: evidence, landscape of all sets, stability.

Owns the picture of the evidence (CKA heatmap beside the informativeness profile, chosen boundaries marked)
and the files. Reads only a selection document, so that pictures can be made again from its file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specdec.layer_select.picture_files import picture_paths
from specdec.layer_select.picture_landscape import draw_landscape
from specdec.layer_select.picture_stability import draw_stability
from specdec.layer_select.picture_theme import (
    PRINT,
    SCREEN,
    Theme,
    figure_with_canvas,
    headline,
    png_bytes,
    setting,
)

# height of one label line as a part of the axes' height.
LABEL_HEIGHT = 0.037


def draw_evidence(document: dict[str, Any], theme: Theme = SCREEN) -> Figure:
    """Draw CKA and the profile of the estimator."""
    chosen = document["boundaries"]
    values, meaning = _profile(document)
    size = len(document["cka"])
    figure = figure_with_canvas(10.5, 5.6)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.35, 1])
    image = left.imshow(document["cka"], cmap=theme.heat, vmin=0, vmax=1, origin="lower")
    figure.colorbar(image, ax=left, label="debiased linear CKA", location="left", shrink=0.85)
    # a frame must stay a frame where a cell is a few pixels wide.
    side = max(4.0, min(9.0, 220 / size))
    for row in chosen:
        for column in chosen:
            for color, width in ((theme.frame_edge, 2.6), (theme.frame, 1.3)):
                left.plot(
                    column, row, marker="s", markersize=side, mfc="none", mec=color, mew=width, clip_on=False
                )
    left.set_xlabel("boundary b (0 = embedding output)")
    left.set_ylabel("boundary b")
    left.set_title("Similarity of boundaries", fontsize=11)
    right.plot(values, range(size), color=theme.profile, marker=".", linewidth=1.3)
    for boundary in chosen:
        right.axhline(boundary, color=theme.chosen, linestyle=(0, (4, 3)), linewidth=1.0)
        right.plot(values[boundary], boundary, "D", color=theme.chosen, markersize=7)
    # labels stand outside the axes, where no line crosses them.
    for boundary, height in zip(chosen, _spread(chosen, LABEL_HEIGHT * size), strict=True):
        right.text(
            1.015,
            height,
            f"b = {boundary}",
            transform=right.get_yaxis_transform(),
            color=theme.chosen,
            fontsize=10,
            verticalalignment="center",
        )
    right.grid(axis="x", color="0.88", linewidth=0.8)
    right.set_axisbelow(True)
    right.set_xlabel(meaning)
    right.set_title("Informativeness", fontsize=11)
    right.xaxis.set_major_locator(MaxNLocator(nbins=5))
    for axis in (left.xaxis, left.yaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    rest = f"{document['cost']['tokens']:,} tokens, {setting(document)}"
    figure.suptitle(headline(document, rest), fontsize=12)
    return figure


def _profile(document: dict[str, Any]) -> tuple[list[float], str]:
    """Values over boundaries of what decided, and what they mean."""
    if list(document["objective"]["terms"]) == ["probe"]:
        return document["evidence"]["probe_explained"], "variance the ridge probe explains from one boundary"
    score = document["scores"][document["estimator"]]
    direction = "higher is richer" if score["sign"] > 0 else "lower is richer"
    return score["values"], f"{document['estimator']} / {score['normalization']} ({direction})"


def _spread(ascending: list[int], distance: float) -> list[float]:
    """Move label heights up just enough that neighbours are `distance` apart."""
    heights: list[float] = []
    for wanted in ascending:
        heights.append(max(float(wanted), heights[-1] + distance) if heights else float(wanted))
    return heights


def render_pictures(
    path: str | Path, document: dict[str, Any], *, print_too: bool = False
) -> dict[Path, bytes]:
    """Draw all pictures of a document as PNG.

    Args:
        path: of the evidence; the others are named after it.
        document: the selection.
        print_too: also draw the variants for paper.
    """
    themes = (SCREEN, PRINT) if print_too else (SCREEN,)
    figures = [
        draw(document, theme) for theme in themes for draw in (draw_evidence, draw_landscape, draw_stability)
    ]
    files = picture_paths(path, print_too=print_too)
    return {file: png_bytes(figure) for file, figure in zip(files, figures, strict=True)}
