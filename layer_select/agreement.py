"""Do estimators rank boundaries alike? Kendall's tau between all of them.

Owns the matrix. Knows rankings only as numbers; higher is taken as richer in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.stats import kendalltau


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Kendall's tau-b between rankings of the same boundaries.

    Attributes:
        names: The rankings.
        tau: Symmetric matrix over them; None where one of the two ranks nothing (all values equal).
    """

    names: tuple[str, ...]
    tau: tuple[tuple[float | None, ...], ...]


def rank_agreement(rankings: Mapping[str, Sequence[float]], among: Sequence[int]) -> Agreement:
    """Compare rankings over the boundaries in `among`.

    Args:
        rankings: name to one value for each boundary 0..N, higher is richer.
        among: boundaries that are compared; those that may be chosen.
    """
    columns = {name: [values[boundary] for boundary in among] for name, values in rankings.items()}
    return Agreement(
        names=tuple(columns),
        tau=tuple(tuple(_tau(first, second) for second in columns.values()) for first in columns.values()),
    )


def _tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    # tau-b of a ranking in which all are tied divides by zero.
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(kendalltau(first, second).statistic)
