"""Attention whose rounded result does not depend on what else a step carries, for `--deterministic`.

A key may stand among the committed rows in one pass and among a tree's rows in another, so plain decoding and
verification have no order of summation in common. Products and sums are therefore done in float64 and rounded
once: orders then differ in the 50th bit, and a bfloat16 or float16 result only where a sum lies that near to
the border between two numbers (about once in 2**40). Signature and meaning are those of
`entry_attention.paged_attention`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention import SequenceAttention


def invariant_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: list[SequenceAttention],
    *,
    window: int | None = None,
) -> Tensor:
    """Attention of ragged queries over block-table KV: query [T, h, d] -> [T, h * d]; padding rows give 0."""
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[0]
    group = heads // kv_heads
    output = query.new_zeros(rows, heads * dim)
    for seq in batch:
        m, end = seq.num_queries, seq.query_start + seq.num_queries
        keys, values = key_cache[:, seq.slots].double(), value_cache[:, seq.slots].double()
        packed = query[seq.query_start : end].double().view(m, kv_heads, group, dim).transpose(0, 1)
        scores = torch.bmm(packed.reshape(kv_heads, m * group, dim), keys.transpose(1, 2)) * dim**-0.5
        by_query = scores.view(kv_heads, m, group, -1)
        bias = seq.window_bias(window) if window is not None else None
        if bias is not None:
            by_query.add_(bias[:, None, :])
        elif (tail := seq.tail_bias()) is not None:
            by_query[..., seq.context_len :].add_(tail[:, None, :])
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values)
        output[seq.query_start : end] = (
            mixed.view(kv_heads, m, group, dim).transpose(0, 1).reshape(m, heads * dim).to(query.dtype)
        )
    return output
