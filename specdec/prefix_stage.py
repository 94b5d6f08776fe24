"""Which blocks of a text are worth reading from a disk: those that continue what is at hand.

Runs beside the engine's thread, which may be changing the index: what is found here is a guess, and only
costs a read or a computation where it is wrong.
"""

from __future__ import annotations

from collections.abc import Collection

from specdec.cold_tiers import BlockKey, ColdTiers
from specdec.prefix_index import NO_DRAFT, PrefixIndex
from specdec.sequence import Sequence


def keys_to_stage(
    seq: Sequence, chains: list[bytes], block_size: int, index: PrefixIndex, tiers: ColdTiers
) -> list[BlockKey]:
    """Keys of blocks on a disk, first ones first.

    Args:
        seq: whose text it is.
        chains: hashes of its full blocks.
        block_size: tokens of a block.
        index: blocks of the pool.
        tiers: where the others are.
    """
    keys: list[BlockKey] = []
    for number, chain in enumerate(chains):
        wanted = seq.token_ids[(number + 1) * block_size] if seq.prefix_use == "draft" else None
        found = _best({*index.variants(chain), *tiers.variants(chain)}, wanted)
        if found is None or wanted not in (None, found):
            better = _best(tiers.behind(chain), wanted)
            if better is None or (found is not None and better != wanted):
                break
            keys.append((chain, better))
            found = better
        # behind a block that is to be mended nothing is taken
        if wanted not in (None, found):
            break
    return keys


def _best(next_tokens: Collection[int], wanted: int | None) -> int | None:
    """Of a text's blocks the one with draft rows for this next token, else any that can be mended."""
    if wanted in next_tokens:
        return wanted
    return next((token for token in next_tokens if wanted is None or token != NO_DRAFT), None)
