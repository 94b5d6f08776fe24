"""Who owns which KV block. Host data only.

Blocks are handed out so that a sequence's blocks are consecutive where the pool allows it: the
CPU attention path then reads a sequence's keys as a view instead of gathering them. Nothing else
relies on it.
"""

from __future__ import annotations


class BlockManager:
    """Owner of the free list of a pool of `num_blocks` blocks of `block_size` rows."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, "a pool needs at least one block"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = bytearray(b"\x01" * num_blocks)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    def blocks_for(self, num_rows: int) -> int:
        """Blocks needed to hold `num_rows` rows."""
        return -(-num_rows // self.block_size)

    def can_extend(self, block_table: list[int], num_rows: int) -> bool:
        return self.blocks_for(num_rows) - len(block_table) <= self._num_free

    def extend(self, block_table: list[int], num_rows: int) -> None:
        """Grow `block_table` in place to hold `num_rows` rows; the caller asked `can_extend`."""
        missing = self.blocks_for(num_rows) - len(block_table)
        assert missing <= self._num_free, f"{missing} blocks asked for, {self._num_free} free"
        for _ in range(missing):
            block = self._next_block(block_table)
            self._free[block] = 0
            self._num_free -= 1
            block_table.append(block)

    def release(self, block_table: list[int]) -> None:
        """Give every block of the table back and empty it.

        A block given back twice is a bug of the runtime and stops it.
        """
        for block in block_table:
            assert not self._free[block], f"block {block} was released twice"
            self._free[block] = 1
            self._num_free += 1
        block_table.clear()

    def audit(self, block_tables: list[list[int]]) -> None:
        """Check that the tables own exactly the blocks that are not free, each once."""
        owned = [block for table in block_tables for block in table]
        assert len(owned) == len(set(owned)), "a block is owned twice"
        assert all(not self._free[block] for block in owned), "an owned block is on the free list"
        assert len(owned) + self._num_free == self.num_blocks, "a block is neither owned nor free"

    def _next_block(self, block_table: list[int]) -> int:
        if block_table:
            following = block_table[-1] + 1
            if following < self.num_blocks and self._free[following]:
                return following
        start, length = self._largest_free_run()
        # a run that begins the pool is taken from its start, one that follows another sequence
        # from its middle, which leaves that sequence room to grow in place
        return start if start == 0 else start + length // 2

    def _largest_free_run(self) -> tuple[int, int]:
        best_start, best_length, start = 0, 0, -1
        for index in range(self.num_blocks + 1):
            free = index < self.num_blocks and self._free[index]
            if free and start < 0:
                start = index
            elif not free and start >= 0:
                if index - start > best_length:
                    best_start, best_length = start, index - start
                start = -1
        return best_start, best_length
