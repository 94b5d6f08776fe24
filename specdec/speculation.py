"""When speculation pays: what a sequence's drafts are worth, and what passes cost; counts and tables only.

Owns the estimates of how far drafts are accepted, the list of nodes by what they promise, and the decision of
a sequence that decides alone: one whose text depends on what was drafted reads the table that comes with the
program and its own history, so that its text stays a function of the seed. All others share one budget of
nodes (`specdec.node_budget`). Reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from specdec.config import SpecConfig

KEEP = 0.97  # of a sequence's observations: about the last 33 count
SHARED_KEEP = 0.995  # of everybody's
PRIOR = 4.0  # observations that the program's expectation counts for
SHARED_PRIOR = 8.0  # and those of everybody for one sequence: texts differ less than short runs of luck
IDLE_KEEP = 0.97  # of a sequence's observations, with every step that it does not draft: texts move on
PROBE_EVERY = 24  # steps without speculation before one step tries again, at first
LONGEST_PROBE_WAIT = 8 * PROBE_EVERY  # a probe that did not pay doubles the wait, up to this
BEST_ACCEPTANCE = 0.8  # that a probe may hope for
PROBE_GAIN = 1.05  # what such a hope must promise beside plain decoding
LEAST_GAIN = 1.02  # what drafting must promise: an estimate that breaks even may as well be a loss
EXPECTED_ACCEPTANCE = 0.5  # of a drafted token, before anything was seen
# how often the target goes on to a node's child of a rank, beside its first child: the shipped draft on
# MT-bench accepts 0.42 of first tokens in chains and 0.55 of the best four
RANK_RATIOS = (1.0, 0.16, 0.09, 0.065)
LATER_RANK_RATIO = 0.75

CONTEXT = 128  # tokens behind which a table's passes are timed
TABULATED = 512  # rows up to which a table is spelled out


@dataclass(frozen=True)
class CostTable:
    """Relative time of a target pass by its rows, one row behind `CONTEXT` tokens = 1; lines between points.

    `points` are (rows, time), ascending, the first (1, 1.0), for rows of one sequence. `per_sequence` is what
    every further sequence among the rows adds, and `sequence_context` what every further token behind a
    sequence adds to that, however many rows it has; `per_context` is what the token adds to each row.
    `head_share` is the output head's part of a row's work, which rows that no walk visits do without.
    """

    points: tuple[tuple[int, float], ...]
    per_context: float = 0.0
    per_sequence: float = 0.0
    sequence_context: float = 0.0
    head_share: float = 0.0

    def of(self, rows: float) -> float:
        """Time of a pass over so many rows; beyond the last point it grows as between the last two."""
        if rows <= 1:
            return 1.0
        if rows < TABULATED:
            low = int(rows)
            known = self._tabulated
            return known[low] + (known[low + 1] - known[low]) * (rows - low)
        return self._between(rows)

    @cached_property
    def _tabulated(self) -> list[float]:
        """Times of whole numbers of rows: a plan asks for hundreds."""
        return [1.0, *(self._between(rows) for rows in range(1, TABULATED + 1))]

    def _between(self, rows: float) -> float:
        index = min(max(1, bisect_left(self.points, (rows, 0.0))), len(self.points) - 1)
        (before, low), (after, high) = self.points[index - 1], self.points[index]
        return low + (high - low) * (rows - before) / (after - before)

    def beside(self, sequences: SequenceOf[tuple[int, int]]) -> float:
        """What a pass takes beside its rows, for its sequences as (rows, tokens of context)."""
        own = sum(self.sequence_context * (context - CONTEXT) for _, context in sequences)
        rows = sum(count * self.of_context(context) for count, context in sequences)
        return self.per_sequence * max(0, len(sequences) - 1) + own + rows

    def of_context(self, context: int) -> float:
        """What a row takes beyond one behind `CONTEXT` tokens."""
        return self.per_context * (context - CONTEXT)

    def worth(self, rows: float, visited: float) -> float:
        """How many whole rows a pass does the work of, when walks visit so many of its rows."""
        return rows - self.head_share * (rows - visited)


# 2 AVX-512 cores with packed fp16 weights (SmolLM2-135M), `specdec bench --verify-cost`; see results/LOG.md
FIXED_COSTS = CostTable(((1, 1.0), (4, 1.27), (8, 1.62), (12, 2.07), (16, 2.61), (24, 3.50), (32, 4.38)))


class Acceptance:
    """How often drafted tokens are accepted: a chain's first, and one behind an accepted one.

    Shares of what was seen lately, `PRIOR` or `SHARED_PRIOR` observations of what was expected among them.
    In a tree they speak of the first child; what its siblings add is known by ratio.

    Args:
        expected: whose shares are expected; `EXPECTED_ACCEPTANCE` without.
        keep: what one observation leaves of the weight of those before it.
    """

    def __init__(self, expected: Acceptance | None = None, keep: float = KEEP) -> None:
        self._expected = expected
        self._prior = PRIOR if expected is None else SHARED_PRIOR
        self._keep = keep
        self._hits = [0.0, 0.0]
        self._seen = [0.0, 0.0]

    @classmethod
    def like(cls, share: float) -> Acceptance:
        """One that was seen to be so, for long."""
        made = cls()
        made._hits, made._seen = [1e6 * share] * 2, [1e6] * 2
        return made

    @property
    def first(self) -> float:
        """Of a first token."""
        expected = EXPECTED_ACCEPTANCE if self._expected is None else self._expected.first
        return (self._prior * expected + self._hits[0]) / (self._prior + self._seen[0])

    @property
    def later(self) -> float:
        """Of one behind an accepted one."""
        expected = EXPECTED_ACCEPTANCE if self._expected is None else self._expected.later
        return (self._prior * expected + self._hits[1]) / (self._prior + self._seen[1])

    def learn(self, drafted_per_depth: SequenceOf[int], accepted: int) -> None:
        """Take in a verified tree: nodes at depth 1, 2, ..., and the length of the accepted path."""
        above = 1
        for depth, nodes in enumerate(drafted_per_depth[: accepted + 1]):
            which = min(depth, 1)
            self._hits[which] = self._keep * self._hits[which] + (accepted > depth) / _reach(
                -(-nodes // above)
            )
            self._seen[which] = self._keep * self._seen[which] + 1.0
            above = nodes

    def forget(self) -> None:
        """Drop what was seen: what was expected at first is expected again."""
        self._hits, self._seen = [0.0, 0.0], [0.0, 0.0]

    def age(self) -> None:
        """A step without drafts: what was seen says less of the text there is now."""
        for which in (0, 1):
            self._hits[which] *= IDLE_KEEP
            self._seen[which] *= IDLE_KEEP

    def gains(self, spec: SpecConfig) -> tuple[tuple[float, int], ...]:
        """The nodes of the settings' best tree, best first, each with its chance and its depth."""
        return _gains(spec.max_depth, spec.top_k, spec.max_nodes, round(self.first, 2), round(self.later, 2))


def _ratio(rank: int) -> float:
    beyond = max(0, rank - len(RANK_RATIOS) + 1)
    return RANK_RATIOS[rank - beyond] * LATER_RANK_RATIO**beyond


@lru_cache(maxsize=64)
def _reach(children: int) -> float:
    """How much oftener one of so many children is accepted than the first of them."""
    return sum(map(_ratio, range(children)))


@lru_cache(maxsize=4096)
def _gains(depth: int, top_k: int, nodes: int, first: float, later: float) -> tuple[tuple[float, int], ...]:
    found: list[tuple[float, int]] = []
    level = [1.0]
    for at in range(1, depth + 1):
        # children of one node exclude each other
        each = min(first if at == 1 else later, 1 / _reach(top_k))
        level = sorted(
            (above * each * _ratio(rank) for above in level for rank in range(top_k)), reverse=True
        )[:nodes]
        found += [(chance, at) for chance in level]
    found.sort(key=lambda node: (-node[0], node[1]))
    return tuple(found[:nodes])


def grown_depth(spec: SpecConfig, nodes: int) -> int:
    """How deep a tree of so many of the settings' nodes is worth growing."""
    if nodes >= spec.max_nodes:
        return spec.max_depth
    return max(depth for _, depth in Acceptance().gains(spec)[:nodes]) if nodes else 0


@dataclass
class SpeculationController:
    """What one sequence's drafts were worth, and its decision where it decides alone.

    Attributes:
        adaptive: whether anything is decided at all; otherwise every step drafts all.
        draft_cost: time of a whole proposal, in units of a plain step.
        costs: time of a target pass by rows, for a decision alone.
        alone: whether to decide as if no other sequence were in the pass, by nothing but its own history.
        whole: whether trees are drafted whole or not at all: those whose text depends on the shape.
        lags: whether the last step recorded counts only once the next one is recorded or planned ahead: an
            engine that plans a step while the one before it runs decides as one that does not.
        shared: estimates over all sequences, which this one adds to.
        drafting: whether its last step drafted.
        idle: steps since it last drafted.
        wait: steps without drafts after which a probe is due.
    """

    adaptive: bool
    draft_cost: float
    costs: CostTable = FIXED_COSTS
    alone: bool = True
    whole: bool = False
    lags: bool = False
    shared: Acceptance | None = None
    acceptance: Acceptance = field(init=False)
    drafting: bool = False
    idle: int = 0
    wait: int = PROBE_EVERY
    _last: tuple[SequenceOf[int], int] | None = None

    def __post_init__(self) -> None:
        self.acceptance = Acceptance(self.shared)

    @property
    def pooled(self) -> bool:
        """Whether its nodes come out of the budget that all share."""
        return self.adaptive and not self.alone

    @property
    def is_due(self) -> bool:
        """Whether a probe is due; it stays so until a step has really drafted (a lookup may find nothing)."""
        return self.idle + 1 >= self.wait

    def max_nodes(self, spec: SpecConfig) -> int:
        """Nodes for the next step by its own lights; asking changes nothing, plans may be dropped."""
        if not self.adaptive:
            return spec.max_nodes
        gains = self.acceptance.gains(spec)
        best, value = 0, LEAST_GAIN
        tokens = 1.0
        for nodes, (gain, depth) in enumerate(gains, start=1):
            tokens += gain
            if self.whole and spec.top_k > 1 and nodes < len(gains):
                continue
            if (found := tokens / self._cost(spec, nodes, depth)) > value:
                best, value = nodes, found
        if best or not self.is_due:
            return best
        fewest = spec.max_nodes if self.whole and spec.top_k > 1 else 1
        depth = grown_depth(spec, fewest)
        # a head that drafts again reads all that was written meanwhile, which the cost of a step leaves out
        pays = 1 + BEST_ACCEPTANCE * depth > PROBE_GAIN * self._cost(spec, fewest, depth)
        return fewest if pays else 0

    def _cost(self, spec: SpecConfig, nodes: int, depth: int) -> float:
        return self.costs.of(1 + nodes) + self.draft_cost * depth / spec.max_depth

    def record(self, drafted_per_depth: SequenceOf[int], accepted: int) -> None:
        """Record a step: nodes verified at depth 1, 2, ..., and how many of a path were accepted."""
        if not self.lags:
            self._learn(drafted_per_depth, accepted)
            return
        self.settle()
        self._last = (drafted_per_depth, accepted)

    def settle(self) -> None:
        """Let the last step recorded count: another one has been launched since."""
        if self._last is not None:
            self._learn(*self._last)
            self._last = None

    def _learn(self, drafted_per_depth: SequenceOf[int], accepted: int) -> None:
        self.drafting = bool(drafted_per_depth)
        if not drafted_per_depth:
            self.idle += 1
            if self.shared is not None:
                self.acceptance.age()
            return
        failed = self.is_due and not accepted
        self.wait = min(2 * self.wait, LONGEST_PROBE_WAIT) if failed else PROBE_EVERY
        self.idle = 0
        self.acceptance.learn(drafted_per_depth, accepted)
        if self.shared is not None:
            self.shared.learn(drafted_per_depth, accepted)
