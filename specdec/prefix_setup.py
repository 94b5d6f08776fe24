"""The prefix cache of an engine, with its colder tiers, and what each request may use of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specdec.block_storage import PooledBlocks
from specdec.cold_tiers import ColdTiers, HostTier, Tier
from specdec.config import EngineConfig
from specdec.disk_tier import DiskTier
from specdec.drafter import Drafter, TapDrafter
from specdec.paged_kv import PagedKVCache
from specdec.prefix_cache import PrefixCache
from specdec.provenance import folder_fingerprint, sha256_text
from specdec.sequence import PrefixUse, Sequence

# files of another layout are not read
DISK_FORMAT = 1


def build_prefix_cache(
    config: EngineConfig,
    cache: PagedKVCache,
    drafter: Drafter | None,
    target_folder: Path,
    clock: Callable[[], float],
) -> PrefixCache | None:
    """The cache, over the target's rows and those of a drafter that shares its blocks; None when it is off.

    Raises:
        SpecdecError: a disk folder that cannot be used.
    """
    if not config.prefix_cache:
        return None
    draft_caches = drafter.caches if isinstance(drafter, TapDrafter) else ()
    storage = PooledBlocks([cache, *draft_caches])
    tiers: list[Tier] = []
    if config.host_cache_gb:
        tiers.append(HostTier(int(config.host_cache_gb * 1e9)))
    if config.disk_cache_dir is not None:
        head = drafter.fingerprint if isinstance(drafter, TapDrafter) else ""
        # everything that makes the rows of equal texts different
        parts = [DISK_FORMAT, folder_fingerprint(target_folder), head, config.dtype, config.block_size]
        parts += [config.kv_cache_dtype, config.deterministic, storage.block_bytes]
        namespace = sha256_text(repr(parts))[:32]
        tiers.append(DiskTier(Path(config.disk_cache_dir), int(config.disk_cache_gb * 1e9), namespace))
    return PrefixCache(
        config.block_size,
        storage,
        clock=clock,
        # the other half stays for those who pin nothing
        max_pinned=cache.num_blocks // 2,
        tiers=ColdTiers(tiers) if tiers else None,
    )


def prefix_use(seq: Sequence, prefixes: PrefixCache | None, drafter: Drafter | None) -> PrefixUse:
    """Which rows of its blocks a request shares."""
    # a row that is not computed foretells nothing
    if prefixes is None or seq.params.prompt_logprobs is not None:
        return "none"
    if seq.spec is None or drafter is None or not drafter.boundaries:
        return "target"
    # a drafter that keeps its own record of the taps has to see every row
    return "draft" if isinstance(drafter, TapDrafter) else "none"


def finish_rows(
    seqs: list[Sequence], prefixes: PrefixCache, drafter: Drafter | None, ttl_limit_s: float, now: float
) -> None:
    """Index what finished requests leave behind, and pin what is to stay.

    A drafter's rows are made as they are needed, so the last ones are missing until now.
    """
    sound = [seq for seq in seqs if seq.finish_reason != "error"]
    for seq in sound:
        seq.drop_rows_behind_the_text()
    if isinstance(drafter, TapDrafter):
        drafter.absorb([seq for seq in sound if seq.prefix_use == "draft"])
    for seq in seqs:
        if seq.finish_reason == "error":
            # what broke its logits may lie in its rows
            prefixes.forget(seq.block_table)
            continue
        prefixes.index(seq)
        prefixes.index_end(seq)
        ttl = min(seq.options.kv_ttl_s, ttl_limit_s)
        if ttl > 0:
            prefixes.pin(seq.block_table, now + ttl, seq.options.cache_salt)
