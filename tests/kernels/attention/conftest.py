"""Ragged batches over a poisoned pool for the attention tests, with a dense float64 answer.

The pool holds NaN wherever no sequence of the batch has a row, so whatever reads there shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.attention import SequenceAttention, block_slots, causal_mask
from specdec.kernels.device_batch import DeviceBatch, device_batch
from specdec.tree import ancestor_mask

# committed rows, and the new rows: how many of a chain, or the parents of a tree
Share = tuple[int, int | tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A batch with its tensors; `host` is the runtime's own description of it."""

    query: Tensor
    keys: Tensor
    values: Tensor
    host: list[SequenceAttention]
    batch: DeviceBatch


def _positions(share: Share) -> list[int]:
    context, new = share
    if isinstance(new, int):
        return list(range(context, context + new))
    depths: list[int] = []
    for parent in new:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return [context + depth for depth in depths]


def _make_case(
    shares: Sequence[Share],
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 24,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding_rows: int = 0,
    queries: Sequence[int] | None = None,
    seed: int = 0,
) -> Case:
    """A case by seed; `queries` says how many of each sequence's new rows, its last ones, are queries."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-(share[0] + len(_positions(share))) // block_size) for share in shares]
    # a block before, after and between the sequences stays nobody's
    order = torch.randperm(sum(blocks_of) + 3, generator=generator).tolist()
    pool = torch.full((2, kv_heads, len(order) * block_size, dim), float("nan"), dtype=dtype)
    host: list[SequenceAttention] = []
    start = 0
    for index, (share, blocks) in enumerate(zip(shares, blocks_of, strict=True)):
        table, order = order[:blocks], order[blocks:]
        context, rows = share
        positions = _positions(share)
        new = len(positions)
        asked = new if queries is None else queries[index]
        mask = causal_mask(new) if isinstance(rows, int) else ancestor_mask(rows)
        slots = block_slots(table, block_size, context + new)
        pool[:, :, slots] = torch.randn(2, kv_heads, context + new, dim, generator=generator).to(dtype)
        host.append(
            SequenceAttention(
                query_start=start,
                num_queries=asked,
                context_len=context,
                num_new=new,
                slots=slots,
                mask=None if mask is None else mask[new - asked :],
                query_positions=positions[new - asked :],
                new_positions=positions,
            )
        )
        start += asked
    query = torch.randn(start + padding_rows, kv_heads * group, dim, generator=generator).to(dtype)
    return Case(
        query=query.to(device),
        keys=pool[0].to(device),
        values=pool[1].to(device),
        host=host,
        batch=device_batch(host, block_size=block_size, num_rows=start + padding_rows, device=device),
    )


def _dense_attention(case: Case, window: int | None = None) -> Tensor:
    """Float64 [T, h * d], one query and head at a time from the host's description; padding rows give 0."""
    query, keys, values = (tensor.cpu().double() for tensor in (case.query, case.keys, case.values))
    rows, heads, dim = query.shape
    group = heads // keys.shape[0]
    output = torch.zeros(rows, heads, dim, dtype=torch.float64)
    for seq in case.host:
        key_positions = torch.tensor(list(range(seq.context_len)) + seq.new_positions)
        for offset in range(seq.num_queries):
            seen = torch.ones(seq.context_len + seq.num_new, dtype=torch.bool)
            if seq.mask is not None:
                seen[seq.context_len :] = seq.mask[offset]
            if window is not None:
                seen &= seq.query_positions[offset] - key_positions < window
            if not seen.any():
                continue
            row = seq.query_start + offset
            for head in range(heads):
                key = keys[head // group][seq.slots][seen]
                value = values[head // group][seq.slots][seen]
                weights = torch.softmax(key @ query[row, head] / dim**0.5, dim=0)
                output[row, head] = weights @ value
    return output.flatten(1)


def _random_parents(nodes: int, seed: int) -> tuple[int, ...]:
    """Parents of a random tree, the root first."""
    generator = torch.Generator().manual_seed(seed)
    return (-1, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, nodes)))


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """Call with shares and shapes, see `_make_case`."""
    return _make_case


@pytest.fixture
def dense_attention() -> Callable[..., Tensor]:
    """Call with a case and a window."""
    return _dense_attention


@pytest.fixture
def random_parents() -> Callable[[int, int], tuple[int, ...]]:
    """Call with a number of nodes and a seed."""
    return _random_parents
