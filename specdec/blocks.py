"""Who owns which KV block. Host data only.

A block is free, or used by k sequences (more than one share a cached prefix), or idle: used by nobody, its
content kept by the prefix cache, which gives it up when free blocks run out. Blocks are handed out so that a
sequence's blocks are consecutive where the pool allows it: the CPU attention path then reads a sequence's
keys as a view instead of gathering them. Nothing else relies on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol


class IdleBlocks(Protocol):
    """Keeper of the blocks that nobody uses and whose content is still worth something."""

    @property
    def num_idle(self) -> int: ...

    def retire(self, block: int) -> bool:
        """Keep a block whose last user left; False when its content is worth nothing."""
        ...

    def reuse(self, block: int) -> None:
        """A kept block has a user again."""
        ...

    def evict(self, count: int) -> list[int]:
        """Give up at least that many kept blocks."""
        ...


class BlockManager:
    """Owner of the users' counts and the free list of a pool of `num_blocks` blocks of `block_size` rows."""

    def __init__(self, num_blocks: int, block_size: int, idle: IdleBlocks | None = None) -> None:
        assert num_blocks > 0, "a pool needs at least one block"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._idle = idle
        self._users = [0] * num_blocks
        self._free = bytearray(b"\x01" * num_blocks)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be had: free ones and idle ones."""
        return self._num_free + (self._idle.num_idle if self._idle else 0)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def users(self, block: int) -> int:
        """Sequences that hold the block."""
        return self._users[block]

    def blocks_for(self, num_rows: int) -> int:
        """Blocks needed to hold `num_rows` rows."""
        return -(-num_rows // self.block_size)

    def can_extend(self, block_table: list[int], num_rows: int) -> bool:
        return self.blocks_for(num_rows) - len(block_table) <= self.num_free

    def extend(self, block_table: list[int], num_rows: int) -> None:
        """Grow `block_table` in place to hold `num_rows` rows; the caller asked `can_extend`."""
        missing = self.blocks_for(num_rows) - len(block_table)
        assert missing <= self.num_free, f"{missing} blocks asked for, {self.num_free} free"
        if missing > self._num_free:
            self._evict(missing - self._num_free)
        for _ in range(missing):
            block = self._next_block(block_table)
            self._free[block] = 0
            self._num_free -= 1
            self._users[block] = 1
            block_table.append(block)

    def share(self, block: int) -> None:
        """Count one more user of a block that is in use or idle."""
        assert not self._free[block], f"block {block} is free and holds nothing to share"
        if self._users[block] == 0:
            assert self._idle is not None, "only a prefix cache keeps idle blocks"
            self._idle.reuse(block)
        self._users[block] += 1

    def release(self, block_table: list[int]) -> None:
        """Give every block of the table back and empty it.

        The last block goes first, so that of a text's idle blocks its end is given up before its beginning.
        A block given back more often than it was taken is a bug of the runtime and stops it.
        """
        for block in reversed(block_table):
            assert self._users[block] > 0, f"block {block} was released twice"
            self._users[block] -= 1
            if self._users[block] == 0 and not (self._idle and self._idle.retire(block)):
                self._free[block] = 1
                self._num_free += 1
        block_table.clear()

    def audit(self, block_tables: Iterable[list[int]]) -> None:
        """Check that every block is free, or idle, or in as many tables as it has users."""
        held = Counter(block for table in block_tables for block in table)
        for block in range(self.num_blocks):
            users = self._users[block]
            assert held[block] == users, f"block {block} is in {held[block]} tables and has {users} users"
            assert not (users and self._free[block]), f"block {block} is used and on the free list"
        assert sum(self._free) == self._num_free, "the free list and its count differ"
        assert len(held) + self.num_free == self.num_blocks, "a block is neither used nor free nor idle"

    def _evict(self, needed: int) -> None:
        assert self._idle is not None, "without a prefix cache every block that can be had is free"
        for block in self._idle.evict(needed):
            assert self._users[block] == 0, f"block {block} was given up while in use"
            assert not self._free[block], f"block {block} was given up twice"
            self._free[block] = 1
            self._num_free += 1

    def _next_block(self, block_table: list[int]) -> int:
        if block_table:
            following = block_table[-1] + 1
            if following < self.num_blocks and self._free[following]:
                return following
        longest = max(self._free.split(b"\x00"), key=len)
        start = self._free.find(longest)
        # a run that begins the pool is taken from its start, one that follows another sequence
        # from its middle, which leaves that sequence room to grow in place
        return start if start == 0 else start + len(longest) // 2
