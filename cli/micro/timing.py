"""Timing of small pieces of work: interleaved, cold, with spread; and what the machine can do at best.

On a card every call is timed by events behind a write larger than its cache: data come from memory, and the
host's launch of the call falls into the time of that write, not into the figure. On a processor calls are
repeated until a clock reads them well; small inputs then come from its caches, as they do when it serves.
Owns the clock and the two limits every figure is put beside: copy bandwidth and matrix rate of this machine,
in this run. Does not know what is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

Run = Callable[[], object]
# more than any card's cache (H200: 50 MB), and long enough to hide the launches of a call behind it
FLUSH_BYTES = 512 << 20
# on a processor shorter calls are repeated inside one reading: its clock has noise of microseconds
SHORTEST_READING_S = 1e-3
_COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
_MATRIX = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call, over interleaved rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds with their spread, fit for JSON."""
        low, high = min(self.seconds), max(self.seconds)
        return {
            "ms": 1e3 * self.median,
            "ms_lowest": 1e3 * low,
            "ms_highest": 1e3 * high,
            "n": len(self.seconds),
        }


class Clock:
    """Times calls on one device.

    Args:
        device: where the work runs.
        rounds: readings of every call.
    """

    def __init__(self, device: str, *, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.on_card = torch.device(device).type == "cuda"
        self._flush = (
            torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if self.on_card else torch.empty(0)
        )

    @torch.inference_mode()
    def compare(self, runs: Mapping[str, Run]) -> dict[str, Timing]:
        """Read every call once a round, in an order that turns from round to round."""
        names = list(runs)
        inner = {name: self._warm_up(runs[name]) for name in names}
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self.rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                found[name].append(self._read(runs[name], inner[name]))
        return {name: Timing(seconds=tuple(values)) for name, values in found.items()}

    def _warm_up(self, run: Run) -> int:
        """Run twice (the first compiles); how many calls one reading takes."""
        run()
        if self.on_card:
            run()
            torch.cuda.synchronize(self.device)
            return 1
        started = time.perf_counter()
        run()
        taken = time.perf_counter() - started
        return max(1, int(SHORTEST_READING_S / max(taken, 1e-7)))

    def _read(self, run: Run, inner: int) -> float:
        if not self.on_card:
            started = time.perf_counter()
            for _ in range(inner):
                run()
            return (time.perf_counter() - started) / inner
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        first.record()
        run()
        last.record()
        last.synchronize()
        milliseconds: float = first.elapsed_time(last)
        return milliseconds / 1e3


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine does at best, measured: bytes and operations per second."""

    copy_bytes_per_s: float
    matrix_flop_per_s: float
    timings: Mapping[str, Timing]

    def to_dict(self) -> dict[str, Any]:
        """Rates and their spread, fit for JSON."""
        return {
            "copy_gb_per_s": self.copy_bytes_per_s / 1e9,
            "matrix_tflop_per_s": self.matrix_flop_per_s / 1e12,
            "copy": self.timings["copy"].to_dict(),
            "matrix": self.timings["matrix"].to_dict(),
        }


def measure_limits(clock: Clock, dtype: torch.dtype) -> Limits:
    """Copy a large tensor (bytes read and written both count) and multiply two square matrices."""
    kind = "cuda" if clock.on_card else "cpu"
    source = torch.zeros(_COPY_BYTES[kind] // 4, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    side = _MATRIX[kind]
    left = torch.ones(side, side, dtype=dtype, device=clock.device)
    timings = clock.compare({"copy": lambda: target.copy_(source), "matrix": lambda: left @ left})
    return Limits(
        copy_bytes_per_s=2 * _COPY_BYTES[kind] / timings["copy"].median,
        matrix_flop_per_s=2 * side**3 / timings["matrix"].median,
        timings=timings,
    )
