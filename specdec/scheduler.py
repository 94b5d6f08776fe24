"""Which sequences work in a step, and on how many rows.

Continuous batching: decoding sequences first, then prompt chunks in the room left of the step's
token budget, then new sequences. A sequence that cannot get the block it needs makes the youngest
one give way (preemption by recomputation). Host data only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specdec.blocks import BlockManager
from specdec.config import EngineConfig, SpecConfig
from specdec.sequence import Sequence, SequenceStatus


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


class Scheduler:
    """Owns the waiting and running lists.

    `scratch_rows` says how many rows behind the committed ones a proposal writes (the drafter knows).
    """

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, scratch_rows: Callable[[SpecConfig], int]
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.scratch_rows = scratch_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.num_preemptions = 0
        # sequences that a full step left out; they come first in the next one
        self._left_out: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step's share of every sequence that works in it.

        Sequences preempted on the way are listed in `preempted` until the next call.
        """
        self.preempted = []
        budget = self.config.max_batch_tokens
        plan: list[ScheduledSequence] = []
        decoding = [seq for seq in self.running if not seq.is_prefilling]
        decoding.sort(key=lambda seq: seq.seq_id not in self._left_out)
        self._left_out.clear()
        room = max(0, budget // len(decoding) - 1) if decoding else 0
        for seq in decoding:
            if seq.status is not SequenceStatus.RUNNING:
                continue
            nodes = self._wanted_nodes(seq, min(room, budget - 1))
            if budget <= 0 or (plan and seq.needs_whole_trees and 1 + nodes > budget):
                self._left_out.add(seq.seq_id)
            elif share := self._decode_share(seq, nodes):
                plan.append(share)
                budget -= 1 + share.max_nodes
        for seq in [seq for seq in self.running if seq.is_prefilling]:
            if (
                budget > 0
                and seq.status is SequenceStatus.RUNNING
                and (share := self._prefill_share(seq, budget))
            ):
                plan.append(share)
                budget -= share.num_rows
        while (
            self.waiting
            and budget > 0
            and len(self.running) < self.config.max_num_seqs
            and not self.preempted
        ):
            seq = self.waiting[0]
            # the whole prompt and what is next must fit now, so that an admitted prompt can finish
            tree = seq.spec.max_nodes if seq.spec is not None and seq.needs_whole_trees else 0
            if not self.blocks.can_extend(
                seq.block_table, max(len(seq.token_ids) + 1, self._rows(seq, tree))
            ):
                break
            self.waiting.popleft()
            self._admit(seq)
            if share := self._prefill_share(seq, budget):
                plan.append(share)
                budget -= share.num_rows
        return [share for share in plan if share.seq.status is SequenceStatus.RUNNING]

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out and give its blocks back; a second call does nothing."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        self.blocks.release(seq.block_table)

    def _admit(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)

    def _wanted_nodes(self, seq: Sequence, room: int) -> int:
        # a draft deeper than the tokens still wanted, or past the context, is work thrown away
        if seq.spec is None or seq.remaining_tokens() <= 1:
            return 0
        # how a prompt was cut must not decide whether its last token drafts
        if seq.needs_whole_trees and seq.num_output == 0:
            return 0
        wanted = seq.controller.max_nodes(seq.spec)
        return wanted if seq.needs_whole_trees else min(wanted, room)

    def _rows(self, seq: Sequence, nodes: int) -> int:
        """Rows that a step with a tree of so many nodes uses, those of the text included."""
        behind = max(nodes, self.scratch_rows(seq.spec)) if nodes and seq.spec is not None else 0
        return len(seq.token_ids) + behind

    def _decode_share(self, seq: Sequence, wanted: int) -> ScheduledSequence | None:
        rows = self._rows(seq, wanted)
        if wanted and not seq.needs_whole_trees and not self.blocks.can_extend(seq.block_table, rows):
            wanted, rows = 0, len(seq.token_ids)
        if not self._make_room(seq, rows):
            return None
        return ScheduledSequence(seq, 1, wanted)

    def _prefill_share(self, seq: Sequence, budget: int) -> ScheduledSequence | None:
        # a sequence that was preempted drafts from its last token, as it would have done
        last = len(seq.token_ids) - (seq.num_output > 0)
        count = min(last - seq.num_computed, budget)
        if not self._make_room(seq, seq.num_computed + count):
            return None
        return ScheduledSequence(seq, count, 0)

    def _make_room(self, seq: Sequence, rows: int) -> bool:
        """Extend the block table to `rows`, preempting younger sequences; False if `seq` itself gave way."""
        while not self.blocks.can_extend(seq.block_table, rows):
            victim = self.running[-1]
            self.preempt(victim)
            self.preempted.append(victim)
            if victim is seq:
                return False
        self.blocks.extend(seq.block_table, rows)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's blocks; it waits, first in line, and starts over."""
        self.running.remove(seq)
        self.blocks.release(seq.block_table)
        seq.reset_cache()
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
