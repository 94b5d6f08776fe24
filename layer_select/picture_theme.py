"""How pictures of a selection look: on a screen, and on paper.

Owns the two themes. On a screen, colours of the Okabe-Ito set, told apart by colour-blind eyes, and
cividis, which rises in lightness alone. On paper, black, greys and hatching: what colour says is also said
by shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colours and hatching.

    Attributes:
        heat: Colour map of the CKA matrix.
        frame: Frame of the chosen cells in it, drawn over `frame_edge`.
        frame_edge: A wider line under the frame, so that it stands out on any cell.
        chosen: Of what is chosen.
        profile: Of measured curves.
        other: Of what is not chosen, as a fill.
        hatch: Hatching of what is chosen, as a fill.
    """

    heat: str
    frame: str
    frame_edge: str
    chosen: str
    profile: str
    other: str
    hatch: str | None


SCREEN = Theme(
    heat="cividis",
    frame="white",
    frame_edge="black",
    chosen="#d55e00",
    profile="#0072b2",
    other="#9fc3dd",
    hatch=None,
)
PRINT = Theme(
    heat="Greys",
    frame="black",
    frame_edge="white",
    chosen="black",
    profile="0.35",
    other="0.8",
    hatch="////",
)
DOTS_PER_INCH = 150
MARKERS = ("D", "o", "s", "^", "v", "P", "X")


def figure_with_canvas(width: float, height: float) -> Figure:
    """An empty figure of its own: pyplot, and with it global state, is never touched."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png_bytes(figure: Figure) -> bytes:
    """A figure as the content of a PNG file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
    return buffer.getvalue()


def boundary_axis(axes: Axes, num_layers: int) -> None:
    """Whole boundaries 0..N along the x axis."""
    axes.set_xlim(-0.7, num_layers + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    axes.set_xlabel("boundary b (0 = embedding output)")


def headline(document: dict[str, Any], rest: str) -> str:
    """Target and choice, then what the picture shows."""
    target, names = document["target"], spelled(document["boundaries"])
    return f"{target['name']}: boundaries {names} of 0..{target['num_layers']}  |  {rest}"


def setting(document: dict[str, Any]) -> str:
    """What decided: the probe alone, or the weight of diversity."""
    alone = list(document["objective"]["terms"]) == ["probe"]
    return "ridge probe alone" if alone else f"lambda {document['lambda']:g}"


def spelled(boundaries: list[int]) -> str:
    """A set in few characters."""
    return ", ".join(str(boundary) for boundary in boundaries)
