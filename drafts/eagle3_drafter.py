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

import torch
from torch import Tensor, nn

from specdec.attention import SequenceAttention, block_slots, causal_mask
from specdec.config import SpecConfig
from specdec.drafter import DraftRequest, TargetView
from specdec.drafts.checkpoint import LoadedDraft
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.growth import TreeGrowth, start_growth
from specdec.kernels import paged_attention, store_kv
from specdec.models.layers import Linear, Storage, fits_fp16, packing_available
from specdec.models.rope import RotaryEmbedding, apply_rope
from specdec.paged_kv import PagedKVCache
from specdec.sequence import Sequence
from specdec.tree import DraftTree, chain_tree, path_to

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
        self._linear = Linear(weight, None, Storage.FP16 if packed else Storage.PLAIN)

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)


@dataclass
class _Scratch:
    """Rows of one growing tree behind the sequence's committed ones."""

    row_of: dict[int, int] = field(default_factory=dict)  # node -> its row
    depths: list[int] = field(default_factory=list)  # depth of the node in each row

    def visible(self, growth: TreeGrowth, node: int) -> list[int]:
        """Rows a node sees: its own and those of its drafted ancestors."""
        return [self.row_of[ancestor] for ancestor in path_to(growth.parents, node)[1:]]


class Eagle3Drafter:
    """Proposes trees with an EAGLE-3 head, in every mode."""

    name = "eagle3"
    can_sample = True

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
        self.fingerprint = head_fingerprint(head)
        self._vocab = head.vocab
        self._vocab_ids: list[int] = head.vocab.ids.tolist()
        packed = target.packed and target.device == "cpu" and packing_available()
        output_rows = head.head_weight.detach().float()
        storage = Storage.FP16 if packed and fits_fp16(output_rows) else Storage.PLAIN
        self._output = Linear(output_rows, None, storage)
        _pack_linears(head, packed=packed)
        self._cache = PagedKVCache(
            num_layers=1,
            num_blocks=target.num_blocks,
            block_size=target.block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            device=target.device,
        )

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
        """Make the rows whose true states are pending; none for texts beyond the head's context."""
        open_ones = [seq for seq in sequences if seq.num_computed > seq.draft_computed]
        if inside := [seq for seq in open_ones if len(seq.token_ids) <= self._context]:
            self._catch_up(inside)

    @torch.inference_mode()
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Grow a tree for every request, all of them in the same passes; none beyond the head's context."""
        inside = [r for r in requests if len(r.seq.token_ids) + r.max_depth <= self._context]
        if len(inside) < len(requests):
            grown = iter(self.propose(inside) if inside else [])
            return [next(grown) if r in inside else chain_tree(r.seq.token_ids[-1], []) for r in requests]
        hidden = self._catch_up([request.seq for request in requests])
        growths = [start_growth(request, self._vocab, self._vocab_ids) for request in requests]
        scratches = [_Scratch() for _ in requests]
        while True:
            rows = self._expand(growths, hidden)
            if not any(growth.frontier for growth in growths):
                return [growth.tree() for growth in growths]
            hidden = self._grow_rows(growths, scratches, hidden[torch.tensor(rows)])

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

    def _expand(self, growths: list[TreeGrowth], hidden: Tensor) -> list[int]:
        """Give every frontier its children; `hidden` has one row per frontier node, in order.

        Returns:
            The row in `hidden` of the parent of each node of the new frontiers, in order.
        """
        logits = self._output(self._head.normed(hidden))
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
            first = len(scratch.row_of)
            for offset, node in enumerate(frontier):
                scratch.row_of[node] = first + offset
            num_new = len(scratch.row_of)
            mask = torch.zeros(len(frontier), num_new, dtype=torch.bool)
            depth = 0
            for offset, node in enumerate(frontier):
                visible = scratch.visible(growth, node)
                mask[offset, visible] = True
                depth = len(visible)
            scratch.depths += [depth] * len(frontier)
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
                    new_positions=[context + row_depth - 1 for row_depth in scratch.depths],
                )
            )
            tokens += [growth.tokens[node] for node in frontier]
            positions += query_positions
            slots += self._cache.slots(seq.block_table, context + first, context + num_new)
        return self._layer(self._head.feedback(parents), tokens, positions, slots, attention)


def head_fingerprint(head: Eagle3Head) -> str:
    """Hash of a head's configuration and weights."""
    digest = hashlib.sha256(repr(head.config).encode())
    for name, tensor in sorted(head.state_dict().items()):
        digest.update(
            name.encode() + tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


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
