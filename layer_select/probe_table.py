"""The ridge probe's verdict on any set: measured where that matters, read off its variance elsewhere.

Owns the two stages. The variance a set explains comes from cached sums and is known for all sets; the
overlap of the predicted law with the target's needs the target's head on every held-out row, so it is
measured for few. A least-squares line through measured sets turns explained variance into the overlap of
the others; the sets at the top of a ranking are then measured, until the best of them is
(`Chooser.settle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# sets that the line is drawn through, spread evenly over explained variance.
LINE_SETS = 12


class Verdict(Protocol):
    """What the probe says of one set on held-out rows."""

    @property
    def overlap_next(self) -> float:
        """Overlap for x_{t+1} from the taps alone."""
        ...

    @property
    def overlap_second(self) -> float:
        """Overlap for x_{t+2} from the taps and x_{t+1}: a draft's first step."""
        ...

    @property
    def explained(self) -> float:
        """Share of the pre-head feature's variance that is explained."""
        ...


class SubsetProbe(Protocol):
    """Scores sets of boundaries by what a closed-form draft could predict from them."""

    def explained(self, subsets: Sequence[tuple[int, ...]]) -> Tensor:
        """Explained variance of each set, `[subsets]`; ranks sets of one size."""
        ...

    def score(self, subsets: Sequence[tuple[int, ...]]) -> Sequence[Verdict]:
        """Measure each set with the target's head."""
        ...

    def overlap_by_row(self, subsets: Sequence[tuple[int, ...]]) -> Tensor:
        """`overlap_second` on every held-out row, `[subsets, rows]`."""
        ...


class ProbeTable:
    """Probe values by set, each computed once."""

    def __init__(self, probe: SubsetProbe) -> None:
        self._probe = probe
        self._explained: dict[tuple[int, ...], float] = {}
        self._measured: dict[tuple[int, ...], Verdict] = {}
        self._line: tuple[float, float] | None = None
        # stability asks for the same candidates hundreds of times.
        self._last: tuple[Tensor, Tensor] | None = None

    def explained(self, sets: Tensor) -> Tensor:
        """Explained variance of each set `[subsets, K]`, `[subsets]`, float64."""
        keys = _keys(sets)
        missing = [key for key in dict.fromkeys(keys) if key not in self._explained]
        if missing:
            self._explained.update(zip(missing, self._probe.explained(missing).tolist(), strict=True))
        return torch.tensor([self._explained[key] for key in keys], dtype=torch.float64)

    def measure(self, sets: Tensor) -> None:
        """Measure the overlap of each set `[subsets, K]` that was not measured yet."""
        missing = [key for key in dict.fromkeys(_keys(sets)) if key not in self._measured]
        if missing:
            self._measured.update(zip(missing, self._probe.score(missing), strict=True))
            self._last = None

    def measured(self, boundaries: tuple[int, ...]) -> Verdict | None:
        """The verdict on a set; None where it was not measured."""
        return self._measured.get(boundaries)

    def measured_rows(self, count: int) -> tuple[list[tuple[int, ...]], Tensor]:
        """The measured sets of `count` boundaries, and their overlap by held-out row, `[sets, rows]`."""
        keys = sorted(key for key in self._measured if len(key) == count)
        return keys, self._probe.overlap_by_row(keys)

    def draw_line(self, sets: Tensor) -> None:
        """Fit overlap against explained variance on a few of `sets`, spread over its whole range."""
        explained = self.explained(sets)
        order = torch.sort(explained, stable=True).indices
        picked = order[torch.linspace(0, len(order) - 1, min(LINE_SETS, len(order))).round().long()]
        self.measure(sets[picked])
        x = explained[picked]
        y = torch.tensor([self._measured[key].overlap_second for key in _keys(sets[picked])]).double()
        spread = (x - x.mean()).square().sum()
        # more variance explained never means less overlap in expectation; a falling line is noise.
        slope = max(0.0, float(((x - x.mean()) * (y - y.mean())).sum() / spread)) if spread > 0 else 0.0
        self._line = (float(y.mean()) - slope * float(x.mean()), slope)
        self._last = None

    def values(self, sets: Tensor) -> Tensor:
        """Overlap of each set `[subsets, K]`, measured or from the line, `[subsets]`, float64."""
        assert self._line is not None, "draw_line comes first"
        if self._last is not None and self._last[0] is sets:
            return self._last[1]
        start, slope = self._line
        values = start + slope * self.explained(sets)
        for row, key in enumerate(_keys(sets)):
            if key in self._measured:
                values[row] = self._measured[key].overlap_second
        self._last = (sets, values)
        return values


def _keys(sets: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in sets.tolist()]
