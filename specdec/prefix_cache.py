"""Which blocks hold which text: prefixes computed once, shared across requests and turns.

A full block of verified tokens is found by a chained hash (SHA-256) of all tokens up to its end and of the
request's salt: equal hashes are equal prefixes of the same tenant. Blocks that nobody uses stay, least
recently used ones are given up first, and then go to colder tiers where there are any (`specdec.cold_tiers`).

A drafter's row k lies in the same block and depends on token k+1 too, so the last draft row of a block is
right for one next token only. A block with draft rows is therefore found by the next token as well, and keeps
its boundary state (the target's taps of its last row). Where only another continuation's block is there, its
content is copied and the one row is made again from that state, in the copy: nothing is recomputed, and no
shared block is ever written.

Knows tokens and block numbers; the rows themselves are moved by `BlockStorage`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec.blocks import BlockManager
from specdec.cold_tiers import BlockKey, ColdBlock, ColdTiers
from specdec.idle_blocks import IdleOrder
from specdec.sequence import Sequence

NO_DRAFT = -1  # the "next token" of blocks whose draft rows nobody made or needs


class BlockStorage(Protocol):
    """Moves whole blocks, rows of every cache that lies in them."""

    def copy(self, source: int, target: int) -> None:
        """Copy a block's rows to another block."""
        ...

    def read(self, block: int) -> Tensor:
        """A block's rows as bytes on the host."""
        ...

    def write(self, block: int, rows: Tensor) -> bool:
        """Put rows that `read` gave into a block; False when they are not of this shape."""
        ...


@dataclass(frozen=True)
class CachedBlock:
    """What a block of the pool holds: its key, the hash before it, its tokens and its boundary state."""

    key: BlockKey
    parent: bytes
    tokens: tuple[int, ...]
    state: Tensor | None


@dataclass(frozen=True)
class Hit:
    """One block of a cached prefix: in the pool (`block`), or in a colder tier (None).

    Not `exact`: its last draft row was made for another next token.
    """

    key: BlockKey
    block: int | None
    exact: bool


@dataclass
class PrefixCounts:
    """Counters since the start. `queries` and `hits` are prompt tokens, as vLLM counts them."""

    queries: int = 0
    hits: int = 0
    resumed: int = 0  # tokens that preempted requests got back
    evicted: int = 0  # blocks given up
    fetched: int = 0  # blocks that came back from a colder tier
    copied: int = 0  # blocks copied because the text went on differently


class PrefixCache:
    """Index of a pool's blocks by the text they hold, and keeper of those nobody uses.

    Args:
        block_size: tokens of a block.
        storage: moves rows.
        clock: seconds, for pins.
        max_pinned: blocks that may be pinned at once; the pins that end first are dropped beyond.
        tiers: where given-up blocks go.
    """

    def __init__(
        self,
        block_size: int,
        storage: BlockStorage,
        *,
        clock: Callable[[], float],
        max_pinned: int,
        tiers: ColdTiers | None = None,
    ) -> None:
        self.block_size = block_size
        self.counts = PrefixCounts()
        self.tiers = tiers
        self._storage = storage
        self._clock = clock
        self._index: dict[bytes, dict[int, int]] = {}
        self._entries: dict[int, CachedBlock] = {}
        self._order = IdleOrder(max_pinned)

    # what the block manager asks

    @property
    def num_idle(self) -> int:
        return len(self._order)

    def retire(self, block: int) -> bool:
        """Keep a block whose last user left, if it is in the index."""
        if block not in self._entries:
            return False
        self._order.add(block, self._clock())
        return True

    def reuse(self, block: int) -> None:
        self._order.remove(block)

    def evict(self, count: int) -> list[int]:
        """Give up at least so many idle blocks: unpinned ones by age, then pinned ones by when pins end."""
        blocks = self._order.take(count, self._clock())
        for block in blocks:
            entry = self._forget(block)
            if self.tiers is not None and not self.tiers.holds(entry.key):
                self.tiers.put(entry.key, ColdBlock(self._storage.read(block), entry.state))
        self.counts.evicted += len(blocks)
        return blocks

    # what the scheduler and the engine ask

    @property
    def num_cached(self) -> int:
        """Blocks of the pool that the index knows."""
        return len(self._entries)

    @property
    def num_pinned(self) -> int:
        return self._order.num_pinned(self._clock())

    def restore(self, seq: Sequence, blocks: BlockManager, num_rows: int) -> bool:
        """Give a sequence the longest cached prefix of its text, and blocks for `num_rows` rows in all.

        Its last token is always left to compute.

        Returns:
            False, and nothing changed, when the rows do not fit the pool.
        """
        assert not seq.block_table, "a prefix is restored to a fresh sequence"
        hits = self._match(seq)
        shared = [hit.block for hit in hits if hit.exact and hit.block is not None]
        for block in shared:
            blocks.share(block)
        if not blocks.can_extend(shared, num_rows):
            blocks.release(shared)
            return False
        table, found, left = seq.block_table, 0, shared[::-1]
        for hit in hits:
            if not hit.exact:
                found += self._restore_copy(seq, hit, blocks, num_rows)
                break
            if hit.block is not None:
                table.append(left.pop())
            else:
                blocks.extend(table, (len(table) + 1) * self.block_size)
                if not self._fetch(hit.key, table[-1], seq):
                    break
            found += 1
            seq.num_indexed = found
            seq.draft_computed = found * self.block_size if seq.prefix_use == "draft" else 0
        blocks.release(left)
        seq.num_computed = found * self.block_size
        blocks.extend(table, num_rows)
        self._count(seq)
        return True

    def index(self, seq: Sequence) -> None:
        """Make a sequence's newly filled blocks known; only rows of committed tokens count.

        The last token has no row, so that each row's next token is known.
        """
        if seq.prefix_use == "none":
            return
        with_draft = seq.prefix_use == "draft"
        rows = min(seq.num_computed, len(seq.token_ids) - 1)
        if with_draft:
            rows = min(rows, seq.draft_computed)
        size = self.block_size
        for number in range(seq.num_indexed, rows // size):
            next_token = seq.token_ids[(number + 1) * size] if with_draft else NO_DRAFT
            hashes = self._hashes(seq, number + 1)
            entry = CachedBlock(
                key=(hashes[number + 1], next_token),
                parent=hashes[number],
                tokens=tuple(seq.token_ids[number * size : (number + 1) * size]),
                state=seq.boundary_states.pop(number) if with_draft else None,
            )
            self._insert(entry, seq.block_table[number])
            seq.num_indexed = number + 1

    def pin(self, block_table: list[int], until: float) -> None:
        """Give up a text's blocks after all unpinned ones, up to a moment of the clock."""
        self._order.pin([block for block in block_table if block in self._entries], until, self._clock())

    def forget(self, block_table: list[int]) -> None:
        """Take blocks that are in use out of the index: their rows are not to be trusted."""
        for block in block_table:
            if block in self._entries:
                self._forget(block)
                self._order.forget_pin(block)

    def audit(self, blocks: BlockManager, sequences: list[Sequence]) -> None:
        """Check the index against the blocks, and its entries against the texts that use them."""
        for chain, variants in self._index.items():
            for next_token, block in variants.items():
                assert self._entries[block].key == (chain, next_token), "index and entries differ"
        assert sum(map(len, self._index.values())) == len(self._entries), "an entry is not in the index"
        for block, entry in self._entries.items():
            assert _chain(entry.parent, entry.tokens) == entry.key[0], f"block {block} is under a stale hash"
            idle = blocks.users(block) == 0
            assert idle == (block in self._order), f"block {block} is idle and used, or neither"
        assert all(block in self._entries for block in self._order.blocks()), "an idle block is not cached"
        for seq in sequences:
            assert seq.num_indexed * self.block_size <= len(seq.token_ids) - 1, "an unverified row is indexed"
            hashes = self._hashes(seq, seq.num_indexed)
            for number, block in enumerate(seq.block_table):
                cached = self._entries.get(block)
                if cached is not None:
                    assert number < seq.num_indexed, f"block {block} is cached and may still be written"
                    assert cached.key[0] == hashes[number + 1], f"block {block} is cached for another text"

    def _count(self, seq: Sequence) -> None:
        if seq.num_preemptions:
            self.counts.resumed += seq.num_computed
            return
        seq.num_cached_tokens = seq.num_computed
        self.counts.queries += seq.prompt_len
        self.counts.hits += seq.num_computed

    def _match(self, seq: Sequence) -> list[Hit]:
        if seq.prefix_use == "none":
            return []
        hits: list[Hit] = []
        count = (len(seq.token_ids) - 1) // self.block_size
        for number, chain in enumerate(self._hashes(seq, count)[1:]):
            end = (number + 1) * self.block_size
            hit = self._find(chain, seq, end)
            if hit is None:
                break
            if seq.prefix_use == "draft" and seq.num_output and end == len(seq.token_ids) - 1:
                # its next step drafts, from the output of this row: it is made again, not in a shared block
                hit = Hit(hit.key, hit.block, False)
            hits.append(hit)
            if not hit.exact:
                break
        return hits

    def _find(self, chain: bytes, seq: Sequence, end: int) -> Hit | None:
        here = self._index.get(chain, {})
        colder = self.tiers.variants(chain) if self.tiers is not None else ()
        if seq.prefix_use == "target":
            for next_token in here:
                return Hit((chain, next_token), here[next_token], True)
            for next_token in colder:
                return Hit((chain, next_token), None, True)
            return None
        wanted = seq.token_ids[end]
        if wanted in here:
            return Hit((chain, wanted), here[wanted], True)
        if wanted in colder:
            return Hit((chain, wanted), None, True)
        for next_token in here:
            if next_token != NO_DRAFT:
                return Hit((chain, next_token), here[next_token], False)
        for next_token in colder:
            if next_token != NO_DRAFT:
                return Hit((chain, next_token), None, False)
        return None

    def _restore_copy(self, seq: Sequence, hit: Hit, blocks: BlockManager, num_rows: int) -> bool:
        """Append a copy of a block whose last draft row is another continuation's, that row to be made."""
        table = seq.block_table
        if hit.block is None:
            blocks.extend(table, (len(table) + 1) * self.block_size)
            cold = self.tiers.get(hit.key) if self.tiers is not None else None
            if cold is None or not self._storage.write(table[-1], cold.rows):
                return False
            state = cold.state
            self.counts.fetched += 1
        else:
            state = self._entries[hit.block].state
            blocks.share(hit.block)  # or it might be given up for the very block it is copied to
            fits = blocks.can_extend(table, num_rows)
            if fits:
                blocks.extend(table, (len(table) + 1) * self.block_size)
                self._storage.copy(hit.block, table[-1])
                self.counts.copied += 1
            blocks.release([hit.block])
            if not fits:
                return False
        assert state is not None, "a block with draft rows keeps its boundary state"
        seq.draft_computed = len(table) * self.block_size - 1
        seq.pending_states = [state[None]]
        seq.boundary_states[len(table) - 1] = state
        return True

    def _fetch(self, key: BlockKey, block: int, seq: Sequence) -> bool:
        """Bring a block back from a colder tier; False when it is gone or damaged."""
        cold = self.tiers.get(key) if self.tiers is not None else None
        if cold is None or not self._storage.write(block, cold.rows):
            return False
        number = len(seq.block_table) - 1
        size = self.block_size
        tokens = tuple(seq.token_ids[number * size : (number + 1) * size])
        self._insert(CachedBlock(key, self._hashes(seq, number)[number], tokens, cold.state), block)
        self.counts.fetched += 1
        return True

    def _insert(self, entry: CachedBlock, block: int) -> None:
        chain, next_token = entry.key
        variants = self._index.setdefault(chain, {})
        # the first block stays; a second one with the same content is its owner's alone
        if next_token in variants or (next_token == NO_DRAFT and variants):
            return
        assert block not in self._entries, f"block {block} is in the index under another text"
        variants[next_token] = block
        self._entries[block] = entry

    def _forget(self, block: int) -> CachedBlock:
        entry = self._entries.pop(block)
        chain, next_token = entry.key
        del self._index[chain][next_token]
        if not self._index[chain]:
            del self._index[chain]
        return entry

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        """Hashes before and after each of the first `count` blocks; kept with the sequence."""
        hashes, size = seq.block_hashes, self.block_size
        if not hashes:
            salt = seq.options.cache_salt
            hashes.append(hashlib.sha256(b"" if salt is None else b"salt:" + salt.encode()).digest())
        while len(hashes) <= count:
            start = (len(hashes) - 1) * size
            hashes.append(_chain(hashes[-1], tuple(seq.token_ids[start : start + size])))
        return hashes


def _chain(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
