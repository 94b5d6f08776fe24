"""Where cached blocks go when the pool gives them up: memory of the host, then files.

A tier has a size cap and gives up its least recently used blocks, the host's to the disk. No step waits for
a disk: `variants` and `get` know what lies in memory now, and `stage` is how blocks of the disk get there
(`specdec.disk_tier`). Does not know tokens: a block's key is the chained hash of its text, which already
holds the tenant's salt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

BlockKey = tuple[bytes, int]  # chained hash, next token of the draft rows

# a request waits so long for blocks of a disk before it computes them
STAGE_WAIT_S = 2.0
_SETTLE_S = 30.0


@dataclass(frozen=True)
class ColdBlock:
    """A block outside the pool: its rows as bytes, and the target's taps of its last row."""

    rows: Tensor
    state: Tensor | None

    @property
    def size_bytes(self) -> int:
        return self.rows.nbytes + (self.state.nbytes if self.state is not None else 0)


Overflow = list[tuple[BlockKey, ColdBlock]]


class KeyIndex:
    """Keys by their chained hash."""

    def __init__(self, keys: Iterable[BlockKey] = ()) -> None:
        self._next_tokens: dict[bytes, list[int]] = {}
        for key in keys:
            self.add(key)

    def __contains__(self, key: BlockKey) -> bool:
        return key[1] in self._next_tokens.get(key[0], ())

    def add(self, key: BlockKey) -> None:
        if key not in self:
            self._next_tokens.setdefault(key[0], []).append(key[1])

    def discard(self, key: BlockKey) -> None:
        if key in self:
            self._next_tokens[key[0]].remove(key[1])
            if not self._next_tokens[key[0]]:
                del self._next_tokens[key[0]]

    def next_tokens(self, chain: bytes) -> Collection[int]:
        return tuple(self._next_tokens.get(chain, ()))


class Tier(Protocol):
    """A size-capped store of blocks."""

    def variants(self, chain: bytes) -> Collection[int]:
        """Next tokens of the blocks of this text that `get` has now."""
        ...

    def behind(self, chain: bytes) -> Collection[int]:
        """Next tokens of those that `stage` can bring."""
        ...

    def stage(self, keys: list[BlockKey], wait_s: float) -> None:
        """Bring blocks to where `get` finds them, for at most so long."""
        ...

    def get(self, key: BlockKey) -> ColdBlock | None:
        """A block, now the most recently used one; None when it is not at hand."""
        ...

    def put(self, key: BlockKey, block: ColdBlock) -> Overflow:
        """Keep a block; returns those given up for it (a tier that destroys them returns none)."""
        ...

    def holds(self, key: BlockKey) -> bool: ...

    def settle(self, timeout_s: float) -> bool:
        """Wait for what is under way; False when it takes longer."""
        ...

    @property
    def size_bytes(self) -> int: ...


class HostTier:
    """Blocks in the host's memory."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._blocks: OrderedDict[BlockKey, ColdBlock] = OrderedDict()
        self._index = KeyIndex()
        self._size = 0

    @property
    def size_bytes(self) -> int:
        return self._size

    def variants(self, chain: bytes) -> Collection[int]:
        return self._index.next_tokens(chain)

    def behind(self, chain: bytes) -> Collection[int]:
        return ()

    def stage(self, keys: list[BlockKey], wait_s: float) -> None:
        return

    def settle(self, timeout_s: float) -> bool:
        return True

    def holds(self, key: BlockKey) -> bool:
        return key in self._blocks

    def get(self, key: BlockKey) -> ColdBlock | None:
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: BlockKey, block: ColdBlock) -> Overflow:
        if block.size_bytes > self.limit_bytes:
            return [(key, block)]
        self._blocks[key] = block
        self._index.add(key)
        self._size += block.size_bytes
        given_up: Overflow = []
        while self._size > self.limit_bytes:
            oldest, cold = self._blocks.popitem(last=False)
            self._index.discard(oldest)
            self._size -= cold.size_bytes
            given_up.append((oldest, cold))
        return given_up


class ColdTiers:
    """Tiers from the warmest to the coldest. `behind` and `stage` may be called by any thread."""

    def __init__(self, tiers: list[Tier]) -> None:
        self._tiers = tiers

    @property
    def sizes_bytes(self) -> list[int]:
        return [tier.size_bytes for tier in self._tiers]

    def variants(self, chain: bytes) -> Collection[int]:
        """Next tokens under which a block of this text is at hand."""
        return {token: None for tier in self._tiers for token in tier.variants(chain)}

    def behind(self, chain: bytes) -> Collection[int]:
        """Next tokens under which one may be staged."""
        return {token: None for tier in self._tiers for token in tier.behind(chain)}

    def stage(self, keys: list[BlockKey], wait_s: float = STAGE_WAIT_S) -> None:
        """Bring blocks of slow tiers to hand; what did not come in time is a miss."""
        for tier in self._tiers:
            tier.stage(keys, wait_s)

    def settle(self, timeout_s: float = _SETTLE_S) -> bool:
        """Wait for what is under way; False when it takes longer."""
        return all(tier.settle(timeout_s) for tier in self._tiers)

    def holds(self, key: BlockKey) -> bool:
        return any(tier.holds(key) for tier in self._tiers)

    def get(self, key: BlockKey) -> ColdBlock | None:
        for tier in self._tiers:
            block = tier.get(key)
            if block is not None:
                # used again: it becomes warm; a copy stays where it was
                self.put(key, block)
                return block
        return None

    def put(self, key: BlockKey, block: ColdBlock) -> None:
        """Keep a block in the first tier, what overflows further down."""
        going = [(key, block)]
        for tier in self._tiers:
            going = [lost for each in going if not tier.holds(each[0]) for lost in tier.put(*each)]
