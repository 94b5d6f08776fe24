"""Part of a block: copied where texts part, never where its last draft row would be another text's."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.prefix_index import NO_DRAFT, CachedBlock, Part, PrefixIndex, chain_hash

ROOT = b"root"


def entry(tokens: tuple[int, ...], next_token: int, parent: bytes = ROOT) -> CachedBlock:
    return CachedBlock((chain_hash(parent, tokens), next_token), parent, tokens, None)


@pytest.mark.parametrize(
    ("text", "limit", "target", "draft"),
    [
        ([1, 2, 3, 4, 5], 9, Part(0, 4), Part(0, 4)),  # the open block whole, and the token behind it
        ([1, 2, 3, 4, 6], 9, Part(0, 4), Part(0, 3)),  # another token behind it: its last draft row is wrong
        ([1, 2, 3, 4], 9, Part(0, 4), Part(0, 3)),  # no token behind it
        ([1, 2, 3, 9, 5], 9, Part(0, 3), Part(0, 2)),
        ([1, 2, 7, 7, 7], 9, Part(1, 3), Part(1, 2)),
        ([1, 2, 3, 4, 5], 2, Part(1, 2), Part(0, 2)),  # the later one of equals
        ([1, 8], 9, Part(1, 1), None),
        ([8, 1], 9, None, None),
        ([], 9, None, None),
        ([2, 2, 2], 9, Part(2, 3), None),  # made without draft rows
    ],
)
def test_the_block_that_agrees_longest_gives_its_rows(
    text: list[int], limit: int, target: Part | None, draft: Part | None
) -> None:
    index = PrefixIndex()
    for block, (tokens, next_token) in enumerate(
        [((1, 2, 3, 4), 5), ((1, 2, 7, 8), 5), ((2, 2, 2), NO_DRAFT)]
    ):
        index.add(entry(tokens, next_token), block)
    index.audit()
    assert index.longest_part(ROOT, text, limit, with_draft=False) == target
    assert index.longest_part(ROOT, text, limit, with_draft=True) == draft
    assert index.longest_part(b"another salt", text, limit, with_draft=False) is None
    for block in range(3):
        index.forget(block)
        index.audit()
    assert index.longest_part(ROOT, text, limit, with_draft=False) is None


@pytest.mark.parametrize("use", ["target", "draft"])
def test_what_is_copied_is_not_given_up_for_the_blocks_before_it(schedule_host: Any, use: str) -> None:
    """Its first block is cold, the next one idle and the oldest: nothing is taken from under the copy."""
    host = schedule_host(num_blocks=9, cached=True, cold_blocks=30, budget=64, seed=1)
    prompt = [0, 1, 2, 2, 1, 0, 0, 1, 2]
    host.add(prompt, 1, use)
    host.add([1, 2] * 11 + [1], 1, use)
    host.drain()
    prefixes, order = host.prefixes, host.prefixes._order
    probe = host.add([*prompt[:8], 0, 0, 0], 5, use)
    first, second = [hit.block for hit in prefixes._match(probe)]
    order._unpinned.move_to_end(first, last=False)
    host.blocks._evict(1)
    host.scheduler.remove(probe)
    host.open.remove(probe)
    host.add([2], 2)
    host.step()
    order._unpinned.move_to_end(second, last=False)
    assert host.blocks._num_free == 0
    part = host.add([*prompt[:6], 2, 0, 0], 5, use)
    host.step()
    assert host.prefixes.counts.fetched == 1
    assert host.prefixes.counts.copied == 1
    assert part.num_cached_tokens == (6 if use == "target" else 5)
    host.drain()
