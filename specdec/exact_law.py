"""The exact law of a procedure that draws random numbers, by running it once per outcome.

Owns a source of numbers that forks instead of drawing: a number is an interval, each comparison splits it,
and every side is run. The procedure itself, not a model of it, is what is enumerated; a number used twice
stays the same number, so that correlations show. Does not know what is computed. Meant for vocabularies of
a few tokens: the runs multiply with every comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from specdec.random_streams import Purpose, UniformSource

Outcome = TypeVar("Outcome", bound=Hashable)


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
        below = self._source.decide()
        if below:
            self.high = threshold
        else:
            self.low = threshold
        return below


class ForkingSource:
    """Numbers of one run; comparisons are settled by `decisions` first and by "below" after them."""

    def __init__(self, decisions: list[bool]) -> None:
        self.decisions = decisions
        self._num_settled = 0
        self._coins: dict[tuple[int, Purpose, int, int], _ForkingCoin] = {}

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> list[_ForkingCoin]:
        """Numbers of one place, as `RandomStream.uniform` keys them."""
        keys = [(position, purpose, node, index) for index in range(count)]
        return [self._coins.setdefault(key, _ForkingCoin(self)) for key in keys]

    def decide(self) -> bool:
        """Settle one comparison and remember it."""
        if self._num_settled == len(self.decisions):
            self.decisions.append(True)
        self._num_settled += 1
        return self.decisions[self._num_settled - 1]

    @property
    def probability(self) -> float:
        """Probability of this run's decisions."""
        product = 1.0
        for coin in self._coins.values():
            product *= coin.high - coin.low
        return product


def exact_law(run: Callable[[UniformSource], Outcome]) -> dict[Outcome, float]:
    """Enumerate the law of what `run` returns when it takes its random numbers from its argument.

    Args:
        run: the procedure; apart from those numbers it must be deterministic.

    Returns:
        Probability of each outcome; they sum to 1 within rounding.
    """
    law: dict[Outcome, float] = {}
    open_branches: list[list[bool]] = [[]]
    while open_branches:
        settled = open_branches.pop()
        num_given = len(settled)
        source = ForkingSource(settled)
        outcome = run(source)
        law[outcome] = law.get(outcome, 0.0) + source.probability
        open_branches.extend(
            [*source.decisions[:index], False] for index in range(num_given, len(source.decisions))
        )
    return law
