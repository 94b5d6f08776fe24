"""Attention over paged KV at a few sizes, beside what torch offers.

Baselines: `SDPA` of keys that already lie side by side (what a cache without blocks would have: its best
case), `gather, then SDPA` of the same pool of blocks, `FlexAttention` compiled for keys side by side, and on
a card our own reference in plain torch. All see the same masks. Owns the inputs and the counts; knows
nothing of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specdec.attention import SequenceAttention, block_slots, causal_mask
from specdec.cli.micro.shapes import OURS, KernelCase, MicroShape, tree_parents
from specdec.kernels import kernel, paged_attention
from specdec.kernels.device_batch import DeviceBatch, device_batch
from specdec.tree import ancestor_mask


def attention_case(shape: MicroShape, *, prefill: bool = False) -> KernelCase:
    """One pass of attention: plain decoding (one node), a tree, or a prompt's chunk."""
    model, nodes, context = shape.model, shape.nodes, shape.context
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    visible = causal_mask(nodes) if prefill else ancestor_mask(tree_parents(nodes))
    batch = [_sequence(shape, index, visible) for index in range(shape.batch)]
    query = shape.normal(shape.rows, heads, dim)
    pool = [shape.normal(kv_heads, shape.num_slots, dim, seed=seed) for seed in (1, 2)]
    kv_bytes = 2 * shape.batch * context * kv_heads * dim * shape.item
    what = "a chunk" if prefill else "decoding" if nodes == 1 else "a tree"
    runs, left_out = _baselines(shape, query, pool[0], pool[1], visible)
    return KernelCase(
        name="tree_attention",
        size=f"{what}: {shape.batch} x {nodes} queries, {context} keys, {heads}/{kv_heads} heads of {dim}",
        bytes=kv_bytes + 2 * query.numel() * shape.item,
        flop=4 * shape.rows * heads * dim * context,
        runs={OURS: _ours(shape, query, pool[0], pool[1], batch), **runs},
        left_out=left_out,
    )


def _sequence(shape: MicroShape, index: int, visible: Tensor | None) -> SequenceAttention:
    """The rows of one sequence, its tree behind its context."""
    nodes, before = shape.nodes, shape.context - shape.nodes
    table: list[int] = shape.block_tables()[index].tolist()
    positions = list(range(before, shape.context))
    return SequenceAttention(
        query_start=index * nodes,
        num_queries=nodes,
        context_len=before,
        num_new=nodes,
        slots=block_slots(table, shape.block_size, shape.context),
        mask=None if nodes == 1 else visible,
        query_positions=positions,
        new_positions=positions,
    )


def _ours(
    shape: MicroShape, query: Tensor, key: Tensor, value: Tensor, batch: list[SequenceAttention]
) -> Callable[[], Tensor]:
    """What serves on this device: the kernel on a card, ragged products on a processor."""
    if shape.backend == "reference":
        return lambda: paged_attention(query, key, value, batch)
    on_device = device_batch(batch, block_size=shape.block_size, device=shape.device)
    return _kernel_run("triton", query, key, value, on_device)


def _kernel_run(
    backend: Any, query: Tensor, key: Tensor, value: Tensor, batch: DeviceBatch
) -> Callable[[], Tensor]:
    attention = kernel("tree_attention", backend)
    return lambda: attention(query, key, value, batch)


def _baselines(
    shape: MicroShape, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    model, nodes = shape.model, shape.nodes
    wide = query.view(shape.batch, nodes, model.num_heads, model.head_dim).transpose(1, 2).contiguous()
    slots = shape.slots()
    mask = torch.ones(nodes, shape.context, dtype=torch.bool, device=shape.device)
    if visible is not None:
        mask[:, shape.context - nodes :] = visible.to(shape.device)

    def side_by_side(cache: Tensor) -> Tensor:
        # [kv_heads, batch, context, d] -> [batch, kv_heads, context, d]
        return cache[:, slots].transpose(0, 1)

    def sdpa(keys: Tensor, values: Tensor) -> Tensor:
        seen = None if nodes == 1 else mask
        return functional.scaled_dot_product_attention(wide, keys, values, attn_mask=seen, enable_gqa=True)

    keys, values = side_by_side(key).contiguous(), side_by_side(value).contiguous()
    runs: dict[str, Callable[[], object]] = {
        "SDPA": lambda: sdpa(keys, values),
        "gather, then SDPA": lambda: sdpa(side_by_side(key), side_by_side(value)),
    }
    if shape.backend == "reference":
        return runs, {"FlexAttention": "compiling it for a processor takes minutes"}
    runs["FlexAttention"] = _flex(wide, keys, values, mask)
    return runs, {}


def _flex(wide: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)

    def allowed(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask[row, column]

    rows, columns = mask.shape
    blocks = create_block_mask(allowed, None, None, rows, columns, device=str(mask.device))
    return lambda: compiled(wide, keys, values, block_mask=blocks, enable_gqa=True)
