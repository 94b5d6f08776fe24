"""How far lambda can move before the choice changes.

Owns the sweep over a grid and the stable region around the lambda in use. For an exhaustive search of the
evidence alone the region is exact: J(S) = a(S) - lambda * b(S) is a line in lambda for every set, and the
chosen set loses where the first other line crosses above its own. Otherwise it is read off the grid.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.layer_select.objective import Objective, mean_pairwise, mean_richness
from specdec.layer_select.search import Chooser

# from no weight on diversity to where it decides alone, in steps finer than any stable region worth its name.
GRID = tuple(step / 4 for step in range(33))


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring grid values with one choice; both ends included."""

    low: float
    high: float
    boundaries: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LambdaSweep:
    """The choice for every lambda of the grid.

    Attributes:
        used: The lambda of the request.
        segments: The grid in order, equal neighbours joined.
        stable_low: Smallest lambda of the region around `used` with the same choice.
        stable_high: Largest; None where it has no end.
        exact: Whether the region is computed; otherwise it is as fine as the grid.
    """

    used: float
    segments: tuple[Segment, ...]
    stable_low: float
    stable_high: float | None
    exact: bool


def sweep_lambda(chooser: Chooser, chosen: tuple[int, ...]) -> LambdaSweep | None:
    """Sweep lambda; None where the choice does not depend on it (probe alone, k-DPP, facility location)."""
    if chooser.probe_weight == 1 or chooser.search in ("kdpp", "facility"):
        return None
    used = chooser.config.diversity_weight
    full = chooser.objective()
    segments: list[Segment] = []
    for weight in sorted({*GRID, used}):
        best = chosen if weight == used else chooser.best(chooser.objective(diversity_weight=weight))
        if segments and segments[-1].boundaries == best:
            segments[-1] = Segment(low=segments[-1].low, high=weight, boundaries=best)
        else:
            segments.append(Segment(low=weight, high=weight, boundaries=best))
    around = next(part for part in segments if part.low <= used <= part.high)
    if chooser.search != "exhaustive" or chooser.probe_weight:
        high = None if around.high >= GRID[-1] else around.high
        return LambdaSweep(
            used=used, segments=tuple(segments), stable_low=around.low, stable_high=high, exact=False
        )
    assert chooser.candidates is not None, "an exhaustive search has its candidates"
    low, top = stable_region(full, chooser.candidates, chosen)
    # rounding can put a crossing a hair beyond the lambda in use.
    return LambdaSweep(
        used=used,
        segments=tuple(segments),
        stable_low=min(low, used),
        stable_high=None if top is None else max(top, used),
        exact=True,
    )


def stable_region(
    objective: Objective, candidates: Tensor, chosen: tuple[int, ...]
) -> tuple[float, float | None]:
    """The lambdas for which `chosen` is the best of `candidates`; None as upper end where there is none."""
    richness = mean_richness(objective.richness, candidates)
    redundancy = mean_pairwise(objective.likeness, candidates)
    own = int((candidates == candidates.new_tensor(chosen)).all(dim=1).nonzero()[0])
    ahead, closer = richness - richness[own], redundancy - redundancy[own]
    crossing = ahead / closer
    # a set more alike than the chosen one wins below its crossing, a less alike one above.
    below, above = crossing[closer > 0], crossing[closer < 0]
    low = max(0.0, float(below.max())) if len(below) else 0.0
    return low, float(above.min()) if len(above) else None
