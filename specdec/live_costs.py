"""What passes cost as served: a table of the start, corrected by the times of the steps since.

A time is the machine's level (seconds of a unit) times the table's cost times a correction of its shape, kept
at the table's numbers of rows; between those that were seen it is interpolated. Of what a step took longer
than expected, half is laid to the level and half to the shape at its rows, by a small step whatever the size:
a running median, which a stall of the machine moves no further than any other step. A correction of the shape
that no other number of rows contradicts turns into level by and by, so that a machine that slows down while
only one kind of step is seen changes no ratio for long. Owns no clock: the engine tells what its steps took.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import exp, log, sqrt

from specdec.speculation import CostTable

# a step of the median: this at first, and never less than the other, so that it follows a slow drift
FIRST_STEP, LEAST_STEP = 0.25, 0.02
# part of an error that is laid to the level, and of a correction that turns into level with each step
COMMON, LEAK = 0.5, 0.002
# a number of rows that is no longer seen is to be seen again after so many steps, or so many if it surprised
CHECK_EVERY, CHECK_SOON = 64, 8
# corrections that change a table by less than this are left for later: a decision need not follow noise
WORTH_TELLING = 0.02


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
        self.version = 0
        self._start = start
        self._learns = learns
        self._knots = [rows for rows, _ in start.points]
        self.forget()

    def forget(self) -> None:
        """Drop what steps taught: costs are again what was known before the first one."""
        self.table = self._start
        self.drafting = 1.0
        self.version += 1
        self.steps = 0
        self._level = 0.0
        self._shape = [0.0] * len(self._knots)
        self._seen = [0.0] * len(self._knots)
        self._last_seen = [-CHECK_EVERY] * len(self._knots)
        self._draft, self._drafts = 0.0, 0

    def saw_pass(self, rows: float, seconds: float, beside: float = 0.0) -> None:
        """Take in a decoding pass: the whole rows it was worth, its time, and the cost beside them."""
        if not self._learns or seconds <= 0:
            return
        near = self._neighbours(rows)
        costs = self._costs()
        expected = sum(weight * costs[knot] for knot, weight in near) + max(0.0, beside) * costs[0]
        if not self.steps:
            self._level = log(seconds / expected)
        self.steps += 1
        error = log(seconds / expected) - self._level
        moved = _bounded(error, sum(weight * self._seen[knot] for knot, weight in near))
        self._level += COMMON * moved
        for knot, weight in near:
            self._shape[knot] += (1 - COMMON) * weight * moved
            self._seen[knot] += weight
            turned = LEAK * weight * self._shape[knot]
            self._shape[knot] -= turned
            self._level += turned
            if weight >= 0.5:
                late = 0 if abs(error) <= abs(moved) else CHECK_EVERY - CHECK_SOON
                self._last_seen[knot] = self.steps - late
        self._fill()
        self._tell()

    def saw_drafting(self, expected: float, seconds: float) -> None:
        """Take in a proposal that was expected to cost so much (without `drafting`)."""
        if not self._learns or seconds <= 0 or expected <= 0 or not self.steps:
            return
        unit = self._level + log(self._costs()[0])
        self._draft += _bounded(log(seconds / expected) - unit - self._draft, self._drafts)
        self._drafts += 1
        if abs(log(self.drafting) - self._draft) > WORTH_TELLING:
            self.drafting = exp(self._draft)
            self.version += 1

    def is_stale(self, rows: float) -> bool:
        """Whether what is known of a number of rows is a guess: who always drafts never sees a plain pass."""
        if not self._learns:
            return False
        knot, _ = max(self._neighbours(rows), key=lambda near: near[1])
        return self.steps - self._last_seen[knot] >= CHECK_EVERY

    def _neighbours(self, rows: float) -> list[tuple[int, float]]:
        """The places around a number of rows, and how much each counts; one alone beyond the ends."""
        right = bisect_right(self._knots, rows)
        if right in (0, len(self._knots)):
            return [(max(0, right - 1), 1.0)]
        before, after = self._knots[right - 1], self._knots[right]
        share = (rows - before) / (after - before)
        return [(right - 1, 1 - share), (right, share)]

    def _fill(self) -> None:
        """Give numbers of rows that were hardly seen the correction between their neighbours."""
        known = [knot for knot, seen in enumerate(self._seen) if seen >= 1]
        for knot in range(len(self._knots)) if known else ():
            if self._seen[knot] < 1:
                right = bisect_right(known, knot)
                before, after = known[max(0, right - 1)], known[min(right, len(known) - 1)]
                share = (knot - before) / (after - before) if after > before else 0.0
                self._shape[knot] = (1 - share) * self._shape[before] + share * self._shape[after]

    def _costs(self) -> list[float]:
        return [cost * exp(shape) for (_, cost), shape in zip(self._start.points, self._shape, strict=True)]

    def _tell(self) -> None:
        costs = self._costs()
        points: list[tuple[int, float]] = []
        for rows, cost in zip(self._knots, costs, strict=True):
            # more rows never cost less: what says so is noise
            points.append((rows, max(cost / costs[0], points[-1][1] if points else 1.0)))
        changes = (abs(log(new / old)) for (_, new), (_, old) in zip(points, self.table.points, strict=True))
        if max(changes) > WORTH_TELLING:
            self.table = replace(self._start, points=tuple(points))
            self.version += 1


def _bounded(error: float, seen: float) -> float:
    """What is believed of an error after so many others."""
    step = max(LEAST_STEP, FIRST_STEP / sqrt(1 + seen))
    return max(-step, min(step, error))
