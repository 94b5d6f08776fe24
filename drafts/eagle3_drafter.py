"""Serving an EAGLE-3 head: paged draft KV and tree growth (chain, or the dynamic tree of EAGLE-2).

The draft's cache has the target's blocks: row k (target state k, token k+1) lies in slot k of the
sequence. A proposal first computes the rows whose true states arrived since the last one, then grows
the tree from guessed features; grown rows go behind the committed ones and are overwritten by true
rows next time. Growth: EAGLE-2 (arXiv:2406.16858) sections 4.1 and 4.2: keep the `top_k` best
candidates by path probability at each depth, then the best `max_nodes` over all depths.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specdec.attention import SequenceAttention, block_slots, causal_mask
from specdec.config import SpecConfig
from specdec.drafter import DraftRequest, TargetView
from specdec.drafts.checkpoint import LoadedDraft
from specdec.kernels import paged_attention, store_kv
from specdec.models.layers import Linear, fits_fp16, packing_available
from specdec.models.rope import RotaryEmbedding, apply_rope
from specdec.paged_kv import PagedKVCache
from specdec.sequence import Sequence
from specdec.tree import DraftTree, chain_tree

logger = logging.getLogger(__name__)

# one drafting pass costs about this much of a plain decoding step, and the first pass of a proposal
# (new true rows) counts as one; measured with `specdec bench` on SmolLM2-135M
PASS_COST = 0.09
# true rows of one sequence per pass: bounds the scores of a long prompt, [heads, rows, context]
CATCH_UP_ROWS = 512


class _PackedLinear(nn.Module):
    """A linear layer of a loaded head with its weight packed for serving."""

    def __init__(self, weight: Tensor, *, packed: bool) -> None:
        super().__init__()
        self._linear = Linear(weight, None, packed=packed)

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


@dataclass
class _Growth:
    """One sequence's tree under construction, in order of creation; index 0 is the root."""

    request: DraftRequest
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    scores: list[float] = field(default_factory=lambda: [0.0])
    scratch: dict[int, int] = field(default_factory=dict)  # node -> its row behind the committed ones
    scratch_depths: list[int] = field(default_factory=list)  # depth of the node in each such row

    def ancestors(self, node: int) -> list[int]:
        """Scratch rows a node sees: its own and those of its drafted ancestors."""
        rows = []
        while node > 0:
            rows.append(self.scratch[node])
            node = self.parents[node]
        return rows


class Eagle3Drafter:
    """Proposes trees with an EAGLE-3 head; deterministic children, the most probable ones."""

    name = "eagle3"

    def __init__(self, draft: LoadedDraft, target: TargetView) -> None:
        head = draft.head
        self.config = head.config
        self.contract = draft.contract
        self.boundaries = head.config.boundaries
        self._head = head
        self._target = target
        # as in training: the head's own context, whatever part of it the engine uses
        self._rope = RotaryEmbedding(head.config.rope, device=target.device)
        self._context = head.config.rope.max_position_embeddings
        if self._context < target.max_model_len:
            logger.warning(
                "the draft was made for %d positions, the engine serves %d: nothing is drafted beyond",
                self._context,
                target.max_model_len,
            )
        self._vocab_ids: list[int] = head.vocab.ids.tolist()
        packed = target.packed and target.device == "cpu" and packing_available()
        output_rows = head.head_weight.detach().float()
        self._output = Linear(output_rows, None, packed=packed and fits_fp16(output_rows))
        _pack_linears(head, packed=packed)
        self._cache = PagedKVCache(
            num_layers=1,
            num_blocks=target.num_blocks,
            block_size=target.block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            device=target.device,
        )

    def relative_cost(self, spec: SpecConfig) -> float:
        return PASS_COST * spec.max_depth

    def scratch_rows(self, spec: SpecConfig) -> int:
        return spec.top_k * max(0, spec.max_depth - 1)

    def release(self, seq_id: int) -> None:
        """Nothing is kept here: draft rows live in the sequence's blocks, pending states with it."""

    @torch.inference_mode()
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Grow a tree for every request, all of them in the same passes; none beyond the head's context."""
        inside = [r for r in requests if len(r.seq.token_ids) + r.max_depth <= self._context]
        if len(inside) < len(requests):
            grown = iter(self.propose(inside) if inside else [])
            return [next(grown) if r in inside else chain_tree(r.seq.token_ids[-1], []) for r in requests]
        hidden = self._catch_up([request.seq for request in requests])
        growths = [_Growth(request, [request.seq.token_ids[-1]]) for request in requests]
        frontiers = [[0]] * len(requests)
        deepest = max(request.max_depth for request in requests)
        for depth in range(1, deepest + 1):
            frontiers, rows = self._expand(growths, frontiers, hidden)
            frontiers = [
                frontier if depth < request.max_depth else []
                for frontier, request in zip(frontiers, requests, strict=True)
            ]
            if not any(frontiers):
                break
            hidden = self._grow_rows(growths, frontiers, hidden, rows)
        return [_prune(growth) for growth in growths]

    def _catch_up(self, sequences: list[Sequence]) -> Tensor:
        """Compute the rows whose true states are new, long prompts in chunks.

        Returns:
            The last row's layer output of every sequence [seqs, hidden].
        """
        for seq in sequences:
            while seq.num_computed - seq.draft_computed > CATCH_UP_ROWS:
                self._true_rows([seq], CATCH_UP_ROWS)
        return self._true_rows(sequences, CATCH_UP_ROWS)

    def _true_rows(self, sequences: list[Sequence], limit: int) -> Tensor:
        """Compute at most `limit` of each sequence's new rows; the last output of each [seqs, hidden]."""
        states: list[Tensor] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        attention: list[SequenceAttention] = []
        last_rows: list[int] = []
        for seq in sequences:
            first = seq.draft_computed
            rows = min(limit, seq.num_computed - first)
            assert rows > 0, "a proposal needs at least one new true state"
            pending = torch.cat(seq.pending_states)
            states.append(pending[:rows])
            seq.pending_states = [pending[rows:]] if rows < len(pending) else []
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
        features = self._head.fuse(torch.cat(states).float())
        z = self._layer(features, tokens, positions, slots, attention)
        return z[torch.tensor(last_rows)]

    def _layer(
        self,
        features: Tensor,
        tokens: list[int],
        positions: list[int],
        slots: list[int],
        attention: list[SequenceAttention],
    ) -> Tensor:
        """The head's decoder layer over rows in the paged cache: [rows, hidden] -> [rows, hidden]."""
        embeds = self._target.embed_tokens[torch.tensor(tokens)].float()
        query, key, value, residual = self._head.qkv(embeds, features)
        cos, sin = self._rope.cos_sin(torch.tensor(positions), max(positions) + 1)
        key_cache, value_cache = self._cache.layer(0)
        store_kv(apply_rope(key, cos, sin), value, key_cache, value_cache, torch.tensor(slots))
        attended = paged_attention(apply_rope(query, cos, sin), key_cache, value_cache, attention)
        return self._head.finish(attended, residual)

    def _expand(
        self, growths: list[_Growth], frontiers: list[list[int]], hidden: Tensor
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Add the best children of every frontier; `hidden` has one row per frontier node, in order.

        Returns:
            The next frontier of each growth (new node ids), and each one's parent row in `hidden`.
        """
        width = max(growth.request.top_k for growth in growths)
        log_probs = torch.log_softmax(self._output(self._head.normed(hidden)), dim=-1)
        best = log_probs.topk(width, dim=-1)
        values, indices = best.values.tolist(), best.indices.tolist()
        next_frontiers: list[list[int]] = []
        rows: list[list[int]] = []
        row = 0
        for growth, frontier in zip(growths, frontiers, strict=True):
            top_k = growth.request.top_k
            candidates = []
            for node in frontier:
                for value, index in zip(values[row][:top_k], indices[row][:top_k], strict=True):
                    candidates.append((growth.scores[node] + value, -node, index, row))
                row += 1
            candidates.sort(key=lambda entry: (-entry[0], -entry[1], entry[2]))
            added, parent_rows = [], []
            for rank, (score, negative_node, index, parent_row) in enumerate(candidates):
                growth.tokens.append(self._vocab_ids[index])
                growth.parents.append(-negative_node)
                growth.scores.append(score)
                if rank < top_k:
                    added.append(len(growth.tokens) - 1)
                    parent_rows.append(parent_row)
            next_frontiers.append(added)
            rows.append(parent_rows)
        return next_frontiers, rows

    def _grow_rows(
        self, growths: list[_Growth], frontiers: list[list[int]], hidden: Tensor, rows: list[list[int]]
    ) -> Tensor:
        """Run the layer on every frontier node from its parent's fed-back feature."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        parent_rows: list[int] = []
        attention: list[SequenceAttention] = []
        for growth, frontier, parents in zip(growths, frontiers, rows, strict=True):
            if not frontier:
                continue
            seq = growth.request.seq
            context = seq.num_computed
            first = len(growth.scratch)
            for offset, node in enumerate(frontier):
                growth.scratch[node] = first + offset
            num_new = len(growth.scratch)
            mask = torch.zeros(len(frontier), num_new, dtype=torch.bool)
            depth = 0
            for offset, node in enumerate(frontier):
                visible = growth.ancestors(node)
                mask[offset, visible] = True
                depth = len(visible)
            growth.scratch_depths += [depth] * len(frontier)
            # a node at depth d is the token at context + d, so its row is context + d - 1
            query_positions = [context + depth - 1] * len(frontier)
            attention.append(
                SequenceAttention(
                    query_start=len(tokens),
                    num_queries=len(frontier),
                    context_len=context,
                    num_new=num_new,
                    slots=block_slots(seq.block_table, self._target.block_size, context + num_new),
                    mask=None if bool(mask.all()) else mask,
                    query_positions=query_positions,
                    new_positions=[context + row_depth - 1 for row_depth in growth.scratch_depths],
                )
            )
            tokens += [growth.tokens[node] for node in frontier]
            positions += query_positions
            slots += self._cache.slots(seq.block_table, context + first, context + num_new)
            parent_rows += parents
        features = self._head.feedback(hidden[torch.tensor(parent_rows)])
        return self._layer(features, tokens, positions, slots, attention)


def _prune(growth: _Growth) -> DraftTree:
    """Keep the `max_nodes` most probable nodes; a parent is never less probable than its child."""
    order = sorted(range(1, len(growth.tokens)), key=lambda node: (-growth.scores[node], node))
    kept = [0, *sorted(order[: growth.request.max_nodes])]
    where = {node: index for index, node in enumerate(kept)}
    return DraftTree(
        token_ids=[growth.tokens[node] for node in kept],
        parents=[-1, *(where[growth.parents[node]] for node in kept[1:])],
        log_probs=[growth.scores[node] for node in kept],
    )


def _pack_linears(module: nn.Module, *, packed: bool) -> None:
    """Swap the linear layers of a head, which serving then owns, for packed ones where weights allow."""
    for name, child in list(module.named_children()):
        if name == "lm_head":
            continue  # the output rows are packed once, in `_output`
        if isinstance(child, nn.Linear):
            weight = child.weight.detach()
            setattr(module, name, _PackedLinear(weight, packed=packed and fits_fp16(weight)))
        else:
            _pack_linears(child, packed=packed)
