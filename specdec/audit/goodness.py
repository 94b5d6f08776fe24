"""Do draws follow a law: chi-square, total variation, and one error rate for a family of tests.

Owns the statistics of level C1. Chi-square with pooled cells (Pearson); the null expectation of the empirical
total variation, 1/2 sum sqrt(2 p (1-p) / (pi n)); Holm's step-down correction (1979), so that all tests of a
family together reject by chance with probability alpha at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import chdtrc

# the usual condition for Pearson's approximation
MIN_EXPECTED = 5.0

Outcome = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well counts agree with a law.

    Attributes:
        draws: number of outcomes.
        chi_square: Pearson's statistic over the pooled cells.
        freedom: pooled cells - 1.
        p_value: probability of a statistic at least as large under the law.
        total_variation: between frequencies and law.
        expected_variation: what sampling noise alone gives on average.
        impossible: draws that the law gives probability 0.
    """

    draws: int
    chi_square: float
    freedom: int
    p_value: float
    total_variation: float
    expected_variation: float
    impossible: int


def fit(counts: Mapping[Outcome, int], law: Mapping[Outcome, float]) -> Fit:
    """Compare counts with a law; outcomes too rare for the approximation are pooled, rarest together."""
    draws = sum(counts.values())
    observed, expected = [0.0], [0.0]
    for outcome, probability in sorted(law.items(), key=lambda item: -item[1]):
        if probability <= 0.0:
            continue
        if expected[-1] >= MIN_EXPECTED:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts.get(outcome, 0)
        expected[-1] += probability * draws
    if expected[-1] < MIN_EXPECTED and len(expected) > 1:
        rest_observed, rest_expected = observed.pop(), expected.pop()
        observed[-1] += rest_observed
        expected[-1] += rest_expected
    impossible = sum(count for outcome, count in counts.items() if law.get(outcome, 0.0) <= 0.0)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(observed) - 1
    p_value = 0.0 if impossible else chi_square_tail(statistic, freedom)
    keys = set(counts) | set(law)
    variation = sum(abs(counts.get(key, 0) / draws - law.get(key, 0.0)) for key in keys) / 2
    noise = sum(math.sqrt(2 * p * max(0.0, 1 - p) / (math.pi * draws)) for p in law.values()) / 2
    return Fit(
        draws=draws,
        chi_square=statistic,
        freedom=freedom,
        p_value=p_value,
        total_variation=variation,
        expected_variation=noise,
        impossible=impossible,
    )


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable exceeds the statistic; 1 without a degree of freedom."""
    if freedom <= 0:
        return 1.0
    return float(chdtrc(freedom, statistic))


def holm_rejections(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which of a family's tests reject, at a family-wise error rate of `alpha`."""
    rejected = [False] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def sign_test(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test: discordant pairs fall to either side like a fair coin."""
    total = only_first + only_second
    if total == 0:
        return 1.0
    smaller = min(only_first, only_second)
    tail = sum(math.comb(total, k) for k in range(smaller + 1)) / 2**total
    return min(1.0, 2 * tail)
