"""Which blocks hold which text: prefixes computed once, shared across requests and turns.

A full block of verified tokens is found by a chained hash (SHA-256) of all tokens up to its end and of the
request's salt: equal hashes are equal prefixes of the same tenant. Blocks that nobody uses stay, least
recently used ones are given up first, and then go to colder tiers where there are any (`specdec.cold_tiers`).

Where a text leaves the blocks that are known, its first rows in the next block are copied from the block that
agrees longest with it: another text's, or the open block at the end of a finished one. So what a later turn
computes again is a row or two, not a block.

A drafter's row k lies in the same block and depends on token k+1 too, so the last draft row of a block is
right for one next token only. A block with draft rows is therefore found by the next token as well, and keeps
its boundary state (the target's taps of its last row). Where only another continuation's block is there, its
content is copied and the one row is made again from that state, in the copy: nothing is recomputed, and no
shared block is ever written.

Knows tokens and block numbers; the rows themselves are moved by `BlockStorage`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec.blocks import BlockManager
from specdec.cold_tiers import BlockKey, ColdBlock, ColdTiers
from specdec.idle_blocks import IdleOrder
from specdec.prefix_index import NO_DRAFT, CachedBlock, Part, PrefixIndex, chain_hash
from specdec.prefix_stage import keys_to_stage
from specdec.sequence import Sequence


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
    copied: int = 0  # blocks copied, whole or in part, because the text went on differently


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
        self._index = PrefixIndex()
        self._order = IdleOrder(max_pinned)

    # what the block manager asks

    @property
    def num_idle(self) -> int:
        return len(self._order)

    def retire(self, block: int) -> bool:
        """Keep a block whose last user left, if it is in the index."""
        if block not in self._index:
            return False
        self._order.add(block, self._clock())
        return True

    def reuse(self, block: int) -> None:
        self._order.remove(block)

    def evict(self, count: int) -> list[int]:
        """Give up at least so many idle blocks: unpinned ones by age, then pinned ones by when pins end."""
        blocks = self._order.take(count, self._clock())
        for block in blocks:
            entry = self._index.forget(block)
            # an open block is found by its tokens, which the colder tiers do not know
            whole = len(entry.tokens) == self.block_size
            if whole and self.tiers is not None and not self.tiers.holds(entry.key):
                self.tiers.put(entry.key, ColdBlock(self._storage.read(block), entry.state))
        self.counts.evicted += len(blocks)
        return blocks

    # what the scheduler and the engine ask

    @property
    def num_cached(self) -> int:
        """Blocks of the pool that the index knows."""
        return len(self._index)

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
        part = self._longest_part(seq, len(hits)) if not hits or hits[-1].exact else None
        shared = [hit.block for hit in hits if hit.exact and hit.block is not None]
        for block in shared:
            blocks.share(block)
        # what is copied must not be given up for the blocks that are taken meanwhile
        source = part.block if part else hits[-1].block if hits and not hits[-1].exact else None
        kept = [] if source is None else [source]
        for block in kept:
            blocks.share(block)
        if kept and not blocks.can_extend(shared, num_rows):
            blocks.release(kept)
            part, hits = None, [hit for hit in hits if hit.exact]
        if not blocks.can_extend(shared, num_rows):
            blocks.release(shared)
            return False
        self._restore_hits(seq, hits, part, shared[::-1], blocks)
        blocks.release(kept)
        blocks.extend(seq.block_table, num_rows)
        self._count(seq)
        return True

    def stage(self, seq: Sequence) -> None:
        """Have blocks of its text that lie on a disk brought to hand.

        Called by whoever prepares it, in any thread, before the scheduler has it; waits for the disk.
        """
        if self.tiers is not None and seq.prefix_use != "none":
            count = (len(seq.token_ids) - 1) // self.block_size
            hashes = self._hashes(seq, count)
            self.tiers.stage(keys_to_stage(seq, hashes[1:], self.block_size, self._index, self.tiers))

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
            state = seq.boundary_states.pop(number) if with_draft else None
            self._add(seq, number, (number + 1) * size, state)
            seq.num_indexed = number + 1

    def index_end(self, seq: Sequence) -> None:
        """Make the open block at the end of a text known that will not be written any more."""
        if seq.prefix_use == "none":
            return
        rows = min(seq.num_computed, len(seq.token_ids) - 1)
        if seq.prefix_use == "draft":
            rows = min(rows, seq.draft_computed)
        number = seq.num_indexed
        first = number * self.block_size
        if first < rows < first + self.block_size:
            parent, text = self._hashes(seq, number)[number], seq.token_ids[first : rows + 1]
            with_draft = seq.prefix_use == "draft"
            known = self._index.longest_part(parent, text, rows - first, with_draft=with_draft)
            if known is None or known.rows < rows - first:
                self._add(seq, number, rows, None)

    def _add(self, seq: Sequence, number: int, end: int, state: Tensor | None) -> None:
        """Put a block of a sequence into the index, with its rows before `end`."""
        tokens = tuple(seq.token_ids[number * self.block_size : end])
        parent = self._hashes(seq, number)[number]
        next_token = seq.token_ids[end] if seq.prefix_use == "draft" else NO_DRAFT
        entry = CachedBlock((chain_hash(parent, tokens), next_token), parent, tokens, state)
        self._index.add(entry, seq.block_table[number])

    def pin(self, block_table: list[int], until: float, owner: str | None = None) -> None:
        """Give up a text's blocks after all unpinned ones, up to a moment of the clock."""
        self._order.pin([block for block in block_table if block in self._index], until, self._clock(), owner)

    def forget(self, block_table: list[int]) -> None:
        """Take blocks that are in use out of the index: their rows are not to be trusted."""
        for block in block_table:
            if block in self._index:
                self._index.forget(block)
                self._order.forget_pin(block)

    def audit(self, blocks: BlockManager, sequences: list[Sequence]) -> None:
        """Check the index against the blocks, and its entries against the texts that use them."""
        self._index.audit()
        for block in self._index.entries:
            idle = blocks.users(block) == 0
            assert idle == (block in self._order), f"block {block} is idle and used, or neither"
        assert all(block in self._index for block in self._order.blocks()), "an idle block is not cached"
        for seq in sequences:
            assert seq.num_indexed * self.block_size <= len(seq.token_ids) - 1, "an unverified row is indexed"
            hashes = self._hashes(seq, seq.num_indexed)
            for number, block in enumerate(seq.block_table):
                cached = self._index.entries.get(block)
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
        here = self._index.variants(chain)
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

    def _longest_part(self, seq: Sequence, number: int) -> Part | None:
        """Rows of a block that a text can have a copy of, behind its first `number` blocks."""
        if seq.prefix_use == "none":
            return None
        with_draft = seq.prefix_use == "draft"
        first = number * self.block_size
        # what drafts in its next step needs the output of its last row
        limit = len(seq.token_ids) - 1 - (with_draft and seq.num_output > 0) - first
        text = seq.token_ids[first : first + self.block_size + 1]
        parent = self._hashes(seq, number)[number]
        return self._index.longest_part(parent, text, limit, with_draft=with_draft)

    def _restore_hits(
        self, seq: Sequence, hits: list[Hit], part: Part | None, left: list[int], blocks: BlockManager
    ) -> None:
        """Fill a block table with what was found; `left` are the blocks shared for it, last one first."""
        table, size = seq.block_table, self.block_size
        for hit in hits:
            if not hit.exact:
                if self._restore_copy(seq, hit, blocks):
                    seq.num_computed += size
                return
            if hit.block is not None:
                table.append(left.pop())
            else:
                blocks.extend(table, (len(table) + 1) * size)
                if not self._fetch(hit.key, table[-1], seq):
                    blocks.release(left)
                    return
            seq.num_indexed += 1
            self._note_rows(seq, size)
        if part is not None:
            blocks.extend(table, (len(table) + 1) * size)
            self._storage.copy(part.block, table[-1])
            self.counts.copied += 1
            self._note_rows(seq, part.rows)

    def _note_rows(self, seq: Sequence, rows: int) -> None:
        seq.num_computed += rows
        seq.draft_computed = seq.num_computed if seq.prefix_use == "draft" else 0

    def _restore_copy(self, seq: Sequence, hit: Hit, blocks: BlockManager) -> bool:
        """Append a copy of a block whose last draft row is another continuation's, that row to be made."""
        table = seq.block_table
        blocks.extend(table, (len(table) + 1) * self.block_size)
        if hit.block is None:
            cold = self.tiers.get(hit.key) if self.tiers is not None else None
            if cold is None or not self._storage.write(table[-1], cold.rows):
                return False
            state = cold.state
            self.counts.fetched += 1
        else:
            state = self._index.entries[hit.block].state
            self._storage.copy(hit.block, table[-1])
            self.counts.copied += 1
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
        self._index.add(CachedBlock(key, self._hashes(seq, number)[number], tokens, cold.state), block)
        self.counts.fetched += 1
        return True

    def _hashes(self, seq: Sequence, count: int) -> list[bytes]:
        """Hashes before and after each of the first `count` blocks; kept with the sequence."""
        hashes, size = seq.block_hashes, self.block_size
        if not hashes:
            salt = seq.options.cache_salt
            hashes.append(hashlib.sha256(b"" if salt is None else b"salt:" + salt.encode()).digest())
        while len(hashes) <= count:
            start = (len(hashes) - 1) * size
            hashes.append(chain_hash(hashes[-1], seq.token_ids[start : start + size]))
        return hashes
