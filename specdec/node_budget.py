"""One budget of drafted nodes for a step, shared out to where they promise most.

A step's value is its tokens per time. Every node has a chance (`specdec.speculation`) and a cost: its row in
the target's pass, and its sequence's part of the head's passes. Nodes of all sequences are taken in the order
of their chances, and the best beginning of that order is drafted: chains are cut and trees shrunk where a
batch makes rows dear, sequences whose drafts fail get none, and where no node pays nobody drafts. Sources:
goodput as in TurboSpec, the pooled order as in DSpark's scheduler (arXiv:2607.05147).

Sequences that do not draft are tried again now and then, one at a time, by a single node. `PROBE_SHARE` of
the time spent pays for that, less and less of it while trying does not help, and nobody is tried where even
drafts that mostly hold would not pay.

Host data only. Decides by counts and by costs that others measured.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from specdec.config import SpecConfig
from specdec.live_costs import LiveCosts
from specdec.sequence import Sequence
from specdec.speculation import (
    BEST_ACCEPTANCE,
    PROBE_EVERY,
    PROBE_GAIN,
    SHARED_KEEP,
    Acceptance,
)

# of the time spent; what probing may cost where drafts never pay
PROBE_SHARE = 0.01
# each probe that fails makes the next ones rarer by so much, down to a fifth, until one leads to drafting
RARER, RAREST = 0.9, 0.2
# probes that may be saved up for, in one-row passes: a long text's states are many rows to read
MOST_CREDIT = 4.0
# a row that is only stored costs the head about so much of one that is drafted from
SILENT_ROW = 0.3
# steps over which the reading of what was written meanwhile is spread: about as long as estimates look back
HORIZON = 16
# nodes that may be taken without a gain before the search ends: costs have steps
PATIENCE = 16
# what drafting must promise to go on, beside plain decoding; to begin, more than that
LEAST_TO_STAY = 0.99
# nodes with a smaller chance are not looked at
LEAST_CHANCE = 0.02


@dataclass(frozen=True)
class _Asking:
    """A sequence that may draft: its nodes, best first, and what drafting for it costs."""

    seq: Sequence
    gains: SequenceOf[tuple[float, int]]
    pass_cost: float  # of a head's pass, in one-row passes of the target
    catch_up: float  # of reading what was written since it last drafted
    row_context: float  # of a row of it, beyond one behind the table's context


@dataclass(frozen=True)
class _Choice:
    """How many nodes each sequence drafts, by its place, and what that promises."""

    nodes: list[int]
    value: float
    drafting: float  # expected cost of the proposal


class NodeBudget:
    """Shares the nodes of a step out.

    Args:
        costs: of passes and proposals.

    Attributes:
        shared: acceptance over all sequences; new ones begin with it.
        credit: time that probes may spend, in one-row passes.
        expected_gain: tokens per time of the last plan beside plain decoding's.
        planned_nodes: of the last plan.
        probes: steps that drafted to find out.
    """

    def __init__(self, costs: LiveCosts) -> None:
        self.costs = costs
        self.shared = Acceptance(keep=SHARED_KEEP)
        self.probes = 0
        self.forget()

    def forget(self) -> None:
        """Share out again as if no step had been: of acceptance, costs and probes nothing is known."""
        self.costs.forget()
        self.shared.forget()
        self.credit = 0.0
        self.expected_gain = 1.0
        self.planned_nodes = 0
        self._probed: dict[int, float] = {}
        self._hopes: dict[tuple[int, int, SpecConfig], bool] = {}
        self._load = 0
        self._eagerness = 1.0
        self._drafting = 0.0

    def plan(self, decoding: SequenceOf[Sequence]) -> dict[int, int]:
        """Nodes of the next step by sequence, for those that share; asking again changes nothing.

        Args:
            decoding: all sequences that decode in the step.
        """
        pooled = [
            seq
            for seq in decoding
            if seq.spec is not None and seq.controller.pooled and seq.remaining_tokens() > 1
        ]
        self._probed = {}
        self._drafting = 0.0
        self.expected_gain, self.planned_nodes = 1.0, 0
        if not pooled:
            return {}
        rows = len(decoding) + sum(
            seq.controller.max_nodes(seq.spec)
            for seq in decoding
            if seq.spec is not None and not seq.controller.pooled
        )
        table = self.costs.table
        beside = table.beside([(1, len(seq.token_ids)) for seq in decoding])
        time = table.of(table.worth(rows, len(decoding))) + beside
        base = len(decoding) / time
        asking = [self._asking(seq) for seq in pooled]
        on = any(each.seq.controller.drafting for each in asking)
        choice = self._best(asking, len(decoding), rows, time)
        nodes = {each.seq.seq_id: 0 for each in asking}
        pays = choice is not None and choice.value > base * (LEAST_TO_STAY if on else 1.0)
        if choice is not None and pays and not self.costs.is_stale(table.worth(rows, len(decoding))):
            nodes.update((each.seq.seq_id, n) for each, n in zip(asking, choice.nodes, strict=True))
            self._drafting = choice.drafting
            self.expected_gain = choice.value / base
            self._eagerness = 1.0
        if (probe := self._probe(asking, nodes, len(decoding), rows, time)) is not None:
            nodes[probe.seq.seq_id] = 1
        self.planned_nodes = sum(nodes.values())
        return nodes

    def ran(
        self,
        verified: SequenceOf[tuple[Sequence, int, int]],
        pass_seconds: float | None = None,
        draft_seconds: float | None = None,
    ) -> None:
        """Take in a step of decoding sequences.

        Args:
            verified: who was in it, with how many nodes, and how many of these were accepted.
            pass_seconds: what the target's pass and the choice of tokens took, where it was timed.
            draft_seconds: what the proposal took.
        """
        rows = self.costs.table.worth(
            sum(1 + nodes for _, nodes, _ in verified), sum(1 + accepted for _, _, accepted in verified)
        )
        earned = PROBE_SHARE * self._eagerness * self.costs.table.of(rows)
        self.credit = min(MOST_CREDIT, self.credit + earned)
        for seq, nodes, accepted in verified:
            if nodes and seq.seq_id in self._probed:
                self.credit -= self._probed[seq.seq_id]
                self.probes += 1
                if not accepted:
                    self._eagerness = max(RAREST, RARER * self._eagerness)
        if 2 * len(verified) <= self._load:
            # what did not pay in a full batch may in a small one
            self._eagerness = 1.0
            for seq, _, _ in verified:
                seq.controller.wait = PROBE_EVERY
        if 2 * len(verified) <= self._load or len(verified) > self._load:
            self._load = len(verified)
        if pass_seconds is not None:
            beside = self.costs.table.beside([(1 + nodes, len(seq.token_ids)) for seq, nodes, _ in verified])
            self.costs.saw_pass(rows, pass_seconds, beside)
        if draft_seconds is not None and self._drafting:
            self.costs.saw_drafting(self._drafting, draft_seconds)

    def _asking(self, seq: Sequence) -> _Asking:
        spec = seq.spec
        assert spec is not None, "only sequences that speculate ask"
        deepest = seq.remaining_tokens() - 1
        gains = seq.controller.acceptance.gains(spec)
        pass_cost = seq.controller.draft_cost / spec.max_depth
        # the rows of a step's own tokens are part of the first pass
        late = max(0, seq.num_computed - seq.draft_computed - 1 - spec.max_depth) if pass_cost else 0
        points = self.costs.table.points
        (before, low), (after, high) = points[-2:]
        return _Asking(
            seq=seq,
            gains=gains if deepest >= spec.max_depth else [each for each in gains if each[1] <= deepest],
            pass_cost=pass_cost,
            catch_up=pass_cost * SILENT_ROW * late * (high - low) / (after - before),
            row_context=self.costs.table.of_context(len(seq.token_ids)),
        )

    def _best(self, asking: list[_Asking], tokens: float, rows: int, time: float) -> _Choice | None:
        """The best beginning of all nodes in the order of their chances; None where the first cannot pay."""
        of, worth = self.costs.table.of, self.costs.table.worth
        bare = of(worth(rows, tokens))
        beside = time - bare
        # the cheapest a row can be, alone or in company, bounds what any node must bring
        more = (1.0, rows + 1.0)
        row = min((of(worth(rows + extra, tokens)) - bare) / extra for extra in more)
        if max(each.gains[0][0] for each in asking) <= row * tokens / time:
            return None
        order = sorted(
            (-chance, depth, place)
            for place, each in enumerate(asking)
            for chance, depth in each.gains
            if chance > LEAST_CHANCE
        )
        reached = [0] * len(asking)
        at_depth: dict[int, int] = {}
        drafting = catch_up = 0.0
        best, count, best_drafting = 0.0, 0, 0.0
        for taken, (chance, depth, place) in enumerate(order, start=1):
            each = asking[place]
            tokens -= chance
            beside += each.row_context
            if depth > reached[place]:
                reached[place] = depth
                others = at_depth.get(depth, 0)
                more_rows = of(others + 1) - (of(others) if others else 0.0)
                # the first pass of a proposal also reads what was just committed
                drafting += each.pass_cost * more_rows * (2 if depth == 1 else 1)
                at_depth[depth] = others + 1
                if depth == 1:
                    catch_up += each.catch_up
            spread = catch_up / min(HORIZON, each.seq.remaining_tokens())
            passing = of(worth(rows + taken, tokens)) + beside
            value = tokens / (passing + self.costs.drafting * (drafting + spread))
            if value > best:
                best, count, best_drafting = value, taken, drafting + catch_up
            elif taken - count > PATIENCE:
                break
        nodes = [0] * len(asking)
        for _, _, place in order[:count]:
            nodes[place] += 1
        return _Choice(nodes, best, best_drafting)

    def _probe(
        self, asking: list[_Asking], nodes: dict[int, int], tokens: int, rows: int, time: float
    ) -> _Asking | None:
        """Who is to be tried in the step."""
        due = [each for each in asking if not nodes[each.seq.seq_id] and each.seq.controller.is_due]
        if not due or self.credit <= 0.0:
            return None
        probe = min(due, key=lambda each: each.catch_up)
        table = self.costs.table
        row = table.of(table.worth(rows + 1, tokens)) - table.of(table.worth(rows, tokens))
        price = row + self.costs.drafting * (2 * probe.pass_cost + probe.catch_up)
        if price > self.credit or not self._may_hope(asking, probe, tokens, rows, time):
            return None
        self._probed = {probe.seq.seq_id: price}
        return probe

    def _may_hope(self, asking: list[_Asking], probe: _Asking, tokens: int, rows: int, time: float) -> bool:
        """Whether drafts that mostly hold would pay at this load, for all or for the one."""
        spec = probe.seq.spec
        assert spec is not None, "only sequences that speculate ask"
        key = (rows, self.costs.version, spec)
        if key not in self._hopes:
            if len(self._hopes) > 256:
                self._hopes.clear()
            gains = Acceptance.like(BEST_ACCEPTANCE).gains(spec)
            hopeful = [_Asking(each.seq, gains, each.pass_cost, 0.0, each.row_context) for each in asking]
            choice = self._best(hopeful, tokens, rows, time)
            self._hopes[key] = choice is not None and choice.value > PROBE_GAIN * tokens / time
        return self._hopes[key]
