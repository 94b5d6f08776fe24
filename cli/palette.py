"""Colours of reports, and how series are told apart.

Owns both. Colours are those of Okabe and Ito (2008), told apart by colour-blind eyes, darker or lighter where
their contrast with the page would be too small; series differ in marker, line and hatching as well, so that a
report reads the same in grey. Needs no library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one series is drawn: colour, marker, line, hatching and the colour on a dark page."""

    color: str
    dark: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]
    hatch: str


LOOKS = (
    Look(color="#0072b2", dark="#56b4e9", marker="o", line="-", hatch=""),
    Look(color="#d55e00", dark="#e98a3c", marker="s", line="--", hatch="///"),
    Look(color="#009e73", dark="#1fbf92", marker="^", line="-.", hatch="..."),
    Look(color="#b5578c", dark="#d995bd", marker="D", line=":", hatch="xxx"),
    Look(color="#8a6d00", dark="#f0e442", marker="v", line=(0, (5, 1, 1, 1, 1, 1)), hatch="\\\\\\"),
    Look(color="#1f6f8b", dark="#8fd3ec", marker="P", line=(0, (8, 2)), hatch="++"),
    Look(color="#555556", dark="#bdbdbe", marker="X", line=(0, (1, 3)), hatch="oo"),
)

# a series beyond these would repeat a look: charts show this many, tables all
MAX_SERIES = len(LOOKS)
_SERIES = [f"series-{number}" for number in range(MAX_SERIES)]
# the page's variables: on a light screen and on paper, and on a dark screen
LIGHT = {
    "ink": "#1b1b1c",
    "soft": "#52565b",
    "paper": "#fefefd",
    "panel": "#f3f5f7",
    "grid": "#d8dbde",
    "mark": "#0a6fad",
} | {name: look.color for name, look in zip(_SERIES, LOOKS, strict=True)}
DARK = {
    "ink": "#e8eaed",
    "soft": "#a9b0b8",
    "paper": "#131619",
    "panel": "#1d2226",
    "grid": "#3a4147",
    "mark": "#56b4e9",
} | {name: look.dark for name, look in zip(_SERIES, LOOKS, strict=True)}
# those that charts are drawn in
DRAWN = frozenset({"ink", "grid", "paper", *_SERIES})
INK, GRID, PAPER = LIGHT["ink"], LIGHT["grid"], LIGHT["paper"]
