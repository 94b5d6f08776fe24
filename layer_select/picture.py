"""The selection as one picture: CKA heatmap beside the entropy profile, chosen boundaries marked.

Owns the drawing; reads only a selection document, so that a picture can be made again from its file. Colours:
cividis, which rises in lightness alone, reads the same with colour-blind eyes and in grey print.
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specdec.errors import SpecdecError

CHOSEN_COLOR = "#b3301a"
PROFILE_COLOR = "#1f3a5f"
# height of one label line as a part of the axes' height.
LABEL_HEIGHT = 0.037


def draw_selection(document: dict[str, Any]) -> Figure:
    """Draw a selection document."""
    chosen = document["boundaries"]
    score = document["scores"][document["estimator"]]
    size = len(document["cka"])
    figure = Figure(figsize=(10.5, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.35, 1])
    image = left.imshow(document["cka"], cmap="cividis", vmin=0, vmax=1, origin="lower")
    figure.colorbar(image, ax=left, label="debiased linear CKA", location="left", shrink=0.85)
    for row in chosen:
        for column in chosen:
            left.plot(
                column,
                row,
                marker="s",
                markersize=7,
                markerfacecolor="none",
                markeredgecolor="white",
                mew=1.8,
            )
    left.set_xlabel("boundary b (0 = embedding output)")
    left.set_ylabel("boundary b")
    left.set_title("Similarity of boundaries", fontsize=11)
    right.plot(score["values"], range(size), color=PROFILE_COLOR, marker=".", linewidth=1.3)
    for boundary in chosen:
        right.axhline(boundary, color=CHOSEN_COLOR, linestyle=(0, (4, 3)), linewidth=1.0)
        right.plot(score["values"][boundary], boundary, "D", color=CHOSEN_COLOR, markersize=7)
    # labels stand outside the axes, where no line crosses them.
    for boundary, height in zip(chosen, _spread(chosen, LABEL_HEIGHT * size), strict=True):
        right.text(
            1.015,
            height,
            f"b = {boundary}",
            transform=right.get_yaxis_transform(),
            color=CHOSEN_COLOR,
            fontsize=10,
            verticalalignment="center",
        )
    right.grid(axis="x", color="0.88", linewidth=0.8)
    right.set_axisbelow(True)
    direction = "higher is richer" if score["sign"] > 0 else "lower is richer"
    right.set_xlabel(f"{document['estimator']} / {score['normalization']} ({direction})")
    right.set_title("Informativeness", fontsize=11)
    for axes in (left, right):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(_headline(document), fontsize=12)
    return figure


def _spread(ascending: list[int], distance: float) -> list[float]:
    """Move label heights up just enough that neighbours are `distance` apart."""
    heights: list[float] = []
    for wanted in ascending:
        heights.append(max(float(wanted), heights[-1] + distance) if heights else float(wanted))
    return heights


def _headline(document: dict[str, Any]) -> str:
    names = ", ".join(str(boundary) for boundary in document["boundaries"])
    text = (
        f"{document['target']['name']}: boundaries {names} of 0..{document['target']['num_layers']}"
        f"  |  {document['cost']['tokens']:,} tokens, lambda {document['lambda']:g}"
    )
    if document["stability"] is not None:
        text += f", chosen in {100 * document['stability']['subset_frequency']:.0f} % of resamples"
    return text


def write_picture(path: str | Path, document: dict[str, Any]) -> None:
    """Draw a selection document to a PNG, whole or not at all."""
    path = Path(path)
    buffer = BytesIO()
    draw_selection(document).savefig(buffer, format="png", dpi=150)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(buffer.getvalue())
        os.replace(partial, path)
    except OSError as error:
        raise SpecdecError(f"picture ({path}) cannot be written: {error}") from error
