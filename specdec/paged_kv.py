"""The KV cache tensors: store, gather, commit.

One tensor holds all layers, so that a commit (the accepted path to the front) is one launch.
Slots number the rows of the pool: slot = block * block_size + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PagedKVCache:
    """Keys and values of `num_layers` layers in `num_blocks` blocks: [layers, 2, kv_heads, slots, head_dim].

    Head-major, so that one head of a sequence whose blocks are consecutive is one contiguous matrix.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        shape = (num_layers, 2, num_kv_heads, num_blocks * block_size, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [kv_heads, slots, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    def slots(self, block_table: list[int], start: int, end: int) -> list[int]:
        """Slots of rows start..end-1 of a sequence."""
        size = self.block_size
        return [block_table[row // size] * size + row % size for row in range(start, end)]

    def commit(self, source_slots: list[int], target_slots: list[int]) -> None:
        """Move rows of all layers; sources are read before any target is written (overlap-safe)."""
        if source_slots:
            source = torch.tensor(source_slots, device=self.data.device)
            target = torch.tensor(target_slots, device=self.data.device)
            self.data[:, :, :, target] = self.data[:, :, :, source]

    def block_views(self, block: int) -> list[Tensor]:
        """What the cache holds of one block, in views that can be read and written."""
        size = self.block_size
        return [self.data[:, :, :, block * size : (block + 1) * size]]

    def resize(self, num_blocks: int) -> None:
        """Make the pool so many blocks; what it held is lost."""
        layers, parts, heads, _, dim = self.data.shape
        dtype, device = self.data.dtype, self.data.device
        # the old one must be gone before the new one is made
        self.data = self.data.new_empty(0)
        shape = (layers, parts, heads, num_blocks * self.block_size, dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks = num_blocks

    @property
    def size_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
