"""What passes cost as served: a table of the start, corrected by the times of the steps since.

The correction is kept at a few numbers of rows, as the logarithm of seen over expected time. Each seen step
moves its two nearest by a small step up or down, whatever its size: a running median, which a stall of the
machine moves no further than any other step. All the others move by half of it, since a machine that slows
down slows every pass. Where nothing was seen the neighbours' correction holds. Owns no clock: the engine
tells what its steps took.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import exp, log, sqrt

from specdec.speculation import CostTable

# step of a running median: a fifth at first, and never less than this, so that it follows a slow drift
LEAST_STEP = 0.01
FIRST_STEP = 0.2
COMMON = 0.5
# a number of rows that is no longer seen is to be seen again after so many steps
CHECK_EVERY = 64
# a knot that is further from the rows of a step learns nothing from it
LEAST_WEIGHT = 0.25
# corrections that change a table by less than this are left for later: a decision need not follow noise
WORTH_TELLING = 0.02


class RunningMedian:
    """The median of what was seen lately, by steps of a size that shrinks."""

    def __init__(self) -> None:
        self.value = 0.0
        self.seen = 0.0

    def add(self, value: float, weight: float = 1.0) -> float:
        """Move towards a value, and return how far; the first one is taken as it is, and moves nothing."""
        moved = 0.0
        if self.seen == 0.0:
            self.value = value
        else:
            step = weight * max(LEAST_STEP, FIRST_STEP / sqrt(1 + self.seen))
            moved = max(-step, min(step, value - self.value))
            self.value += moved
        self.seen += weight
        return moved


class LiveCosts:
    """Costs in units of a one-row pass.

    Args:
        start: what is known before the first step.
        learns: whether steps correct it.

    Attributes:
        table: costs of a target pass by rows, corrected.
        drafting: factor on what proposals are expected to cost.
        version: grows with every change of these.
        steps: steps that were taken in.
    """

    def __init__(self, start: CostTable, *, learns: bool = True) -> None:
        self.table = start
        self.drafting = 1.0
        self.version = 0
        self.steps = 0
        self._start = start
        self._learns = learns
        self._knots = [rows for rows, _ in start.points]
        self._residuals = [RunningMedian() for _ in self._knots]
        self._last_seen = [-CHECK_EVERY] * len(self._knots)
        self._draft = RunningMedian()

    def saw_pass(self, rows: float, seconds: float, context: float = 0.0) -> None:
        """Take in a decoding pass: the whole rows it was worth, its time, and that for further context."""
        if not self._learns or seconds <= 0:
            return
        self.steps += 1
        expected = self._start.of(rows) + context
        right = min(bisect_right(self._knots, rows), len(self._knots) - 1)
        left = max(0, right - 1)
        span = self._knots[right] - self._knots[left] or 1
        share = min(1.0, max(0.0, (rows - self._knots[left]) / span))
        for knot, weight in ((left, 1 - share), (right, share)):
            if weight > LEAST_WEIGHT:
                self._last_seen[knot] = self.steps
                moved = self._residuals[knot].add(log(seconds / expected), weight)
                for other in self._residuals:
                    if other.seen and other is not self._residuals[knot]:
                        other.value += COMMON * moved
        self._tell()

    def is_stale(self, rows: float) -> bool:
        """Whether what is known of a number of rows is a guess: who always drafts never sees a plain pass."""
        if not self._learns:
            return False
        near = min(range(len(self._knots)), key=lambda knot: abs(self._knots[knot] - rows))
        return self.steps - self._last_seen[near] >= CHECK_EVERY

    def saw_drafting(self, expected: float, seconds: float) -> None:
        """Take in a proposal that was expected to cost so much (without `drafting`)."""
        if not self._learns or seconds <= 0 or expected <= 0 or not self.steps:
            return
        self._draft.add(log(seconds / expected) - self._unit())
        if abs(log(self.drafting) - self._draft.value) > WORTH_TELLING:
            self.drafting = exp(self._draft.value)
            self.version += 1

    def _unit(self) -> float:
        """Logarithm of the seconds of a one-row pass."""
        return self._between(0, self._seen())

    def _seen(self) -> list[int]:
        return [index for index, each in enumerate(self._residuals) if each.seen]

    def _tell(self) -> None:
        seen = self._seen()
        unit = self._between(0, seen)
        points: list[tuple[int, float]] = []
        for index, (rows, cost) in enumerate(self._start.points):
            corrected = cost * exp(self._between(index, seen) - unit)
            # more rows never cost less: what says so is noise
            points.append((rows, max(corrected, points[-1][1] if points else 0.0)))
        changes = (abs(log(new / old)) for (_, new), (_, old) in zip(points, self.table.points, strict=True))
        if max(changes) > WORTH_TELLING:
            self.table = replace(self._start, points=tuple(points))
            self.version += 1

    def _between(self, index: int, seen: list[int]) -> float:
        """A knot's correction, or that between its nearest neighbours with one."""
        if self._residuals[index].seen:
            return self._residuals[index].value
        below = max((knot for knot in seen if knot < index), default=None)
        above = min((knot for knot in seen if knot > index), default=None)
        if below is None or above is None:
            only = above if below is None else below
            assert only is not None, "a step was seen"
            return self._residuals[only].value
        share = (index - below) / (above - below)
        return (1 - share) * self._residuals[below].value + share * self._residuals[above].value
