"""Attention over host entries in plain torch: the decoder one layer after the other (`forward_by_layer`).

What the processor's loop is proved against, and the plain torch path that kernels are measured beside. The
references of the Triton kernels, which read device batches, are the modules `reference_*`.

Letters: T rows of the batch, h query heads, g = h / kv_heads queries per KV head, d head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention import SequenceAttention


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write rows key, value [T, kv_heads, d] at `slots` of the caches [kv_heads, slots, d].

    `slots` may be shorter than T: the rows past its end are padding and are not stored.
    """
    rows = slots.shape[0]
    key_cache[:, slots] = key[:rows].transpose(0, 1)
    value_cache[:, slots] = value[:rows].transpose(0, 1)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: list[SequenceAttention],
    *,
    window: int | None = None,
) -> Tensor:
    """Attention of ragged queries over block-table KV: query [T, h, d] -> [T, h * d].

    Scores are scaled by 1 / sqrt(d). Rows of `query` that belong to no sequence (padding) give 0.
    """
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[0]
    group = heads // kv_heads
    scaled = query * dim**-0.5
    covered = batch[-1].query_start + batch[-1].num_queries if batch else 0
    output = query.new_zeros(rows, heads * dim) if covered < rows else query.new_empty(rows, heads * dim)
    for seq in batch:
        m, end = seq.num_queries, seq.query_start + seq.num_queries
        keys, values = key_cache[:, seq.slots], value_cache[:, seq.slots]
        bias = seq.window_bias(window) if window is not None else None
        if m == 1 and bias is None and seq.mask is None:
            # plain decoding: the queries of a KV head already lie side by side, so nothing is copied
            one = scaled[seq.query_start].view(kv_heads, group, dim)
            weights = torch.softmax(torch.bmm(one, keys.transpose(1, 2)), dim=-1)
            torch.bmm(weights, values, out=output[seq.query_start].view(kv_heads, group, dim))
            continue
        # queries of one KV head become rows of one matrix: [kv, m * g, d]
        packed = scaled[seq.query_start : end].view(m, kv_heads, group, dim).transpose(0, 1)
        scores = torch.bmm(packed.reshape(kv_heads, m * group, dim), keys.transpose(1, 2))
        if bias is not None:
            scores.view(kv_heads, m, group, -1).add_(bias[:, None, :])
        elif (tail := seq.tail_bias()) is not None:
            scores.view(kv_heads, m, group, -1)[..., seq.context_len :].add_(tail[:, None, :])
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
        output[seq.query_start : end] = (
            mixed.view(kv_heads, m, group, dim).transpose(0, 1).reshape(m, heads * dim)
        )
    return output
