"""Serving an EAGLE-3 head on a device: the twin of `eagle3_drafter`, its passes through the kernels.

Owns the packing of true and of grown rows. How trees grow is `growth`'s business, on the host: each level
reads the head's logits there. The draft's cache has the target's blocks: row k (target state k, token k + 1)
lies in slot k of the sequence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.config import SpecConfig
from specdec.device.packing import padded_tables, row_slots
from specdec.device.staging import Staging
from specdec.drafter import DraftRequest, TargetView
from specdec.drafts.checkpoint import LoadedDraft
from specdec.drafts.eagle3_drafter import CATCH_UP_ROWS, PASS_COST, head_fingerprint
from specdec.drafts.eagle3_growth import DeviceGrowth
from specdec.drafts.eagle3_layer import DeviceLayer
from specdec.drafts.growth import TreeGrowth, start_growth
from specdec.kernels.device_batch import WORD_BITS, DeviceBatch
from specdec.kernels.operations import Operations
from specdec.kernels.step_records import StepClass, StepInputs
from specdec.kernels.tree_records import GrownTrees
from specdec.paged_kv import PagedKVCache
from specdec.sequence import Sequence
from specdec.tree import DraftTree, chain_tree, path_to

logger = logging.getLogger(__name__)


@dataclass
class _Rows:
    """Rows of one pass under construction."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[NDArray[np.int64]] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    contexts: list[int] = field(default_factory=list)
    new_len: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    visible: list[list[int]] = field(default_factory=list)

    def close(self, seq: Sequence, context: int, new_len: int) -> None:
        """End the rows of a sequence."""
        self.starts.append(len(self.token_ids))
        self.contexts.append(context)
        self.new_len.append(new_len)
        self.tables.append(seq.block_table)


@dataclass
class _Scratch:
    """Rows of one growing tree behind the sequence's committed ones: node -> its row."""

    row_of: dict[int, int] = field(default_factory=dict)

    def visible(self, growth: TreeGrowth, node: int) -> list[int]:
        """Rows a node sees: its own and those of its drafted ancestors."""
        return [self.row_of[ancestor] for ancestor in path_to(growth.parents, node)[1:]]


class DeviceEagle3Drafter:
    """Proposes trees with an EAGLE-3 head, in every mode, on the target's device."""

    name = "eagle3"
    can_sample = True

    def __init__(self, draft: LoadedDraft, target: TargetView, ops: Operations) -> None:
        self.config = draft.head.config
        self.contract = draft.contract
        self.boundaries = self.config.boundaries
        self.fingerprint = head_fingerprint(draft.head)
        self.layer = DeviceLayer(draft.head, target, ops)
        self._block_size = target.block_size
        self._context = self.config.rope.max_position_embeddings
        if self._context < target.max_model_len:
            logger.warning(
                "the draft was made for %d positions, the engine serves %d: nothing is drafted beyond",
                self._context,
                target.max_model_len,
            )
        self._vocab = draft.head.vocab
        self._vocab_ids: list[int] = draft.head.vocab.ids.tolist()
        self._staging = Staging(target.device)
        self._growth = DeviceGrowth(self.layer, self._vocab, target.block_size)

    def makes_chains(self, spec: SpecConfig) -> bool:
        return spec.top_k == 1

    def relative_cost(self, spec: SpecConfig) -> float:
        return PASS_COST * spec.max_depth

    def scratch_rows(self, spec: SpecConfig) -> int:
        return spec.top_k * max(0, spec.max_depth - 1)

    def release(self, seq_id: int) -> None:
        """Nothing is kept here: draft rows live in the sequence's blocks, pending states with it."""

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        return (self.layer.cache,)

    @torch.inference_mode()
    def absorb(self, sequences: list[Sequence]) -> None:
        """Make the rows whose true states are pending; none for texts beyond the head's context."""
        # the last row of a text whose reading has ended is left: a draft begins with its output
        read = [seq for seq in sequences if seq.is_finished or seq.is_prefilling]
        open_ones = [seq for seq in read if seq.num_computed > seq.draft_computed]
        if inside := [seq for seq in open_ones if len(seq.token_ids) <= self._context]:
            self._catch_up(inside)

    def can_grow(self, seq: Sequence, depth: int) -> bool:
        """Whether the next tree can grow on the device: few new true rows, and inside the head's context."""
        new = seq.num_computed - seq.draft_computed
        return 1 <= new <= depth + 1 and self.can_grow_to(len(seq.token_ids) + depth)

    def can_grow_to(self, length: int) -> bool:
        """Whether text and path of that length are inside the head's context."""
        return length <= self._context

    def grow(self, size: StepClass, inputs: StepInputs) -> GrownTrees:
        """Trees of every sequence of a size class, on the device."""
        return self._growth(size, inputs)

    @torch.inference_mode()
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Grow a tree for every request, all of them in the same passes; none beyond the head's context."""
        inside = [r for r in requests if len(r.seq.token_ids) + r.max_depth <= self._context]
        if len(inside) < len(requests):
            grown = iter(self.propose(inside) if inside else [])
            return [next(grown) if r in inside else chain_tree(r.seq.token_ids[-1], []) for r in requests]
        fed_back, output = self._catch_up([request.seq for request in requests])
        growths = [start_growth(request, self._vocab, self._vocab_ids) for request in requests]
        scratches = [_Scratch() for _ in requests]
        while True:
            parents = self._expand(growths, output)
            if not any(growth.frontier for growth in growths):
                return [growth.tree() for growth in growths]
            fed_back, output = self._grow_rows(growths, scratches, fed_back, parents)

    def _catch_up(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Compute the rows whose true states are new, long prompts in chunks; returns as `_true_rows`."""
        for seq in sequences:
            while seq.num_computed - seq.draft_computed > CATCH_UP_ROWS:
                self._true_rows([seq])
        return self._true_rows(sequences)

    def _true_rows(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        """Compute at most `CATCH_UP_ROWS` of each sequence's new rows.

        Returns:
            Of the last row of every sequence what the layer returns, [seqs, hidden] each.
        """
        rows = _Rows()
        states: list[Tensor] = []
        for seq in sequences:
            first = seq.draft_computed
            count = min(CATCH_UP_ROWS, seq.num_computed - first)
            assert count > 0, "a proposal needs at least one new true state"
            pending = torch.cat(seq.pending_states)
            states.append(pending[:count])
            seq.pending_states = [pending[count:]] if count < len(pending) else []
            # row k reads token k + 1
            rows.token_ids += seq.token_ids[first + 1 : first + count + 1]
            rows.positions += range(first, first + count)
            rows.slots.append(row_slots(seq.block_table, self._block_size, first, count))
            rows.close(seq, first, count)
            seq.draft_computed = first + count
        index = np.array(rows.starts[1:], dtype=np.int64) - 1
        token_ids, batch, last = self._send(rows, index, chains=True)
        fed_back, output = self.layer(self.layer.fuse(torch.cat(states)), token_ids, batch)
        return fed_back[last], output[last]

    def _grow_rows(
        self, growths: list[TreeGrowth], scratches: list[_Scratch], fed_back: Tensor, parents: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on every frontier node; `parents` are the rows of `fed_back` they continue."""
        rows = _Rows()
        for growth, scratch in zip(growths, scratches, strict=True):
            if not growth.frontier:
                continue
            seq, first = growth.request.seq, len(scratch.row_of)
            context = seq.num_computed
            for offset, node in enumerate(growth.frontier):
                scratch.row_of[node] = first + offset
            for node in growth.frontier:
                visible = scratch.visible(growth, node)
                rows.visible.append(visible)
                rows.token_ids.append(growth.tokens[node])
                # a node at depth d is the token at context + d, so its row is context + d - 1
                rows.positions.append(context + len(visible) - 1)
            rows.slots.append(
                row_slots(seq.block_table, self._block_size, context + first, len(growth.frontier))
            )
            rows.close(seq, context, len(scratch.row_of))
        token_ids, batch, index = self._send(rows, np.array(parents, dtype=np.int64), chains=False)
        return self.layer(fed_back[index], token_ids, batch)

    def _send(
        self, rows: _Rows, index: NDArray[np.int64], *, chains: bool
    ) -> tuple[Tensor, DeviceBatch, Tensor]:
        """Token ids, the batch and an index of rows, in one copy to the device."""
        total = len(rows.token_ids)
        words = np.zeros((total, 1 if chains else -(-max(rows.new_len) // WORD_BITS)), dtype=np.uint64)
        for row, visible in enumerate(rows.visible):
            for new_row in visible:
                words[row, new_row // WORD_BITS] |= np.uint64(1 << (new_row % WORD_BITS))
        sent = self._staging.put(
            {
                "token_ids": np.array(rows.token_ids, dtype=np.int64),
                "positions": np.array(rows.positions, dtype=np.int32),
                "slots": np.concatenate(rows.slots),
                "query_start": np.array(rows.starts, dtype=np.int32),
                "context_len": np.array(rows.contexts, dtype=np.int32),
                "new_len": np.array(rows.new_len, dtype=np.int32),
                "block_tables": padded_tables(rows.tables),
                "mask_words": words.view(np.int64),
                "chain": np.full(len(rows.contexts), chains, dtype=np.bool_),
                "index": index,
            }
        )
        batch = DeviceBatch(
            query_start=sent["query_start"],
            context_len=sent["context_len"],
            block_tables=sent["block_tables"],
            mask_words=sent["mask_words"],
            positions=sent["positions"],
            slots=sent["slots"],
            block_size=self._block_size,
            new_len=sent["new_len"],
            chain=sent["chain"],
            max_queries=max(end - start for start, end in zip(rows.starts, rows.starts[1:], strict=False)),
        )
        return sent["token_ids"], batch, sent["index"]

    def _expand(self, growths: list[TreeGrowth], output: Tensor) -> list[int]:
        """Give every frontier its children; `output` has one row per frontier node, in order.

        Returns:
            The row in `output` of the parent of each node of the new frontiers, in order.
        """
        logits = self.layer.logits(output).cpu()
        parents: list[int] = []
        first = 0
        for growth in growths:
            if count := len(growth.frontier):
                parents += [first + row for row in growth.expand(logits[first : first + count])]
                first += count
        return parents
