"""The decoding step on the device gives the host path's text, and asks the host for nothing on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.kernels import kernel
from specdec.sampling_params import SamplingParams

CHANCE = random.Random(5)
PROMPTS = [[CHANCE.randrange(3, 250) for _ in range(length)] for length in (3, 40, 17, 9, 26)]
CHAIN = SpecConfig(max_depth=3, max_nodes=3, adaptive=False)
TREE = SpecConfig(max_depth=3, top_k=3, max_nodes=8, adaptive=False)
WIDE = SpecConfig(max_depth=4, top_k=2, max_nodes=5)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
COUPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9, top_p=0.9, seed=4, rule="coupled")
BLOCK = SamplingParams(
    max_tokens=12, ignore_eos=True, temperature=0.9, top_k=8, seed=7, rule="block", spec=CHAIN
)
TARGET_ONLY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3, rule="target-only")
MIX = [
    GREEDY,
    COUPLED,
    SamplingParams(max_tokens=9, ignore_eos=True, spec=WIDE),
    SamplingParams(max_tokens=14, ignore_eos=True, speculate=False, temperature=1.0, min_p=0.02, seed=8),
    SamplingParams(
        max_tokens=11, ignore_eos=True, temperature=0.7, top_k=30, seed=6, rule="coupled", spec=WIDE
    ),
]


def served(
    folder: Path,
    draft: Path | str | None,
    params: Any,
    *,
    on_device: bool = True,
    prompts: list[list[int]] = PROMPTS,
    **settings: Any,
) -> tuple[list[tuple[list[int], dict[str, Any]]], Engine]:
    """Texts with their statistics, and the engine; a small pool makes sequences wait and give way."""
    sizes = {"kv_tokens": 512, "max_num_seqs": 4, "max_batch_tokens": 48, "draft_weights": "plain"}
    config = EngineConfig(**{**sizes, **settings})
    engine = Engine(folder, draft=draft, config=config)
    if not on_device:
        engine.device_step = None
    results = engine.generate(prompts, params)
    engine.audit()
    return [(result.token_ids, result.stats.to_dict()) for result in results], engine


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, COUPLED, MIX], ids=["greedy", "coupled", "mixed"])
def test_a_step_on_the_device_commits_what_the_host_does(
    tiny_llama: Path, draft: Path, params: Any, spec: SpecConfig
) -> None:
    """Tokens, and every count of drafts and acceptances."""
    expected, _ = served(tiny_llama, draft, params, spec=spec, kernels="reference", on_device=False)
    got, engine = served(tiny_llama, draft, params, spec=spec, kernels="reference")
    assert got == expected
    assert engine.device_step is not None
    assert engine.device_step.steps > 5
    assert any(size.width for size in engine.device_step._classes), "no tree grew on the device"


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_drawn_chains_and_the_targets_own_law_are_judged_on_the_device_as_on_the_host(
    tiny_llama: Path, draft: Path, spec: SpecConfig
) -> None:
    """Block verification of chains drawn on the device, beside trees of other rules, and target-only."""
    params = [BLOCK, TARGET_ONLY, GREEDY, COUPLED, replace(BLOCK, seed=8, temperature=1.3)]
    expected, _ = served(tiny_llama, draft, params, spec=spec, kernels="reference", on_device=False)
    got, engine = served(tiny_llama, draft, params, spec=spec, kernels="reference")
    assert got == expected
    assert sum(stats["accepted"] for _, stats in got[:2]) > 0
    assert engine.device_step is not None
    assert any(size.block and size.target_only and size.width for size in engine.device_step._classes)
    assert engine.pipeline.steps_ahead > 0


@pytest.mark.parametrize("draft_name", [None, "ngram"])
def test_steps_without_a_head_run_on_the_device_too(tiny_llama: Path, draft_name: str | None) -> None:
    expected, _ = served(tiny_llama, draft_name, MIX)
    got, engine = served(tiny_llama, draft_name, MIX, kernels="reference")
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert engine.device_step is not None
    assert engine.device_step.steps > 5


def test_requests_that_need_the_host_are_counted_by_reason(tiny_llama: Path, draft: Path) -> None:
    params = [
        GREEDY,
        SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=2, rule="block"),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=2, rule="rejection"),
        SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=2, typical_p=0.9, rule="coupled"),
    ]
    prompts = [*PROMPTS, PROMPTS[0]]
    expected, _ = served(tiny_llama, draft, params, spec=CHAIN, prompts=prompts)
    got, engine = served(
        tiny_llama, draft, params, spec=CHAIN, prompts=prompts, kernels="reference", max_num_seqs=1
    )
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert engine.device_step is not None
    reasons = set(engine.device_step.declined)
    host = {"prompt", "changed logits", "logprobs", "typical_p", "rule rejection", "trees drawn by the host"}
    assert reasons == host


def test_bad_logits_end_their_own_sequence_alone(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=512, kernels="reference"))
    first = engine.generate(PROMPTS[:2], GREEDY)
    runner = engine.device_step.runner if engine.device_step else None
    assert runner is not None
    inner = runner.target.logits

    def poisoned(normed: torch.Tensor) -> torch.Tensor:
        logits = inner(normed)
        if logits.shape[0] >= 2:
            logits[1] = torch.nan
        return logits

    runner.target.logits = poisoned  # type: ignore[method-assign]
    results = engine.generate(PROMPTS[:2], GREEDY)
    assert results[0].token_ids == first[0].token_ids
    assert results[1].finish_reason == "error"


class Waits(TorchDispatchMode):
    """Refuses operations that make the host wait for a device, except inside the stand-ins for kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
        if name == "index":
            waits |= any(one is not None and one.dtype == torch.bool for one in args[1])
        assert not waits or self.quiet, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "params",
    [
        [GREEDY],
        [replace(COUPLED, max_tokens=6), replace(BLOCK, max_tokens=6), replace(TARGET_ONLY, max_tokens=6)],
    ],
    ids=["greedy", "sampled"],
)
def test_nothing_inside_a_step_is_read_on_the_host(
    tiny_llama: Path, draft: Path, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """References of three kernels read their batch on the host; they stand in for kernels, which do not."""
    engine = Engine(
        tiny_llama, draft=draft, config=EngineConfig(kv_tokens=512, kernels="reference", spec=TREE)
    )
    step = engine.device_step
    assert step is not None
    mode = Waits()

    def quietly(call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            mode.quiet += 1
            try:
                return call(*args, **kwargs)
            finally:
                mode.quiet -= 1

        return inside

    ops = step.runner.ops
    for name in ("tree_attention", "rope_store"):
        object.__setattr__(ops, name, quietly(getattr(ops, name)))
    step._ops["commit_path"] = quietly(kernel("commit_path", "reference"))
    inner, watched = step.compute, []

    def compute(*args: Any) -> Any:
        with mode:
            watched.append(inner(*args))
        return watched[-1]

    monkeypatch.setattr(step, "compute", compute)
    engine.generate(PROMPTS[: len(params)], params)
    assert len(watched) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_captured_steps_write_the_same_text_and_never_wait(
    tiny_llama: Path, draft: Path, params: SamplingParams, spec: SpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"spec": spec, "device": "cuda"}
    expected, _ = served(tiny_llama, draft, params, cuda_graphs=False, on_device=False, **settings)
    eager, engine = served(tiny_llama, draft, params, cuda_graphs=False, **settings)
    assert engine.device_step is not None
    inner = engine.device_step.compute

    def strict(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine.device_step, "compute", strict)
    engine.device_step._classes.clear()
    engine.generate(PROMPTS, params)
    captured, engine = served(tiny_llama, draft, params, **settings)
    assert eager == expected
    assert captured == expected
