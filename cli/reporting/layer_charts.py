"""The two charts of a layer selection: similarity of boundaries, and what each of them says.

Owns their drawing. Knows nothing of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from specdec.cli.palette import LOOKS
from specdec.cli.paper import Table, cell_text
from specdec.cli.reporting.chart_render import FONT_PT, Drawing
from specdec.cli.reporting.charts import alt_text


def matrix(
    key: str, title: str, values: Sequence[Sequence[float]], framed: Sequence[int], *, unit: str, caption: str
) -> Drawing:
    """A matrix over boundaries as shades; the cells of `framed` rows and columns carry a frame."""

    def draw(axes: Axes) -> None:
        axes.grid(visible=False)
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, origin="lower", interpolation="nearest")
        bar = axes.figure.colorbar(image, ax=axes, label=unit, shrink=0.9)
        bar.outline.set_visible(False)
        for row in framed:
            for column in framed:
                for color, width in (("black", 2.4), ("white", 1.2)):
                    axes.plot(column, row, "s", markersize=6, mfc="none", mec=color, mew=width, clip_on=False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        axes.set_xlabel("boundary b (0 = embedding output)")
        axes.set_ylabel("boundary b")

    pairs = [[a, b, values[a][b]] for a in framed for b in framed if a < b]
    return Drawing(
        key=key,
        title=title,
        alt=alt_text(f"{title}; between the chosen", [f"{a} and {b}: {value:.2f}" for a, b, value in pairs]),
        caption=caption,
        numbers=Table(columns=["boundary", "boundary", unit], rows=pairs),
        draw=draw,
        height=3.5,
    )


def profile(
    key: str, title: str, values: Sequence[float], chosen: Sequence[int], *, y: str, caption: str
) -> Drawing:
    """A value of every boundary, the chosen ones marked and named."""

    def draw(axes: Axes) -> None:
        axes.plot(range(len(values)), values, ".-", color=LOOKS[0].color, linewidth=1.3)
        for boundary in chosen:
            axes.axvline(boundary, color=LOOKS[1].color, linestyle=(0, (4, 3)), linewidth=1.0)
            axes.plot([boundary], [values[boundary]], "D", color=LOOKS[1].color, markersize=6.5)
            axes.annotate(
                str(boundary),
                (boundary, values[boundary]),
                xytext=(3, 6),
                textcoords="offset points",
                fontsize=FONT_PT,
            )
        axes.margins(y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_xlabel("boundary b (0 = embedding output)")
        axes.set_ylabel(y)

    rows: list[list[Any]] = [[b, value, b in chosen] for b, value in enumerate(values)]
    return Drawing(
        key=key,
        title=title,
        alt=alt_text(f"{title}; chosen", [f"boundary {b}: {cell_text(float(values[b]))}" for b in chosen]),
        caption=caption,
        numbers=Table(columns=["boundary", y, "chosen"], rows=rows),
        draw=draw,
    )
