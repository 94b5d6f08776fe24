"""Is a long load steady? Throughput by windows of equal length, memory by samples, and a verdict.

Owns the arithmetic and its limits. A token is counted where it was written: an answer's tokens lie evenly
between its first and its last event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.cli.loading.drive import LoadRecord

WINDOWS = 10
# windows at the beginning in which caches fill and the allocator finds its size: they count for nothing
WARM_WINDOWS = 2
MOST_GROWTH = 0.02
MOST_SPREAD = 0.05
DEFINITIONS = {
    "windows": f"{WINDOWS} equal parts of the duration; the first {WARM_WINDOWS} are warm-up, in no verdict",
    "tokens_per_second": "tokens of whole answers, spread evenly from first to last event, by window",
    "drift": "slope of a straight line through the windows' throughput x time from first to last / mean",
    "spread": "largest distance of a window's throughput from the windows' median, over that median",
    "memory_growth": "median of the last window's samples of resident memory over that of the first one "
    "that counts, minus 1",
    "verdict": f"memory: memory_growth at most {MOST_GROWTH:g}; throughput: spread and absolute drift at "
    f"most {MOST_SPREAD:g}; counters: all equal; answers: none failed but for 429",
}


@dataclass(frozen=True)
class MemorySample:
    """Resident memory of the server at a moment after the start."""

    at_s: float
    size_bytes: int


def throughput_by_window(records: Sequence[LoadRecord], duration_s: float) -> list[float]:
    """Tokens per second in each window."""
    edges = np.linspace(0.0, duration_s, WINDOWS + 1)
    written = np.zeros(WINDOWS)
    for record in records:
        if record.error is not None or record.first_s is None or record.last_s is None:
            continue
        tokens = record.completion_tokens or 0
        if record.last_s > record.first_s:
            inside = np.clip(edges, record.first_s, record.last_s)
            written += tokens * np.diff(inside) / (record.last_s - record.first_s)
        elif record.first_s < duration_s:
            written[np.searchsorted(edges, record.first_s, side="right") - 1] += tokens
    return [float(tokens) for tokens in written / (duration_s / WINDOWS)]


def steadiness(rates: Sequence[float]) -> dict[str, float | None]:
    """Drift and spread of the windows that count."""
    counted = np.asarray(rates[WARM_WINDOWS:])
    if not counted.all():
        return {"drift": None, "spread": None}
    slope = np.polynomial.Polynomial.fit(np.arange(len(counted)), counted, 1).convert().coef[-1]
    median = float(np.median(counted))
    return {
        "drift": float(slope * (len(counted) - 1) / counted.mean()),
        "spread": float(np.abs(counted - median).max() / median),
    }


def memory_by_window(samples: Sequence[MemorySample], duration_s: float) -> list[float | None]:
    """Median of resident bytes in each window, None for one without a sample."""
    by_window: list[list[int]] = [[] for _ in range(WINDOWS)]
    for sample in samples:
        if 0 <= sample.at_s < duration_s:
            by_window[int(sample.at_s / duration_s * WINDOWS)].append(sample.size_bytes)
    return [float(np.median(sizes)) if sizes else None for sizes in by_window]


def verdict(
    rates: Sequence[float],
    memory: Sequence[float | None],
    counters: dict[str, Any] | None,
    errors: dict[str, int],
) -> dict[str, Any]:
    """What holds, None where it could not be seen; `holds` is true when all of it was seen and does."""
    steady = steadiness(rates)
    first, last = memory[WARM_WINDOWS], memory[-1]
    growth = last / first - 1 if first and last else None
    drift, spread = steady["drift"], steady["spread"]
    parts = {
        "memory": None if growth is None else growth <= MOST_GROWTH,
        "throughput": drift is not None and spread is not None and max(abs(drift), spread) <= MOST_SPREAD,
        "counters": None if counters is None else bool(counters["equal"]),
        "answers": set(errors) <= {"http 429"},
    }
    return {**steady, "memory_growth": growth, **parts, "holds": all(parts.values())}
