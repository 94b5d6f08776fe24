"""Bootstrap intervals over prompts: the one way reports state spread.

Percentile bootstrap (Efron 1979): prompts are resampled with replacement, since prompts, not tokens,
are what a user would draw anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000  # the interval's ends move by about 2 % of its width beyond this
CONFIDENCE = 0.95


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> tuple[float, float] | None:
    """95 % interval of sum(numerators) / sum(denominators) over prompts; None with fewer than two."""
    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    return _interval(len(top), lambda rows: top[rows].sum(axis=1) / bottom[rows].sum(axis=1), seed)


def speedup_interval(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    *,
    seed: int = 0,
) -> tuple[float, float] | None:
    """95 % interval of tokens per second over the baseline's, the four columns paired by prompt."""
    n, t, m, u = (np.asarray(x, dtype=float) for x in (tokens, seconds, base_tokens, base_seconds))

    def statistic(rows: np.ndarray) -> np.ndarray:
        ours = n[rows].sum(axis=1) / t[rows].sum(axis=1)
        return np.asarray(ours / (m[rows].sum(axis=1) / u[rows].sum(axis=1)))

    return _interval(len(n), statistic, seed)


@dataclass(frozen=True)
class ArmCounts:
    """Counts of one setting that was tried under several seeds on the same prompts.

    `numerators` and `denominators` are `[seeds, prompts]`; the setting's figure is sum over sum.
    """

    numerators: np.ndarray
    denominators: np.ndarray

    @property
    def value(self) -> float:
        """The figure over all seeds and prompts."""
        return float(self.numerators.sum() / self.denominators.sum())

    @property
    def by_seed(self) -> list[float]:
        """The figure of each seed."""
        return [float(x) for x in self.numerators.sum(axis=1) / self.denominators.sum(axis=1)]


@dataclass(frozen=True)
class Difference:
    """A setting's figure minus a reference's, with the spread of that difference.

    `detectable` is the difference this comparison would have seen: at two-sided 5 %, with a power of 80 %.
    """

    value: float
    interval: tuple[float, float]
    standard_error: float

    @property
    def detectable(self) -> float:
        """(1.96 + 0.84) standard errors."""
        return 2.8 * self.standard_error


def arm_interval(arm: ArmCounts, *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of an arm's figure, prompts and seeds both resampled."""
    low, high = _percentiles(_resampled(arm, *_draws(arm, seed)))
    return low, high


def arm_difference(arm: ArmCounts, reference: ArmCounts, *, seed: int = 0) -> Difference:
    """`arm` minus `reference`, paired: the same prompts and the same seeds are drawn for both.

    Where one has more seeds than the other, the seeds they share are compared.
    """
    seeds = min(len(arm.numerators), len(reference.numerators))
    ours, theirs = (ArmCounts(x.numerators[:seeds], x.denominators[:seeds]) for x in (arm, reference))
    draws = _draws(ours, seed)
    values = _resampled(ours, *draws) - _resampled(theirs, *draws)
    return Difference(
        value=ours.value - theirs.value,
        interval=_percentiles(values),
        standard_error=float(values.std(ddof=1)),
    )


def _draws(arm: ArmCounts, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each seed `[resamples, seeds]` and each prompt `[resamples, prompts]` is drawn."""
    generator = np.random.default_rng(seed)
    seeds, prompts = arm.numerators.shape
    return (
        generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=RESAMPLES),
        generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES),
    )


def _resampled(arm: ArmCounts, seeds: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    top, bottom = (((seeds @ counts) * prompts).sum(axis=1) for counts in (arm.numerators, arm.denominators))
    return np.asarray(top / bottom)


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _interval(
    count: int, statistic: Callable[[np.ndarray], np.ndarray], seed: int
) -> tuple[float, float] | None:
    if count < 2:
        return None
    rows = np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(rows)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    return _percentiles(values)
