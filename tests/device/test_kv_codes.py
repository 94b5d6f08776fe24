"""Eight-bit keys and values in the engine: codes move with their scales, drafts change no text, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.kernels.kv_quant import KV_CODE_DTYPES, dequantise_rows, quantise_rows
from specdec.paged_kv import PagedKVCache, head_row_bytes
from specdec.sampling_params import SamplingParams

TREE = SpecConfig(max_depth=4, top_k=2, max_nodes=10, adaptive=False)
CHAIN = SpecConfig(max_depth=3, max_nodes=3, adaptive=False)
LOOPING = [[5, 6, 7, 8, 9, 10, 11] * 4, [9, 8, 7, 9, 8, 7, 9]]


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_a_commit_moves_codes_with_their_scales(codes: str) -> None:
    cache = PagedKVCache(
        num_layers=2, num_blocks=3, block_size=4, num_kv_heads=2, head_dim=6, codes=KV_CODE_DTYPES[codes]
    )
    rows = torch.randn(2, 2, 2, 12, 6)
    stored, scales = quantise_rows(rows, codes)
    cache.data.copy_(stored)
    assert cache.scales is not None
    cache.scales.copy_(scales)
    cache.commit([5, 3, 9], [3, 4, 5])
    key_scales, value_scales = cache.layer_scales(1)
    assert key_scales is not None
    assert value_scales is not None
    # sources are read before targets are written: row 4 holds the old row 3
    moved = dequantise_rows(stored, scales)[1][:, :, [5, 3, 9]]
    assert torch.equal(dequantise_rows(cache.layer(1)[0], key_scales)[:, 3:6], moved[0])
    assert torch.equal(dequantise_rows(cache.layer(1)[1], value_scales)[:, 3:6], moved[1])
    assert cache.size_bytes == 2 * 2 * 2 * 12 * head_row_bytes(6, 4, coded=True)


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize(("draft", "spec"), [("ngram", CHAIN), ("random", TREE)])
def test_drafts_change_no_text_over_eight_bit_rows(
    tiny_llama: Path, codes: str, draft: str, spec: SpecConfig
) -> None:
    config = EngineConfig(kv_tokens=256, kernels="reference", kv_cache_dtype=codes, spec=spec)
    plain = Engine(tiny_llama, config=config)
    drafted = Engine(plain, draft=draft, config=config)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = [result.token_ids for result in plain.generate(LOOPING, params)]
    results = drafted.generate(LOOPING, params)
    assert [result.token_ids for result in results] == expected
    assert sum(result.stats.drafted for result in results) > 0
    drafted.audit()
    whole = Engine(plain, config=EngineConfig(kv_tokens=256, kernels="reference"))
    assert drafted.memory_report().kv_pool < whole.memory_report().kv_pool


def test_an_interpreted_kernel_serves_eight_bit_rows(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    texts = []
    for kernels in ("triton", "reference"):
        config = EngineConfig(kv_tokens=64, kernels=kernels, kv_cache_dtype="int8", overlap=False)
        texts.append(Engine(tiny_llama, config=config).generate([[5, 6, 7]], params)[0].token_ids)
    assert texts[0] == texts[1]


def test_the_processors_own_path_refuses_codes(tiny_llama: Path) -> None:
    with pytest.raises(SpecdecError, match=r"kv_cache_dtype \(int8\) needs kernels"):
        Engine(tiny_llama, config=EngineConfig(kv_tokens=64, kv_cache_dtype="int8"))
    with pytest.raises(SpecdecError, match=r"kv_cache_dtype \('fp4'\) must be one of auto, int8, fp8"):
        EngineConfig(kv_cache_dtype="fp4")
