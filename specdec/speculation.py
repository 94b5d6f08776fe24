"""When speculation pays: a per-sequence policy on counts, never on clocks.

The decision reads what this sequence drafted and what was accepted, how many sequences share the pass, and a
table of relative costs that is fixed for the engine's life (`specdec.cost_model` may have measured it at the
start). It is therefore the same in every run with the same table, whatever the machine's load. A sequence
whose text depends on what was drafted reads the table that comes with the program and decides as if it were
alone: its text stays a function of the seed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from specdec.config import SpecConfig

EMA_WEIGHT = 0.15  # about the last dozen steps
PROBE_EVERY = 24  # steps without speculation before one step tries again, at first
LONGEST_PROBE_WAIT = 8 * PROBE_EVERY  # a probe that did not pay doubles the wait, up to this
WARM_UP_STEPS = 4  # steps before the acceptance seen counts more than what is expected of a draft
WORTH_A_TRY = 3.0  # a tree of at most this cost is drafted in the first steps, whatever it may bring
BEST_ACCEPTANCE = 0.65  # that a probe may hope for
PROBE_GAIN = 1.1  # what such a hope must promise beside plain decoding
LEAST_GAIN = 1.02  # what a chain must promise: an estimate that breaks even may as well be a loss
EXPECTED_ACCEPTANCE = 0.6  # of a drafted token, before anything was seen


@dataclass(frozen=True)
class CostTable:
    """Relative time of a target pass by its rows, one row = 1; straight lines between the points.

    `points` are (rows, time), ascending, the first (1, 1.0).
    """

    points: tuple[tuple[int, float], ...]

    def of(self, rows: float) -> float:
        """Time of a pass over so many rows; beyond the last point it grows as between the last two."""
        if rows <= 1:
            return 1.0
        index = min(max(1, bisect_left(self.points, (rows, 0.0))), len(self.points) - 1)
        (before, low), (after, high) = self.points[index - 1], self.points[index]
        return low + (high - low) * (rows - before) / (after - before)


# 2 AVX-512 cores with packed fp16 weights (SmolLM2-135M), `specdec bench --verify-cost`; see results/LOG.md
FIXED_COSTS = CostTable(((1, 1.0), (4, 1.27), (8, 1.62), (12, 2.07), (16, 2.61), (24, 3.50), (32, 4.38)))


@dataclass
class SpeculationController:
    """Decides for one sequence how many nodes the next step may draft.

    `first` and `later` are moving averages of how often the first drafted token of a chain was accepted and
    how often one behind an accepted one; `committed` and `drafted` those of a step's tokens and nodes, which
    decide about trees. A chain is cut to the length that commits most per time; where no length beats plain
    decoding the sequence decodes plainly, and now and then one step drafts again.

    Attributes:
        adaptive: whether anything is decided at all.
        draft_cost: time of a whole proposal, in units of a plain step.
        costs: time of a target pass by rows.
        makes_chains: whether the drafter's trees are chains under the settings.
        alone: whether to decide as if no other sequence were in the pass.
        lags: whether the last step recorded counts only once the next one is recorded or planned ahead: an
            engine that plans a step while the one before it runs decides as one that does not.
    """

    adaptive: bool
    draft_cost: float
    costs: CostTable = FIXED_COSTS
    makes_chains: bool = False
    alone: bool = True
    lags: bool = False
    first: float = EXPECTED_ACCEPTANCE
    later: float = EXPECTED_ACCEPTANCE
    committed: float = 2.0
    drafted: float = 0.0
    steps: int = 0
    idle: int = 0
    wait: int = field(default=PROBE_EVERY)
    _last: tuple[int, int] | None = None

    def max_nodes(self, spec: SpecConfig, batch: int = 1) -> int:
        """Nodes for the next step; asking changes nothing, since a step may be planned and not run.

        Args:
            spec: the sequence's settings.
            batch: how many sequences decode in the step.
        """
        if not self.adaptive:
            return spec.max_nodes
        batch = 1 if self.alone else batch
        nodes = self._best(spec, batch)
        if nodes or not self._could_pay(spec, batch):
            return nodes
        # once due, a probe stays due until a step has really drafted (a lookup may find nothing)
        return self._fewest(spec) if self.idle + 1 >= self.wait else 0

    def record(self, drafted: int, committed: int) -> None:
        """Record a step: `drafted` nodes verified, `committed` tokens gained. Plain ones make a probe due."""
        if not self.lags:
            self._learn(drafted, committed)
            return
        self.settle()
        self._last = (drafted, committed)

    def settle(self) -> None:
        """Let the last step recorded count: another one has been launched since."""
        if self._last is not None:
            self._learn(*self._last)
            self._last = None

    def _learn(self, drafted: int, committed: int) -> None:
        if drafted == 0:
            self.idle += 1
            return
        probed = self.idle + 1 >= self.wait
        self.steps += 1
        self.idle = 0
        accepted = committed - 1
        self.wait = min(2 * self.wait, LONGEST_PROBE_WAIT) if probed and not accepted else PROBE_EVERY
        self.first += EMA_WEIGHT * ((accepted >= 1) - self.first)
        for _ in range(accepted - 1):
            self.later += EMA_WEIGHT * (1 - self.later)
        if 1 <= accepted < drafted:
            self.later += EMA_WEIGHT * (0 - self.later)
        self.committed += EMA_WEIGHT * (committed - self.committed)
        self.drafted += (EMA_WEIGHT if self.steps > 1 else 1.0) * (drafted - self.drafted)

    def _best(self, spec: SpecConfig, batch: int) -> int:
        """The number of nodes that commits most tokens per time; 0 where plain decoding does."""
        if not self.makes_chains:
            if self.steps < WARM_UP_STEPS and self._cost(spec, spec.max_nodes, batch) <= WORTH_A_TRY:
                return spec.max_nodes
            nodes = self.drafted or spec.max_nodes
            return spec.max_nodes if self.committed >= self._cost(spec, nodes, batch) else 0
        best, value = 0, LEAST_GAIN
        tokens, reached = 1.0, self.first
        for nodes in range(1, min(spec.max_depth, spec.max_nodes) + 1):
            tokens += reached
            reached *= self.later
            if (found := tokens / self._cost(spec, nodes, batch)) > value:
                best, value = nodes, found
        return best

    def _could_pay(self, spec: SpecConfig, batch: int) -> bool:
        """Whether drafts that are nearly all accepted would beat plain decoding."""
        nodes = self._fewest(spec)
        depth = min(nodes, spec.max_depth)
        # a head that drafts again reads all that was written meanwhile, which the cost of a step leaves out
        return 1 + BEST_ACCEPTANCE * depth > PROBE_GAIN * self._cost(spec, nodes, batch)

    def _fewest(self, spec: SpecConfig) -> int:
        return 1 if self.makes_chains else spec.max_nodes

    def _cost(self, spec: SpecConfig, nodes: float, batch: int) -> float:
        """Time of a step in which every sequence drafts so many nodes, relative to a plain one."""
        drafting = self.draft_cost * min(nodes, spec.max_depth) / spec.max_depth
        return self.costs.of(batch * (1 + nodes)) / self.costs.of(batch) + drafting
