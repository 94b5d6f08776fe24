"""The decoder's layers on the processor: one TorchScript loop, so that no Python runs per operation.

Owns the order of operations of a pass over ragged rows, attention over paged KV included. A pass makes some
nine hundred small tensor operations; called from Python they cost as much as the products of a small model.
The loop is ordinary Python as well (`script=False`, and where TorchScript has gone), with the same bits. Its
arithmetic equals `kernels.entry_attention` and `torch.rms_norm`. Knows nothing of sequences or trees.

Letters: T rows of the batch, h query heads, k KV heads, d head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention import SequenceAttention
from specdec.models.layers import Linear
from specdec.models.matrices import Matrices


@dataclass(frozen=True)
class LayerWeights:
    """What the loop reads of one layer."""

    matrices: tuple[Linear, Linear, Linear, Linear]
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    bias_list: int  # which of the batch's lists of biases holds for its window


@dataclass(frozen=True)
class AttentionLists:
    """A batch's `SequenceAttention` entries side by side, in types TorchScript takes.

    `first_slots` is -1 where a sequence's rows are gathered by `gathers`; an empty tensor in `biases` hides
    nothing, and one that is narrower than the rows counts from their end. `biases` has a list per window.
    """

    starts: list[int]
    counts: list[int]
    first_slots: list[int]
    lengths: list[int]
    gathers: list[Tensor]
    biases: list[list[Tensor]]


def attention_lists(
    entries: list[SequenceAttention], windows: list[int | None], dtype: torch.dtype
) -> AttentionLists:
    """Lay out a batch's entries for the loop.

    Args:
        entries: the batch's, in row order.
        windows: the sliding windows in use, None for full attention.
        dtype: of the scores.
    """
    nothing = torch.empty(0, dtype=dtype)
    first_slots, lengths, gathers = [], [], []
    for entry in entries:
        lengths.append(entry.context_len + entry.num_new)
        contiguous = isinstance(entry.slots, slice)
        first_slots.append(entry.slots.start if isinstance(entry.slots, slice) else -1)
        gathers.append(nothing if contiguous else entry.slots)
    biases = []
    for window in windows:
        row = []
        for entry in entries:
            bias = entry.window_bias(window) if window is not None else None
            bias = entry.tail_bias() if bias is None else bias
            row.append(nothing if bias is None else bias.to(dtype))
        biases.append(row)
    return AttentionLists(
        starts=[entry.query_start for entry in entries],
        counts=[entry.num_queries for entry in entries],
        first_slots=first_slots,
        lengths=lengths,
        gathers=gathers,  # type: ignore[arg-type]  # a slice never gets here
        biases=biases,
    )


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis, in fp32 at least."""
    wide = x.float()
    normed = (wide * (wide * wide).mean(-1, True).add_(eps).rsqrt_()).mul_(weight)
    return normed.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of each head: x [T, heads, d]; `sin` has the sign of the first half turned."""
    rows, heads, dim = x.size(0), x.size(1), x.size(2)
    swapped = x.view(rows, heads, 2, dim // 2).flip([2]).view(rows, heads, dim)
    return torch.mul(x, cos).addcmul_(swapped, sin)


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    starts: list[int],
    counts: list[int],
    first_slots: list[int],
    lengths: list[int],
    gathers: list[Tensor],
    biases: list[Tensor],
) -> Tensor:
    """Attention of queries [T, h, d], scaled already, over caches [k, slots, d] -> [T, h * d]."""
    rows, heads, dim = query.size(0), query.size(1), query.size(2)
    kv_heads = key_cache.size(0)
    group = heads // kv_heads
    output = torch.empty([rows, heads * dim], dtype=query.dtype)
    covered = 0
    for index in range(len(starts)):
        start, m, length = starts[index], counts[index], lengths[index]
        covered = start + m
        if first_slots[index] >= 0:
            keys = key_cache.narrow(1, first_slots[index], length)
            values = value_cache.narrow(1, first_slots[index], length)
        else:
            keys = key_cache.index_select(1, gathers[index])
            values = value_cache.index_select(1, gathers[index])
        bias = biases[index]
        if m == 1:
            # the queries of a KV head already lie side by side, so nothing is copied
            packed = query.select(0, start).view(kv_heads, group, dim)
        else:
            packed = query.narrow(0, start, m).view(m, kv_heads, group, dim).transpose(0, 1)
            packed = packed.reshape(kv_heads, m * group, dim)
        scores = torch.bmm(packed, keys.transpose(1, 2))
        if bias.numel() > 0:
            hidden = bias.size(1)
            tail = scores.view(kv_heads, m, group, length).narrow(3, length - hidden, hidden)
            tail.add_(bias.unsqueeze(1))
        mixed = torch.bmm(torch.softmax(scores, -1), values)
        place = output.narrow(0, start, m).view(m, kv_heads, group, dim)
        place.copy_(mixed.view(kv_heads, m, group, dim).transpose(0, 1))
    if covered < rows:
        output.narrow(0, covered, rows - covered).zero_()
    return output


def store_rows(
    rotated: Tensor,
    new_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    first_slot: int,
) -> None:
    """Put rows' keys, which come last in `rotated`, and their values into the cache."""
    kv_heads, stored = key_cache.size(0), slots.size(0)
    keys = rotated.narrow(1, rotated.size(1) - kv_heads, kv_heads).narrow(0, 0, stored).transpose(0, 1)
    values = new_values.narrow(0, 0, stored).transpose(0, 1)
    if first_slot >= 0:
        key_cache.narrow(1, first_slot, stored).copy_(keys)
        value_cache.narrow(1, first_slot, stored).copy_(values)
    else:
        key_cache.index_copy_(1, slots, keys)
        value_cache.index_copy_(1, slots, values)


def store_and_attend(
    rotated: Tensor,
    new_values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    first_slot: int,
    starts: list[int],
    counts: list[int],
    first_slots: list[int],
    lengths: list[int],
    gathers: list[Tensor],
    biases: list[Tensor],
) -> Tensor:
    """Put the new rows' keys and values into the cache, then attend: -> [T, h * d].

    Args:
        rotated: queries, then keys [T, h + k, d]; the queries are overwritten.
        new_values: [T, k, d].
        key_cache: [k, slots, d].
        value_cache: [k, slots, d].
        slots: where the first rows of the batch go; the rest is padding.
        first_slot: the first of them if they are consecutive, else -1.
        starts: as the rest, see `AttentionLists`.
        counts: .
        first_slots: .
        lengths: .
        gathers: .
        biases: of the layer's window.
    """
    heads = rotated.size(1) - key_cache.size(0)
    store_rows(rotated, new_values, key_cache, value_cache, slots, first_slot)
    query = rotated.narrow(1, 0, heads).mul_(1.0 / math.sqrt(rotated.size(2)))
    return attend(query, key_cache, value_cache, starts, counts, first_slots, lengths, gathers, biases)


def gated(gate_up: Tensor) -> Tensor:
    """Product of silu(gate) and up, of a fused projection [T, 2 * inner] with the gate first."""
    inner = gate_up.size(1) // 2
    return F.silu(gate_up.narrow(1, 0, inner)).mul_(gate_up.narrow(1, inner, inner))


class LayerLoop(Matrices):
    """All layers of a decoder.

    Args:
        layers: their weights.
        head: the output head.
        final_norm: the norm before it.
        embed_tokens: rows by token.
        head_dim: width of a head.
        eps: of the norms.
    """

    __constants__ = (*Matrices.__constants__, "qk_norm")

    def __init__(
        self,
        layers: list[LayerWeights],
        head: Linear,
        final_norm: Tensor,
        embed_tokens: Tensor,
        head_dim: int,
        eps: float,
    ) -> None:
        super().__init__([*(linear for layer in layers for linear in layer.matrices), head])
        self.final_norm, self.embed_tokens = final_norm, embed_tokens
        nothing = layers[0].input_norm.new_empty(0)
        self.qk_norm = layers[0].q_norm is not None
        self.num_layers = len(layers)
        self.head_dim, self.eps = head_dim, eps
        self.input_norms = [layer.input_norm for layer in layers]
        self.post_norms = [layer.post_norm for layer in layers]
        self.q_norms = [nothing if layer.q_norm is None else layer.q_norm for layer in layers]
        self.k_norms = [nothing if layer.k_norm is None else layer.k_norm for layer in layers]
        self.bias_lists = [layer.bias_list for layer in layers]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cos_table: Tensor,
        sin_table: Tensor,
        cache: Tensor,
        slots: Tensor,
        first_slot: int,
        starts: list[int],
        counts: list[int],
        first_slots: list[int],
        lengths: list[int],
        gathers: list[Tensor],
        biases: list[list[Tensor]],
        taps: Tensor,
        boundaries: list[int],
    ) -> Tensor:
        """Run the layers.

        Args:
            token_ids: [T].
            positions: [T].
            cos_table: by position [positions, 1, d].
            sin_table: as well, the first half's sign turned.
            cache: keys and values [layers, 2, k, slots, d].
            slots: where the first rows of the batch go; the rest is padding.
            first_slot: the first of them if they are consecutive, else -1.
            starts: see `AttentionLists`, as the next five.
            counts: .
            first_slots: .
            lengths: .
            gathers: .
            biases: .
            taps: [T, boundaries, hidden] to be filled.
            boundaries: which residual streams.

        Returns:
            The residual stream [T, hidden] after the last layer.
        """
        dtype = cache.dtype
        x = self.embed_tokens.index_select(0, token_ids).to(dtype)
        cos = cos_table.index_select(0, positions).to(dtype)
        sin = sin_table.index_select(0, positions).to(dtype)
        rows, dim = x.size(0), self.head_dim
        kv_heads = cache.size(2)
        for index in range(self.num_layers):
            for column in range(len(boundaries)):
                if boundaries[column] == index:
                    taps.select(1, column).copy_(x)
            qkv = self.product(4 * index, rms(x, self.input_norms[index], self.eps)).view(rows, -1, dim)
            heads = qkv.size(1) - 2 * kv_heads
            if self.qk_norm:
                query = rms(qkv.narrow(1, 0, heads), self.q_norms[index], self.eps)
                key = rms(qkv.narrow(1, heads, kv_heads), self.k_norms[index], self.eps)
                rotated = rotate(torch.cat([query, key], 1), cos, sin)
            else:
                rotated = rotate(qkv.narrow(1, 0, heads + kv_heads), cos, sin)
            layer = cache.select(0, index)
            attended = store_and_attend(
                rotated,
                qkv.narrow(1, heads + kv_heads, kv_heads),
                layer.select(0, 0),
                layer.select(0, 1),
                slots,
                first_slot,
                starts,
                counts,
                first_slots,
                lengths,
                gathers,
                biases[self.bias_lists[index]],
            )
            x = x + self.product(4 * index + 1, attended)
            gate_up = self.product(4 * index + 2, rms(x, self.post_norms[index], self.eps))
            x = x.add_(self.product(4 * index + 3, gated(gate_up)))
        for column in range(len(boundaries)):
            if boundaries[column] == self.num_layers:
                taps.select(1, column).copy_(x)
        return x

    @torch.jit.export
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head: hidden [rows, hidden] -> fp32 [rows, vocab]."""
        return self.product(4 * self.num_layers, rms(hidden, self.final_norm, self.eps)).float()
