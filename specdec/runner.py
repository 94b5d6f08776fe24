"""Packs a step's work into one ragged batch and runs the target over it.

Owns the target's weights and KV pool. Each sequence contributes its uncomputed committed tokens (a
prompt chunk, or just the root) and then the drafted nodes of its tree; rows are padded to a multiple
that keeps a row's bits independent of how many rows it shares the pass with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention import SequenceAttention, are_consecutive, block_slots, causal_mask
from specdec.models.decoder import Decoder, ForwardBatch
from specdec.paged_kv import PagedKVCache
from specdec.scheduler import ScheduledSequence
from specdec.step_logits import StepLogits
from specdec.tree import DraftTree, ancestor_mask


@dataclass(frozen=True)
class StepOutput:
    """What a pass computed.

    Attributes:
        logits: fp32 [rows of interest, vocab], nodes of the sequences that reached their root; made when
            they are asked for, or a tensor.
        logits_start: per scheduled sequence, its first row in `logits`; -1 for a mid-prompt chunk.
        taps: [T, boundaries, hidden], None without boundaries.
        row_start: per scheduled sequence, its first row in the batch.
        states: taps of the committed rows by sequence, where the pass has gathered them already.
        row_logits: makes the logits of any rows of the batch; None where the pass kept no states of them.
    """

    logits: StepLogits | Tensor
    logits_start: list[int]
    taps: Tensor | None
    row_start: list[int]
    states: list[Tensor] | None = None
    row_logits: Callable[[list[int]], Tensor] | None = None

    def states_of(self, index: int, rows: list[int]) -> Tensor | None:
        """Taps of a sequence's committed rows, at `rows` of the batch; None without boundaries."""
        if self.states is not None:
            return self.states[index]
        if self.taps is None:
            return None
        if len(rows) == len(self.taps):
            return self.taps
        # a copy: what is kept of a step must not keep all of it
        return self.taps[rows[0] : rows[-1] + 1].clone() if are_consecutive(rows) else self.taps[rows]


class ModelRunner:
    """Runs the target over scheduled sequences."""

    def __init__(self, decoder: Decoder, cache: PagedKVCache, boundaries: tuple[int, ...]) -> None:
        self.decoder = decoder
        self.cache = cache
        self.boundaries = boundaries

    @torch.inference_mode()
    def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
        """One target pass; `trees` has one entry per sequence (the root alone where nothing was drafted)."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        attention: list[SequenceAttention] = []
        row_start: list[int] = []
        wanted: list[int] = []
        logits_start: list[int] = []
        for share, tree in zip(plan, trees, strict=True):
            seq, start = share.seq, len(token_ids)
            context, rows = seq.num_computed, share.num_rows + tree.num_drafted
            row_positions = list(range(context, context + share.num_rows))
            row_positions += [row_positions[-1] + depth for depth in tree.depths[1:]]
            token_ids += seq.token_ids[context : context + share.num_rows]
            token_ids += tree.token_ids[1:]
            positions += row_positions
            slots += self.cache.slots(seq.block_table, context, context + rows)
            if tree.num_drafted:
                assert share.num_rows == 1, "a tree is drafted only from a root whose context is computed"
                mask = causal_mask(rows) if tree.is_chain else ancestor_mask(tree.parents)
            else:
                mask = causal_mask(rows)
            attention.append(
                SequenceAttention(
                    query_start=start,
                    num_queries=rows,
                    context_len=context,
                    num_new=rows,
                    slots=block_slots(seq.block_table, self.cache.block_size, context + rows),
                    mask=mask,
                    query_positions=row_positions,
                    new_positions=row_positions,
                )
            )
            row_start.append(start)
            logits_start.append(len(wanted) if share.reaches_root else -1)
            if share.reaches_root:
                wanted += range(start + share.num_rows - 1, start + rows)
        padding = -len(token_ids) % self.decoder.row_multiple
        filling = [0] * padding
        # one tensor for the three: behind a pass's weights every call from Python starts with cold caches
        packed = torch.tensor([token_ids + filling, positions + filling, slots + filling])
        batch = ForwardBatch(
            token_ids=packed[0],
            positions=packed[1],
            longest=max(positions) + 1,
            slots=packed[2, : len(slots)],
            attention=attention,
            first_slot=slots[0] if are_consecutive(slots) else None,
        )
        hidden, taps = self.decoder.forward(batch, self.cache, self.boundaries)
        return StepOutput(
            self._logits(hidden, wanted),
            logits_start,
            taps,
            row_start,
            row_logits=lambda rows: self._rows(hidden, rows),
        )

    def _logits(self, hidden: Tensor, wanted: list[int]) -> StepLogits:
        def head(rows: list[int]) -> Tensor:
            return self._rows(hidden, [wanted[row] for row in rows])

        return StepLogits(head, len(wanted), self.decoder.config.vocab_size, self.decoder.row_multiple)

    def _rows(self, hidden: Tensor, places: list[int]) -> Tensor:
        """Logits of some rows of a pass."""
        padding = -len(places) % self.decoder.row_multiple
        if are_consecutive(places) and not padding:
            return self.decoder.logits(hidden[places[0] : places[0] + len(places)])
        return self.decoder.logits(hidden[torch.tensor(places + places[-1:] * padding)])[: len(places)]

    def commit(self, plan: list[ScheduledSequence], accepted: list[list[int]]) -> None:
        """Move the accepted nodes' KV rows right behind the root, inside each sequence's own blocks."""
        source: list[int] = []
        target: list[int] = []
        for share, nodes in zip(plan, accepted, strict=True):
            for offset, node in enumerate(nodes, start=1):
                if node != offset:
                    table, root = share.seq.block_table, share.seq.num_computed
                    source += self.cache.slots(table, root + node, root + node + 1)
                    target += self.cache.slots(table, root + offset, root + offset + 1)
        self.cache.commit(source, target)
