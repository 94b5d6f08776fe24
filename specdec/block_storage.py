"""Moving whole blocks: within the pool, and between the pool and the host's memory.

A block's rows are those of the target's cache and of every drafter cache that shares its block tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.paged_kv import PagedKVCache


class PooledBlocks:
    """The blocks of caches that share block tables."""

    def __init__(self, caches: list[PagedKVCache]) -> None:
        self._caches = caches
        self._sizes = [view.nbytes for cache in caches for view in cache.block_views(0)]
        # a page-locked copy is what a GPU reads and writes at full speed
        self._locked = any(view.is_cuda for cache in caches for view in cache.block_views(0))

    @property
    def block_bytes(self) -> int:
        return sum(self._sizes)

    def copy(self, source: int, target: int) -> None:
        """Copy a block's rows to another block."""
        for cache in self._caches:
            for rows, place in zip(cache.block_views(source), cache.block_views(target), strict=True):
                place.copy_(rows)

    def read(self, block: int) -> Tensor:
        """A block's rows as bytes `[block_bytes]` on the host."""
        rows = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=self._locked)
        parts = rows.split(self._sizes)
        for part, view in zip(parts, self._views(block), strict=True):
            part.copy_(view.contiguous().view(-1).view(torch.uint8))
        return rows

    def write(self, block: int, rows: Tensor) -> bool:
        """Put rows that `read` gave into a block; False when they are not of this pool's shape."""
        if rows.shape != (self.block_bytes,):
            return False
        for part, view in zip(rows.split(self._sizes), self._views(block), strict=True):
            # a part of a file's bytes may start where no number of this width can
            view.copy_(part.clone().view(view.dtype).view(view.shape))
        return True

    def _views(self, block: int) -> list[Tensor]:
        return [view for cache in self._caches for view in cache.block_views(block)]
