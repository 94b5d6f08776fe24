"""The KV cache tensors: store, gather, commit.

One tensor holds all layers, so that a commit (the accepted path to the front) is one launch.
Slots number the rows of the pool: slot = block * block_size + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4


class PagedKVCache:
    """Keys and values of `num_layers` layers in `num_blocks` blocks: [layers, 2, kv_heads, slots, head_dim].

    Head-major, so that one head of a sequence whose blocks are consecutive is one contiguous matrix.

    Args:
        num_layers: of the model.
        num_blocks: of the pool.
        block_size: rows of a block.
        num_kv_heads: of a layer.
        head_dim: width of a head.
        dtype: of the rows, and of what is stored unless it is codes.
        device: where the pool lies.
        codes: an eight-bit dtype: codes are kept, with an fp32 scale for each row and head
            (`specdec.kernels.kv_quant`); None keeps the rows as they are.
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
        codes: torch.dtype | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        shape = (num_layers, 2, num_kv_heads, num_blocks * block_size, head_dim)
        self.data = torch.zeros(shape, dtype=codes or dtype, device=device)
        self.scales: Tensor | None = None
        if codes is not None:
            self.scales = torch.zeros(shape[:-1], device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [kv_heads, slots, head_dim]."""
        return self.data[index, 0], self.data[index, 1]

    def layer_scales(self, index: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Scales of one layer's codes, of keys and values, [kv_heads, slots]; None where rows are kept."""
        return (None, None) if self.scales is None else (self.scales[index, 0], self.scales[index, 1])

    @property
    def parts(self) -> list[Tensor]:
        """All that belongs to the rows: tensors [layers, 2, kv_heads, slots, ...] that move together."""
        return [self.data] if self.scales is None else [self.data, self.scales.unsqueeze(-1)]

    def slots(self, block_table: list[int], start: int, end: int) -> list[int]:
        """Slots of rows start..end-1 of a sequence."""
        size = self.block_size
        return [block_table[row // size] * size + row % size for row in range(start, end)]

    def commit(self, source_slots: list[int], target_slots: list[int]) -> None:
        """Move rows of all layers; sources are read before any target is written (overlap-safe)."""
        if source_slots:
            source = torch.tensor(source_slots, device=self.data.device)
            target = torch.tensor(target_slots, device=self.data.device)
            for part in self.parts:
                # torch indexes no eight-bit floats
                rows = part.view(torch.uint8) if part.element_size() == 1 else part
                rows[:, :, :, target] = rows[:, :, :, source]

    def block_views(self, block: int) -> list[Tensor]:
        """What the cache holds of one block, in views that can be read and written."""
        size = self.block_size
        return [part[:, :, :, block * size : (block + 1) * size] for part in self.parts]

    def resize(self, num_blocks: int) -> None:
        """Make the pool so many blocks; what it held is lost."""
        layers, parts, heads, _, dim = self.data.shape
        dtype, device = self.data.dtype, self.data.device
        # the old one must be gone before the new one is made
        self.data = self.data.new_empty(0)
        shape = (layers, parts, heads, num_blocks * self.block_size, dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        if self.scales is not None:
            self.scales = torch.zeros(shape[:-1], device=device)
        self.num_blocks = num_blocks

    @property
    def size_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts)


def head_row_bytes(head_dim: int, item_bytes: int, *, coded: bool) -> int:
    """Bytes of one head's key or value in a pool, its scale included.

    Args:
        head_dim: width of a head.
        item_bytes: of the compute dtype.
        coded: whether eight-bit codes are kept.
    """
    return head_dim + SCALE_BYTES if coded else head_dim * item_bytes
