"""Bootstrap intervals over prompts: the one way reports state spread.

Percentile bootstrap (Efron 1979): prompts are resampled with replacement, since prompts, not tokens,
are what a user would draw anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
