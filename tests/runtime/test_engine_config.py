"""Values an engine's configuration refuses: of another kind, out of range, or about absent drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("dtype", 3), ("device", None), ("kernels", []), ("weights", 8), ("kv_cache_dtype", "int4")],
        *[("gpu_memory_utilization", "x"), ("gpu_memory_utilization", True), ("cuda_graphs", 1)],
        *[("spec", None), ("spec", "chain:3"), ("kv_memory_bytes", "a"), ("kv_memory_bytes", 0)],
        *[("simulate_acceptance", True), ("block_size", []), ("disk_cache_dir", 4), ("max_num_seqs", None)],
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(SpecdecError, match=rf"^{field} \("):
        EngineConfig(**{field: value})


def test_a_whole_number_stands_for_a_float_and_none_where_it_may() -> None:
    config = EngineConfig(gpu_memory_utilization=1, max_kv_ttl_s=3, simulate_acceptance=None, kv_tokens=None)
    assert config.gpu_memory_utilization == 1
    with pytest.raises(SpecdecError, match=r"^adaptive \('no'\) must be true or false"):
        SpecConfig(adaptive="no")  # type: ignore[arg-type]


def test_simulated_acceptance_without_a_draft_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(SpecdecError, match=r"simulate_acceptance \(2\) needs a draft"):
        Engine(tiny_llama, config=EngineConfig(kv_tokens=64, simulate_acceptance=2.0))
