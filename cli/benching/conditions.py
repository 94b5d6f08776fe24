"""What must be alike before two speeds are set against one another: everything but speculation.

Owns the list of what counts as speculation and the refusal. What a run's conditions are is read from the
engine that ran, not from what was asked for. Does not know figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.provenance import folder_fingerprint, hardware

# sizes, and caches that a bench leaves empty: no answer's time depends on them
_ROOM = frozenset(
    {"kv_tokens", "kv_memory_bytes", "max_num_seqs", "gpu_memory_utilization", "max_kv_ttl_s"}
    | {"host_cache_gb", "disk_cache_dir", "disk_cache_gb"}
)
# fields of EngineConfig that say how to speculate, or only allow something that requests must name
_SPECULATION = frozenset({"spec", "simulate_acceptance", "draft_weights", "pass_costs", "allow_lossy"})


def engine_conditions(engine: Engine) -> dict[str, Any]:
    """What an engine computes, with which settings, on which hardware; nothing of speculation."""
    machine = hardware()
    left_out = _SPECULATION | _ROOM
    settings = {name: value for name, value in asdict(engine.config).items() if name not in left_out}
    return {
        **settings,
        "exact_against": engine.admission.exact_against,
        "target_fingerprint": folder_fingerprint(engine.target_folder),
        "packed_matrices": engine.decoder.num_packed,
        "plain_matrices": engine.decoder.num_plain,
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "threads": machine["torch_threads"],
        "gpus": machine["gpus"],
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs, with both values; empty when a speed-up may be taken."""
    return [
        f"{name} ({one.get(name)!r} and {other.get(name)!r})"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def require_comparable(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse a speed-up between runs that differ in anything but speculation.

    Args:
        what: names both sides.
        one: conditions of the one.
        other: of the other.

    Raises:
        SpecdecError: naming what differs.
    """
    if found := differences(one, other):
        raise SpecdecError(
            f"no speed-up of {what}: beside speculation they differ in {', '.join(found)}; measure both alike"
        )
