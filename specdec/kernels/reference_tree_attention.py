"""`tree_attention` in plain torch, one sequence after another: what the Triton kernel must equal.

Owns the meaning of a `DeviceBatch`: which query sees which key. Reads the batch's tensors on the host, so it
is slow and needs synchronisation; it is for tests, and for devices without Triton.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specdec.kernels.device_batch import DeviceBatch, unpack_bits
from specdec.kernels.kv_quant import dequantise_rows


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: DeviceBatch,
    *,
    window: int | None = None,
    num_splits: int | None = None,
    split_keys: int | None = None,
    tile_rows: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """See `tree_attention.tree_attention`; splits and tile height mean nothing here.

    Every product is in the query's dtype.
    """
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[0]
    group = heads // kv_heads
    output = query.new_zeros(rows, heads * dim)
    starts = batch.query_start.tolist()
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        if start == end:
            continue
        visible = visible_keys(batch, index, window)
        slots = sequence_slots(batch, index, visible.shape[1])
        keys, values = key_cache[:, slots], value_cache[:, slots]
        if key_scales is not None:
            assert value_scales is not None, "codes need their scales"
            keys = dequantise_rows(keys, key_scales[:, slots]).to(query.dtype)
            values = dequantise_rows(values, value_scales[:, slots]).to(query.dtype)
        scaled = (query[start:end] * dim**-0.5).view(end - start, kv_heads, group, dim)
        scores = torch.einsum("qkgd,knd->qkgn", scaled, keys)
        scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
        # a row that sees nothing: softmax gives NaN
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible.any(1)[:, None, None, None], 0)
        output[start:end] = torch.einsum("qkgn,knd->qkgd", weights, values).reshape(end - start, heads * dim)
    return output


def sequence_slots(batch: DeviceBatch, index: int, num_rows: int) -> Tensor:
    """Slots of the first `num_rows` rows of a sequence."""
    at = torch.arange(num_rows, device=batch.block_tables.device)
    blocks = batch.block_tables[index, at // batch.block_size].long()
    return blocks * batch.block_size + at % batch.block_size


def visible_keys(batch: DeviceBatch, index: int, window: int | None) -> Tensor:
    """Bool [queries, context + new rows] of one sequence."""
    start, end = batch.query_start[index : index + 2].tolist()
    context, queries = int(batch.context_len[index]), end - start
    new = queries if batch.new_len is None else int(batch.new_len[index])
    device = batch.query_start.device
    if batch.chain is not None and bool(batch.chain[index]):
        seen = torch.ones(queries, new, dtype=torch.bool, device=device).tril_(new - queries)
    else:
        seen = unpack_bits(batch.mask_words[start:end], new)
    visible = torch.cat((torch.ones(queries, context, dtype=torch.bool, device=device), seen), dim=1)
    if window is not None:
        new_positions = (
            batch.positions[start:end] if batch.new_positions is None else batch.new_positions[index, :new]
        )
        keys = torch.cat((torch.arange(context, dtype=torch.int32, device=device), new_positions))
        visible &= batch.positions[start:end, None] - keys[None, :] < window
    return visible
