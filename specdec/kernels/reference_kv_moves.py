"""The commit in plain torch: accepted rows to the front, in all layers; what `kv_moves` must equal.

All sources are read before any target is written, so moves may overlap. Needs the host (an index by a mask
waits for the device), unlike the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def commit_path(
    data: Tensor, accepted_nodes: Tensor, context_len: Tensor, block_tables: Tensor, *, block_size: int
) -> None:
    """Move row context_len + accepted_nodes[b, i] of sequence b to row context_len + 1 + i, for every i.

    The root of a step's tree is node 0, at row context_len, and stays; accepted_nodes are the nodes after it.

    Args:
        data: [layers, 2, kv_heads, slots, head_dim] of any dtype, a pool of keys and values; for the scales
            of an eight-bit pool, [layers, 2, kv_heads, slots, 1].
        accepted_nodes: [B, depth], ends in -1 where fewer are accepted; all -1 for a sequence that has none.
        context_len: [B], committed rows before the root.
        block_tables: [B, max_blocks], padded with -1.
        block_size: rows of a block.
    """
    kept = accepted_nodes >= 0
    sequence, offset = kept.nonzero(as_tuple=True)
    root = context_len[sequence].long()
    source, target = root + accepted_nodes[kept].long(), root + 1 + offset

    def slot(rows: Tensor) -> Tensor:
        return block_tables[sequence, rows // block_size].long() * block_size + rows % block_size

    rows = data.view(torch.uint8) if data.element_size() == 1 else data
    rows[:, :, :, slot(target)] = rows[:, :, :, slot(source)]
