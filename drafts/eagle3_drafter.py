"""Serving an EAGLE-3 head: paged draft KV and the passes that grow trees.

The draft's cache has the target's blocks: row k (target state k, token k+1) lies in slot k of the
sequence. A proposal first computes the rows whose true states arrived since the last one, then grows
the tree from guessed features; grown rows go behind the committed ones and are overwritten by true
rows next time. Which nodes grow and which tokens they get is `growth`'s business.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.attention import SequenceAttention, are_consecutive, block_slots, causal_mask
from specdec.config import SpecConfig
from specdec.drafter import DraftRequest, TargetView
from specdec.drafts.checkpoint import LoadedDraft
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.eagle3_loop import HeadLoop
from specdec.drafts.growth import TreeGrowth, start_growth
from specdec.models.layer_loop import attention_lists
from specdec.models.matrices import scripted
from specdec.paged_kv import PagedKVCache
from specdec.sequence import Sequence
from specdec.tree import DraftTree, chain_tree

logger = logging.getLogger(__name__)

# one drafting pass costs about this much of a plain decoding step, and the first pass of a proposal
# (new true rows) counts as one; measured with `specdec bench` on SmolLM2-135M
PASS_COST = 0.07
# true rows of one sequence per pass: bounds the memory of a long prompt
CATCH_UP_ROWS = 512
# up to so many true rows are cheaper in one full pass with the others than in one of their own
FEW_ROWS = 8


@dataclass
class _Scratch:
    """Rows of one growing tree behind the sequence's committed ones.

    `visible` says which rows each row sees: itself and its drafted ancestors.
    """

    visible: NDArray[np.bool_]
    row_of: dict[int, int] = field(default_factory=dict)  # node -> its row
    depths: list[int] = field(default_factory=list)  # depth of the node in each row

    def add(self, growth: TreeGrowth) -> int:
        """Give the frontier's nodes the next rows; returns the first of them."""
        first = len(self.depths)
        for row, node in enumerate(growth.frontier, start=first):
            self.row_of[node] = row
            parent = self.row_of.get(growth.parents[node])
            if parent is not None:
                self.visible[row] = self.visible[parent]
            self.visible[row, row] = True
            self.depths.append(1 if parent is None else self.depths[parent] + 1)
        return first


def _joined(parts: list[Tensor]) -> Tensor:
    """The rows of all parts; nothing is copied where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _picked(rows: Tensor, places: list[int]) -> Tensor:
    """Some rows in an order; nothing is copied where these are all."""
    return rows if places == list(range(len(rows))) else rows[places]


def _is_plain_chain(request: DraftRequest) -> bool:
    """Whether the most probable token, again and again, is what the request asks for."""
    return request.top_k == 1 and request.mode == "deterministic" and request.seq.processor is None


class Eagle3Drafter:
    """Proposes trees with an EAGLE-3 head, in every mode."""

    name = "eagle3"
    can_sample = True

    def __init__(self, draft: LoadedDraft, target: TargetView) -> None:
        head = draft.head
        self.config = head.config
        self.contract = draft.contract
        self.boundaries = head.config.boundaries
        self._target = target
        self._context = head.config.rope.max_position_embeddings
        if self._context < target.max_model_len:
            logger.warning(
                "the draft was made for %d positions, the engine serves %d: nothing is drafted beyond",
                self._context,
                target.max_model_len,
            )
        self.fingerprint = head_fingerprint(head)
        self._vocab = head.vocab
        self._vocab_ids: list[int] = head.vocab.ids.tolist()
        positions = min(self._context, target.max_model_len)
        self._loop = scripted(HeadLoop(head, target.embed_tokens, positions, target.draft_weights))
        self._cache = PagedKVCache(
            num_layers=1,
            num_blocks=target.num_blocks,
            block_size=target.block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            device=target.device,
        )
        self._nothing = torch.empty(0, dtype=torch.int64)

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
        return (self._cache,)

    @torch.inference_mode()
    def absorb(self, sequences: list[Sequence]) -> None:
        """Make the rows whose true states are pending; none for texts beyond the head's context.

        The last row of a text that goes on is left: a draft begins with its output.
        """
        for seq in sequences:
            if len(seq.token_ids) <= self._context:
                self._store_rows(seq, seq.num_computed - seq.draft_computed - (not seq.is_finished))

    @torch.inference_mode()
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Grow a tree for every request, all of them in the same passes; none beyond the head's context."""
        inside = [r for r in requests if len(r.seq.token_ids) + r.max_depth <= self._context]
        if len(inside) < len(requests):
            grown = iter(self.propose(inside) if inside else [])
            return [next(grown) if r in inside else chain_tree(r.seq.token_ids[-1], []) for r in requests]
        hidden = self._catch_up([request.seq for request in requests])
        trees: dict[int, DraftTree] = {}
        chains = [index for index, request in enumerate(requests) if _is_plain_chain(request)]
        if chains:
            # longest first, so that those still drafting are always the first rows
            chains.sort(key=lambda index: -min(requests[index].max_depth, requests[index].max_nodes))
            trees.update(
                zip(chains, self._chains([requests[i] for i in chains], _picked(hidden, chains)), strict=True)
            )
        others = [index for index in range(len(requests)) if index not in trees]
        if others:
            trees.update(
                zip(others, self._grow([requests[i] for i in others], _picked(hidden, others)), strict=True)
            )
        return [trees[index] for index in range(len(requests))]

    def _chains(self, requests: list[DraftRequest], hidden: Tensor) -> list[DraftTree]:
        """Greedy chains in one call, the longest first; `hidden` has a row for each request."""
        depths = [min(request.max_depth, request.max_nodes) for request in requests]
        contexts = [request.seq.num_computed for request in requests]
        first_slots, tables = [], []
        for request, depth, context in zip(requests, depths, contexts, strict=True):
            slots = block_slots(request.seq.block_table, self._target.block_size, context + depth - 1)
            first_slots.append(slots.start if isinstance(slots, slice) else -1)
            tables.append(self._nothing if isinstance(slots, slice) else slots)
        active = [sum(depth > level for depth in depths) for level in range(depths[0])]
        ids, log_probs = self._loop.chains(hidden, active, contexts, self._cache.data[0], first_slots, tables)
        tokens, scores = ids.T.tolist(), log_probs.cumsum(0).T.tolist()
        trees = []
        for index, (request, depth) in enumerate(zip(requests, depths, strict=True)):
            # a head that computes NaN drafts nothing behind it
            sound = next((at for at in range(depth) if scores[index][at] != scores[index][at]), depth)
            trees.append(
                chain_tree(
                    request.seq.token_ids[-1], tokens[index][:sound], log_probs=[0.0, *scores[index][:sound]]
                )
            )
        return trees

    def _grow(self, requests: list[DraftRequest], hidden: Tensor) -> list[DraftTree]:
        """Trees, level by level; `hidden` has a row for each request."""
        growths = [start_growth(request, self._vocab, self._vocab_ids) for request in requests]
        scratches = []
        for request in requests:
            rows = request.max_depth * max(request.top_k, request.max_nodes)
            scratches.append(_Scratch(np.zeros((rows, rows), dtype=np.bool_)))
        while True:
            parents = self._expand(growths, hidden)
            if not any(growth.frontier for growth in growths):
                return [growth.tree() for growth in growths]
            hidden = self._grow_rows(growths, scratches, hidden[torch.tensor(parents)])

    def _catch_up(self, sequences: list[Sequence]) -> Tensor:
        """Compute the rows whose true states are new, of many the last one alone in full.

        Returns:
            The last row's layer output of every sequence [seqs, hidden].
        """
        for seq in sequences:
            if (rows := seq.num_computed - seq.draft_computed) > FEW_ROWS:
                self._store_rows(seq, rows - 1)
        return self._true_rows(sequences)

    def _store_rows(self, seq: Sequence, count: int) -> None:
        """Make so many of a sequence's new rows, as far as others read them."""
        while count > 0:
            first, rows = seq.draft_computed, min(count, CATCH_UP_ROWS)
            pending = _joined(seq.pending_states)
            seq.pending_states = [pending[rows:]] if rows < len(pending) else []
            slots = self._cache.slots(seq.block_table, first, first + rows)
            tokens = seq.token_ids[first + 1 : first + rows + 1]
            packed = torch.tensor([tokens, list(range(first, first + rows)), slots])
            self._loop.store(
                pending[:rows].float(),
                packed[0],
                packed[1],
                self._cache.data[0],
                packed[2],
                slots[0] if are_consecutive(slots) else -1,
            )
            seq.draft_computed = first + rows
            count -= rows

    def _true_rows(self, sequences: list[Sequence]) -> Tensor:
        """Compute each sequence's new rows in one pass; the last output of each [seqs, hidden]."""
        states: list[Tensor] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        attention: list[SequenceAttention] = []
        last_rows: list[int] = []
        for seq in sequences:
            first = seq.draft_computed
            rows = seq.num_computed - first
            assert rows > 0, "a proposal needs at least one new true state"
            states.append(_joined(seq.pending_states)[:rows])
            seq.pending_states = []
            row_positions = list(range(first, first + rows))
            attention.append(
                SequenceAttention(
                    query_start=len(tokens),
                    num_queries=rows,
                    context_len=first,
                    num_new=rows,
                    slots=block_slots(seq.block_table, self._target.block_size, first + rows),
                    mask=causal_mask(rows),
                    query_positions=row_positions,
                    new_positions=row_positions,
                )
            )
            # row k reads token k + 1
            tokens += seq.token_ids[first + 1 : first + rows + 1]
            positions += row_positions
            slots += self._cache.slots(seq.block_table, first, first + rows)
            last_rows.append(len(tokens) - 1)
            seq.draft_computed = first + rows
        features = self._loop.fuse(_joined(states).float())
        z = self._layer(features, tokens, positions, slots, attention)
        return z[-1:] if len(last_rows) == 1 else z[torch.tensor(last_rows)]

    def _layer(
        self,
        features: Tensor,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        attention: list[SequenceAttention],
    ) -> Tensor:
        """The head's decoder layer over rows in the paged cache: [rows, hidden] -> [rows, hidden]."""
        lists = attention_lists(attention, [None], torch.float32)
        # one tensor for the three, as the target's runner does
        packed = torch.tensor([tokens, positions, slots])
        output: Tensor = self._loop(
            features,
            packed[0],
            packed[1],
            self._cache.data[0],
            packed[2],
            slots[0] if are_consecutive(slots) else -1,
            lists.starts,
            lists.counts,
            lists.first_slots,
            lists.lengths,
            lists.gathers,
            lists.biases[0],
        )
        return output

    def _expand(self, growths: list[TreeGrowth], hidden: Tensor) -> list[int]:
        """Give every frontier its children; `hidden` has one row per frontier node, in order.

        Returns:
            The row in `hidden` of the parent of each node of the new frontiers, in order.
        """
        logits = self._loop.logits(hidden)
        rows: list[int] = []
        first = 0
        for growth in growths:
            if count := len(growth.frontier):
                rows += [first + row for row in growth.expand(logits[first : first + count])]
                first += count
        return rows

    def _grow_rows(self, growths: list[TreeGrowth], scratches: list[_Scratch], parents: Tensor) -> Tensor:
        """Run the layer on every frontier node, from its parent's output `[frontier nodes, hidden]`."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        attention: list[SequenceAttention] = []
        for growth, scratch in zip(growths, scratches, strict=True):
            frontier = growth.frontier
            if not frontier:
                continue
            seq = growth.request.seq
            context = seq.num_computed
            first = scratch.add(growth)
            num_new = len(scratch.depths)
            mask = torch.from_numpy(scratch.visible[first:num_new, :num_new])
            # a node at depth d is the token at context + d, so its row is context + d - 1
            query_positions = [context + depth - 1 for depth in scratch.depths[first:]]
            attention.append(
                SequenceAttention(
                    query_start=len(tokens),
                    num_queries=len(frontier),
                    context_len=context,
                    num_new=num_new,
                    slots=block_slots(seq.block_table, self._target.block_size, context + num_new),
                    mask=None if bool(mask.all()) else mask,
                    query_positions=query_positions,
                    new_positions=[context + row_depth - 1 for row_depth in scratch.depths],
                )
            )
            tokens += [growth.tokens[node] for node in frontier]
            positions += query_positions
            slots += self._cache.slots(seq.block_table, context + first, context + num_new)
        return self._layer(self._loop.feedback(parents), tokens, positions, slots, attention)


def head_fingerprint(head: Eagle3Head) -> str:
    """Hash of a head's configuration and weights."""
    digest = hashlib.sha256(repr(head.config).encode())
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(
            name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()
