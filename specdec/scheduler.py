"""Which sequences work in a step, and on how many rows.

Continuous batching: decoding sequences, prompt chunks and new sequences share the step's token budget, which
counts tree nodes. While prompts are to be read, a part of the budget is kept for them. Lower `priority` comes
first, then arrival. A sequence that cannot get the block it needs makes the least urgent one give way
(preemption); what that one had computed comes back through the prefix cache, as far as it is still there.

Nobody starves: one admission in `FAIR_EVERY` goes to the request that arrived first, whatever its priority,
and a request that gave way `PROTECTED_AFTER` times comes before all others from then on. Host data only.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from specdec.blocks import BlockManager
from specdec.config import EngineConfig, SpecConfig
from specdec.node_budget import NodeBudget
from specdec.prefix_cache import PrefixCache
from specdec.sequence import Sequence, SequenceStatus

FAIR_EVERY = 4
PROTECTED_AFTER = 3
# one part in so many of a step's budget is for prompts while any wait
PROMPT_PART = 4


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's share of a step.

    `num_rows` committed tokens are computed, from `seq.num_computed` on; when they reach the last
    token, that token is the root of a tree of at most `max_nodes` drafted nodes.
    """

    seq: Sequence
    num_rows: int
    max_nodes: int

    @property
    def reaches_root(self) -> bool:
        return self.seq.num_computed + self.num_rows == len(self.seq.token_ids)

    @property
    def is_prefill(self) -> bool:
        return self.seq.is_prefilling


def urgency(seq: Sequence) -> tuple[int, int, int]:
    """Sort key: the most urgent first."""
    if seq.num_preemptions >= PROTECTED_AFTER:
        return (0, 0, seq.seq_id)
    return (1, seq.options.priority, seq.seq_id)


class Scheduler:
    """Owns the waiting and running lists.

    `scratch_rows` says how many rows behind the committed ones a proposal writes (the drafter knows).
    `waiting` is in order of urgency. A sequence is admitted with blocks for its whole text and what comes
    next, so that no promise is made twice.
    """

    def __init__(
        self,
        config: EngineConfig,
        blocks: BlockManager,
        scratch_rows: Callable[[SpecConfig], int],
        prefixes: PrefixCache | None = None,
        budget: NodeBudget | None = None,
    ) -> None:
        self.config = config
        self.budget = budget
        self.blocks = blocks
        self.scratch_rows = scratch_rows
        self.prefixes = prefixes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.num_preemptions = 0
        self._num_admissions = 0
        # sequences that a full step left out; they come first in the next one
        self._left_out: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=urgency)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step's share of every sequence that works in it.

        Sequences preempted on the way are listed in `preempted` until the next call.
        """
        self.preempted = []
        budget = self.config.max_batch_tokens
        plan: list[ScheduledSequence] = []
        for_prompts = budget // PROMPT_PART if self._prompts_wait() else 0
        budget = self._plan_decoding(plan, budget - for_prompts) + for_prompts
        for seq in sorted((seq for seq in self.running if seq.is_prefilling), key=urgency):
            if budget <= 0:
                break
            plan.append(self._prefill_share(seq, budget))
            budget -= plan[-1].num_rows
        while budget > 0 and not self.preempted and (admitted := self._admit_next()):
            if admitted.is_prefilling:
                plan.append(self._prefill_share(admitted, budget))
                budget -= plan[-1].num_rows
            else:
                # it was preempted, and comes back with all it had computed
                none = {} if self.budget is None or not admitted.controller.pooled else {admitted.seq_id: 0}
                budget = self._plan_one_decoding(plan, admitted, budget, budget - 1, none)
        return [share for share in plan if share.seq.status is SequenceStatus.RUNNING]

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        return [
            seq for seq in [*self.running, *self.waiting] if seq.deadline is not None and seq.deadline <= now
        ]

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out and give its blocks back; a second call does nothing."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.blocks.release(seq.block_table)

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits for its turn and starts over."""
        self.running.remove(seq)
        self.blocks.release(seq.block_table)
        seq.reset_cache()
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.add(seq)
        self.num_preemptions += 1

    def _prompts_wait(self) -> bool:
        return self.has_room_for_waiting or any(seq.is_prefilling for seq in self.running)

    @property
    def has_room_for_waiting(self) -> bool:
        """Whether a request waits though there is a slot for it."""
        return bool(self.waiting) and len(self.running) < self.config.max_num_seqs

    def _plan_decoding(self, plan: list[ScheduledSequence], budget: int) -> int:
        """Give the decoding sequences their shares; returns what is left of the budget."""
        decoding = [seq for seq in self.running if not seq.is_prefilling]
        decoding.sort(key=lambda seq: (seq.seq_id not in self._left_out, urgency(seq)))
        self._left_out.clear()
        room = max(0, budget // len(decoding) - 1) if decoding else 0
        shared = self.shared_nodes(decoding)
        for seq in decoding:
            if seq.status is not SequenceStatus.RUNNING:
                continue
            budget = self._plan_one_decoding(plan, seq, budget, min(room, budget - 1), shared)
        return budget

    def _plan_one_decoding(
        self, plan: list[ScheduledSequence], seq: Sequence, budget: int, room: int, shared: dict[int, int]
    ) -> int:
        nodes = self.wanted_nodes(seq, room, shared)
        if budget <= 0 or (plan and seq.needs_whole_trees and 1 + nodes > budget):
            self._left_out.add(seq.seq_id)
        elif share := self._decode_share(seq, nodes):
            plan.append(share)
            budget -= 1 + share.max_nodes
        return budget

    def _admit_next(self) -> Sequence | None:
        """Move the next sequence in line to the running ones; None when no slot or no room is free for it."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return None
        fair = self._num_admissions % FAIR_EVERY == FAIR_EVERY - 1
        seq = min(self.waiting, key=lambda each: each.seq_id) if fair else self.waiting[0]
        # the whole text and what is next must fit now, so that an admitted prompt can finish
        tree = seq.spec.max_nodes if seq.spec is not None and seq.needs_whole_trees else 0
        rows = max(len(seq.token_ids) + 1, self.rows(seq, tree))
        if self.prefixes is not None:
            if not self.prefixes.restore(seq, self.blocks, rows):
                return None
        elif self.blocks.can_extend(seq.block_table, rows):
            self.blocks.extend(seq.block_table, rows)
        else:
            return None
        self.waiting.remove(seq)
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        self._num_admissions += 1
        return seq

    def shared_nodes(self, decoding: list[Sequence]) -> dict[int, int]:
        """Nodes of those sequences of a step that share one budget, by sequence."""
        return self.budget.plan(decoding) if self.budget is not None else {}

    def wanted_nodes(self, seq: Sequence, room: int, shared: dict[int, int]) -> int:
        """Nodes that a sequence drafts in a step, with room for so many; its share, or by its own lights."""
        # a draft deeper than the tokens still wanted, or past the context, is work thrown away
        if seq.spec is None or seq.remaining_tokens() <= 1:
            return 0
        wanted = shared.get(seq.seq_id)
        if wanted is None:
            wanted = seq.controller.max_nodes(seq.spec)
        return wanted if seq.needs_whole_trees else min(wanted, max(0, room))

    def rows(self, seq: Sequence, nodes: int) -> int:
        """Rows that a step with a tree of so many nodes uses, those of the text included."""
        behind = max(nodes, self.scratch_rows(seq.spec)) if nodes and seq.spec is not None else 0
        return len(seq.token_ids) + behind

    def _decode_share(self, seq: Sequence, wanted: int) -> ScheduledSequence | None:
        rows = self.rows(seq, wanted)
        if wanted and not seq.needs_whole_trees and not self.blocks.can_extend(seq.block_table, rows):
            wanted, rows = 0, len(seq.token_ids)
        if not self._make_room(seq, rows):
            return None
        return ScheduledSequence(seq, 1, wanted)

    def _prefill_share(self, seq: Sequence, budget: int) -> ScheduledSequence:
        # a sequence that was preempted drafts from its last token, as it would have done
        last = len(seq.token_ids) - (seq.num_output > 0)
        return ScheduledSequence(seq, min(last - seq.num_computed, budget), 0)

    def _make_room(self, seq: Sequence, rows: int) -> bool:
        """Extend the block table to `rows`, preempting less urgent ones; False if `seq` itself gave way."""
        while not self.blocks.can_extend(seq.block_table, rows):
            victim = max(self.running, key=urgency)
            self.preempt(victim)
            self.preempted.append(victim)
            if victim is seq:
                return False
        self.blocks.extend(seq.block_table, rows)
        return True
