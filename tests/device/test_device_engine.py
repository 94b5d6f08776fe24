"""The device path writes what the processor's own path writes, through references and through Triton."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.sampling_params import SamplingParams

CHANCE = random.Random(11)
PROMPTS = [[CHANCE.randrange(3, 250) for _ in range(length)] for length in (1, 33, 5, 18, 70)]
CHAIN = SpecConfig(max_depth=3, max_nodes=3, adaptive=False)
TREE = SpecConfig(max_depth=3, top_k=3, max_nodes=9, adaptive=False)
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)
MIX = [
    GREEDY,
    SAMPLED,
    SamplingParams(max_tokens=10, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0, top_k=20, seed=9, logprobs=2),
    SamplingParams(max_tokens=7, speculate=False, ignore_eos=True),
]


def texts(
    folder: Path,
    draft: Path | str | None,
    params: SamplingParams | list[SamplingParams],
    prompts: list[list[int]] = PROMPTS,
    **settings: Any,
) -> list[list[int]]:
    """Token ids of every prompt; blocks and budget are small, so that chunks and tables are ragged."""
    config = EngineConfig(
        kv_tokens=1024,
        max_num_seqs=4,
        max_batch_tokens=48,
        draft_weights="plain",  # a rule of p and q sees what rounding does to q
        **settings,
    )
    engine = Engine(folder, draft=draft, config=config)
    results = engine.generate(prompts, params)
    engine.audit()
    assert [result.error for result in results] == [None] * len(prompts)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, MIX], ids=["greedy", "sampled", "mixed"])
def test_references_write_the_text_of_the_processors_path(
    tiny_llama: Path, draft: Path, params: SamplingParams | list[SamplingParams], spec: SpecConfig
) -> None:
    expected = texts(tiny_llama, draft, params, spec=spec)
    assert texts(tiny_llama, draft, params, spec=spec, kernels="reference") == expected


def test_every_family_runs_on_the_device_path(tiny_any_family: Path) -> None:
    """Norms of queries and keys, biases and a sliding window among them."""
    settings: dict[str, Any] = {"spec": SpecConfig(max_depth=6, max_nodes=6, adaptive=False, ngram_min=1)}
    expected = texts(tiny_any_family, None, GREEDY)
    assert texts(tiny_any_family, "ngram", GREEDY, kernels="reference", **settings) == expected


@pytest.mark.parametrize(
    "spec",
    [CHAIN, SpecConfig(max_depth=2, top_k=2, max_nodes=4, adaptive=False)],
    ids=["chain", "tree"],
)
def test_triton_kernels_write_the_text_of_the_processors_path(
    tiny_model_factory: Callable[..., Path],
    random_draft: Callable[..., Path],
    spec: SpecConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole engine through interpreted kernels, greedy and sampled in one batch."""
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    folder = tiny_model_factory("llama", seed=4, hidden_size=32, intermediate_size=48)
    settings: dict[str, Any] = {
        "draft": random_draft(folder, tmp_path / "draft"),
        "params": [replace(params, max_tokens=4) for params in (GREEDY, SAMPLED)],
        "spec": spec,
        "prompts": [PROMPTS[2], PROMPTS[3][:9]],
    }
    assert texts(folder, kernels="triton", **settings) == texts(folder, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_card_writes_the_text_of_the_processor(
    tiny_llama: Path, draft: Path, spec: SpecConfig, kernels: str
) -> None:
    """In float32, where the tiny target's choices are far apart; prompts, trees and rules in one batch."""
    params = [replace(one, rule="coupled") if one.temperature else one for one in MIX]
    expected = texts(tiny_llama, draft, params, spec=spec)
    assert texts(tiny_llama, draft, params, spec=spec, device="cuda", kernels=kernels) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_a_card_decodes_whole_batches(tiny_llama: Path, draft: Path, dtype: str) -> None:
    found = texts(tiny_llama, draft, GREEDY, spec=TREE, device="cuda", dtype=dtype)
    assert [len(one) for one in found] == [GREEDY.max_tokens] * len(PROMPTS)


def test_triton_on_the_processor_is_refused_unless_interpreted(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(SpecdecError, match="TRITON_INTERPRET=1"):
        Engine(tiny_llama, config=EngineConfig(kernels="triton", kv_tokens=64))


def test_unknown_devices_and_kernels_are_refused() -> None:
    with pytest.raises(SpecdecError, match=r"device \('gpu'\)"):
        EngineConfig(device="gpu")
    with pytest.raises(SpecdecError, match=r"kernels \('fast'\)"):
        EngineConfig(kernels="fast")
