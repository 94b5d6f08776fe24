"""The exact law of a procedure that draws random numbers, by running it once per outcome.

Owns a source of numbers that forks instead of drawing: a number is an interval, each comparison splits it,
and every side is run; a race forks into its winners. The procedure itself, not a model of it, is what is
enumerated; a number used twice stays the same number, so that correlations show. Does not know what is
computed. Meant for vocabularies of a few tokens: the runs multiply with every comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specdec.random_streams import Purpose, UniformSource

Outcome = TypeVar("Outcome", bound=Hashable)
Rates = NDArray[np.float64]


class _ForkingCoin:
    """A number known to lie in [low, high)."""

    def __init__(self, source: ForkingSource) -> None:
        self._source = source
        self.low = 0.0
        self.high = 1.0

    def __lt__(self, threshold: float, /) -> bool:
        if threshold <= self.low:
            return False
        if threshold >= self.high:
            return True
        below = self._source.decide([1, 0]) == 1
        if below:
            self.high = threshold
        else:
            self.low = threshold
        return below


class ForkingSource:
    """Numbers of one run; choices are settled by `decisions` first, and by their first option after them."""

    def __init__(self, decisions: list[int]) -> None:
        self.decisions = decisions
        self.num_options: list[int] = []
        self._coins: dict[tuple[int, Purpose, int, int], _ForkingCoin] = {}
        self._races: dict[int, list[tuple[Rates, list[int]]]] = {}
        self._race_probability = 1.0

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> list[_ForkingCoin]:
        """Numbers of one place, as `RandomStream.uniform` keys them."""
        keys = [(position, purpose, node, index) for index in range(count)]
        return [self._coins.setdefault(key, _ForkingCoin(self)) for key in keys]

    def race(self, position: int, rates: Rates, count: int = 1) -> list[int]:
        """First ids of a race, as `RandomStream.race` defines it.

        A second race at a position shares the noise of the first; its winner given that of the first has a
        closed form. Longer lists of one race, or more than two races at one position, have none here.
        """
        before = self._races.setdefault(position, [])
        if not before:
            winners = self._first_race(rates, count)
        else:
            is_pair = len(before) == count == len(before[0][1]) == 1
            assert is_pair, "of races on one noise only a pair of winners is enumerated"
            first_rates, (first,) = before[0]
            winners = [self._fork(_second_winner_law(first_rates, first, rates))]
        before.append((rates, winners))
        return winners

    def _first_race(self, rates: Rates, count: int) -> list[int]:
        """Arrivals without memory: each next one is drawn from the rates that are left."""
        left = rates.copy()
        winners: list[int] = []
        while len(winners) < count and left.any():
            winners.append(self._fork(left / left.sum()))
            left[winners[-1]] = 0.0
        return winners

    def _fork(self, law: Rates) -> int:
        outcome = self.decide([int(token) for token in np.flatnonzero(law > 0.0)])
        self._race_probability *= float(law[outcome])
        return outcome

    def decide(self, options: list[int]) -> int:
        """Settle one choice and remember it."""
        index = len(self.num_options)
        if index == len(self.decisions):
            self.decisions.append(0)
        self.num_options.append(len(options))
        return options[self.decisions[index]]

    @property
    def probability(self) -> float:
        """Probability of this run's decisions."""
        product = self._race_probability
        for coin in self._coins.values():
            product *= coin.high - coin.low
        return product


def _second_winner_law(first_rates: Rates, first: int, rates: Rates) -> Rates:
    """Law of the winner of a second race on the same noise, given the winner of the first."""
    q, p = first_rates / first_rates.sum(), rates / rates.sum()
    joint = [_pair_probability(q, first, p, second) for second in range(len(p))]
    return np.array(joint) / q[first]


def _pair_probability(q: Rates, i: int, p: Rates, j: int) -> float:
    """Probability that i wins the race with rates q and j, on the same noise, the race with rates p.

    With E_i = a and E_j = r a every other E must exceed a max(q_v / q_i, r p_v / p_j); what is left after the
    integral over a is that over r of 1 / D(r)^2, D piecewise linear. For i = j: 1 / sum max(q/q_i, p/p_i).
    """
    if p[j] == 0.0:
        return 0.0
    one, two = q / q[i], p / p[j]
    if i == j:
        return float(1.0 / np.maximum(one, two).sum())
    low, high = one[j], (1.0 / two[i] if two[i] > 0.0 else np.inf)
    if low >= high:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        kinks = one / two
    inside = sorted(kink for kink in kinks if low < kink < high)
    others = [v for v in range(len(q)) if v not in (i, j)]
    total = 0.0
    for start, end in zip([low, *inside], [*inside, high], strict=True):
        middle = (start + end) / 2.0 if end < np.inf else start + 1.0
        second_leads = [v for v in others if middle * two[v] > one[v]]
        slope = 1.0 + sum(two[v] for v in second_leads)
        base = 1.0 + sum(one[v] for v in others if v not in second_leads)
        total += (1.0 / (base + slope * start) - 1.0 / (base + slope * end)) / slope
    return float(total)


def exact_law(run: Callable[[UniformSource], Outcome]) -> dict[Outcome, float]:
    """Enumerate the law of what `run` returns when it takes its random numbers from its argument.

    Args:
        run: the procedure; apart from those numbers it must be deterministic.

    Returns:
        Probability of each outcome; they sum to 1 within rounding.
    """
    law: dict[Outcome, float] = {}
    open_branches: list[list[int]] = [[]]
    while open_branches:
        settled = open_branches.pop()
        num_given = len(settled)
        source = ForkingSource(settled)
        outcome = run(source)
        law[outcome] = law.get(outcome, 0.0) + source.probability
        open_branches.extend(
            [*source.decisions[:index], option]
            for index in range(num_given, len(source.decisions))
            for option in range(1, source.num_options[index])
        )
    return law
