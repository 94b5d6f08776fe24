"""Which block of a pool holds which text.

A full block is found by the chained hash of all tokens up to its end. Where a text leaves the full blocks
that are known, the block that goes on with most of the same tokens is found by its first token behind the
last known hash: another text's full block, or an open one, the end of a text that has finished.

Knows tokens, hashes and block numbers; not who uses a block, nor what its rows hold.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from specdec.cold_tiers import BlockKey

# a beginning that thousands share (a system prompt) has as many blocks behind it; a talk's own is a late one
MOST_COMPARED = 256
NO_DRAFT = -1  # the "next token" of blocks whose draft rows nobody made or needs


@dataclass(frozen=True)
class CachedBlock:
    """What a block of the pool holds.

    Attributes:
        key: chained hash up to its end, and the token that its last draft row depends on.
        parent: the hash before it.
        tokens: those of its rows; an open block has fewer than a block holds.
        state: the target's taps of its last row, for full blocks with draft rows.
    """

    key: BlockKey
    parent: bytes
    tokens: tuple[int, ...]
    state: Tensor | None

    @property
    def has_draft(self) -> bool:
        return self.key[1] != NO_DRAFT


@dataclass(frozen=True)
class Part:
    """The first `rows` rows of a block, which another text has in common with it."""

    block: int
    rows: int


def chain_hash(parent: bytes, tokens: SequenceOf[int]) -> bytes:
    """Hash of a text whose last tokens are these, from the hash of what is before them."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixIndex:
    """Blocks by the text they hold."""

    def __init__(self) -> None:
        self.entries: dict[int, CachedBlock] = {}
        self._by_chain: dict[bytes, dict[int, int]] = {}
        self._by_start: dict[tuple[bytes, int], dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, block: int) -> bool:
        return block in self.entries

    def variants(self, chain: bytes) -> dict[int, int]:
        """Full blocks of a text, by the next token of their draft rows."""
        return self._by_chain.get(chain, {})

    def add(self, entry: CachedBlock, block: int) -> None:
        """Take a block in; a second one with the same content is its owner's alone."""
        chain, next_token = entry.key
        variants = self._by_chain.setdefault(chain, {})
        if next_token in variants or (next_token == NO_DRAFT and variants):
            return
        assert block not in self.entries, f"block {block} is in the index under another text"
        variants[next_token] = block
        self.entries[block] = entry
        self._by_start.setdefault((entry.parent, entry.tokens[0]), {})[block] = None

    def forget(self, block: int) -> CachedBlock:
        """Take a block out."""
        entry = self.entries.pop(block)
        chain, next_token = entry.key
        del self._by_chain[chain][next_token]
        if not self._by_chain[chain]:
            del self._by_chain[chain]
        start = (entry.parent, entry.tokens[0])
        del self._by_start[start][block]
        if not self._by_start[start]:
            del self._by_start[start]
        return entry

    def longest_part(
        self, parent: bytes, text: SequenceOf[int], limit: int, *, with_draft: bool
    ) -> Part | None:
        """The block behind `parent` of which a text can use most rows, and how many; None for no row.

        Args:
            parent: hash of what is before.
            text: what follows, the token behind the last usable row included.
            limit: rows wanted at most.
            with_draft: whether draft rows are wanted too. The last one that agrees depends on a token that
                may differ; then the row before it is the last.
        """
        best: Part | None = None
        start: dict[int, None] = self._by_start.get((parent, text[0]), {}) if text else {}
        for block in islice(reversed(start), MOST_COMPARED):
            entry = self.entries[block]
            if with_draft and not entry.has_draft:
                continue
            rows = common_length(entry.tokens, text)
            if with_draft and not (rows == len(entry.tokens) < len(text) and entry.key[1] == text[rows]):
                rows -= 1
            rows = min(rows, limit)
            if rows > (best.rows if best is not None else 0):
                best = Part(block, rows)
        return best

    def audit(self) -> None:
        """Check the three views against each other, and hashes against tokens."""
        for chain, variants in self._by_chain.items():
            for next_token, block in variants.items():
                assert self.entries[block].key == (chain, next_token), "index and entries differ"
        for (parent, first), blocks in self._by_start.items():
            for block in blocks:
                entry = self.entries[block]
                assert (entry.parent, entry.tokens[0]) == (parent, first), "a block is under another start"
        for view in (self._by_chain, self._by_start):
            assert sum(map(len, view.values())) == len(self.entries), "an entry is not in the index"
        for block, entry in self.entries.items():
            assert chain_hash(entry.parent, entry.tokens) == entry.key[0], (
                f"block {block} is under a stale hash"
            )


def common_length(one: SequenceOf[int], other: SequenceOf[int]) -> int:
    """Tokens that two texts begin with alike."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))
