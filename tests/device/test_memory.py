"""An engine's memory is what its report says, and does not grow with use."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec import admission
from specdec.config import EngineConfig, SpecConfig
from specdec.device.pool_size import num_blocks
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.sampling_params import SamplingParams

MID_SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MANY_HEADS = MID_SIZE | {"num_attention_heads": 12, "num_key_value_heads": 3}
WIDE = MID_SIZE | {"hidden_size": 384, "intermediate_size": 2304}
MANY_WORDS = MID_SIZE | {"vocab_size": 6000}
SPEC = SpecConfig(max_depth=3, top_k=2, max_nodes=6, adaptive=False)


def peak_of(work: Callable[[], object]) -> int:
    """Most bytes that torch's processor allocator held during `work`, beyond those at its beginning."""
    # what earlier tests left in circles would be freed during the work, and be taken off its peak
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("family", "shape", "budget", "context", "kernels"),
    [
        ("llama", MID_SIZE, 256, 512, "auto"),
        ("llama", MID_SIZE, 256, 512, "reference"),
        # what the largest step holds: scores of many heads, a wide feed-forward layer, rows of logits
        ("qwen3", MANY_HEADS, 384, 776, "auto"),
        pytest.param("llama", WIDE, 512, 512, "auto", marks=pytest.mark.slow),
        pytest.param("qwen2", MANY_WORDS, 64, 512, "auto", marks=pytest.mark.slow),
    ],
    ids=["mid", "mid-reference", "many-heads", "wide", "many-words"],
)
def test_the_measured_peak_is_the_reported_one(
    tiny_model_factory: Callable[..., Path],
    random_draft: Callable[..., Path],
    tmp_path: Path,
    family: str,
    shape: dict[str, int],
    budget: int,
    context: int,
    kernels: str,
) -> None:
    folder = tiny_model_factory(family, **shape, max_position_embeddings=1024)
    draft = random_draft(folder, tmp_path / "draft")
    config = EngineConfig(
        kv_tokens=4 * context,
        max_num_seqs=4,
        max_batch_tokens=budget,
        max_model_len=context,
        spec=SPEC,
        kernels=kernels,
    )
    engines: list[Engine] = []
    held = peak_of(lambda: engines.append(Engine(folder, draft=draft, config=config)))
    engine = engines[0]
    report = engine.memory_report()
    fixed = report.total - report.workspace
    assert fixed <= held
    # the last chunk is as long as the budget, and sees the longest context
    prompt = [3 + index % 200 for index in range(context - 8)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    step = peak_of(lambda: engine.generate([prompt, prompt[5:], prompt[9:]], params))
    assert fixed + step == pytest.approx(report.total, rel=0.05)


def test_every_tensor_of_weights_and_pools_is_counted_once(
    tiny_llama: Path, random_draft: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    draft = random_draft(tiny_llama, tmp_path / "draft")
    config = EngineConfig(kv_tokens=1024, weights="plain", kernels="reference")
    report = Engine(tiny_llama, draft=draft, config=config).memory_report()
    stored = sum(tensor.nbytes for tensor in load_file(tiny_llama / "model.safetensors").values())
    # tables of the rotation, and the staging buffer, come on top
    assert 0 <= report.weights - stored < 500_000
    assert report.kv_pool == 1024 * 4 * 2 * 2 * 24 * 4
    assert report.draft_kv == 1024 * 1 * 2 * 2 * 24 * 4
    assert report.to_dict()["total"] == sum(
        (report.weights, report.kv_pool, report.draft_weights, report.draft_kv, report.workspace)
    )


def test_a_thousand_steps_leave_nothing_behind(tiny_model_factory: Callable[..., Path]) -> None:
    """Through the device path, whose size classes keep buffers."""
    folder = tiny_model_factory("llama", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    config = EngineConfig(
        kv_tokens=2048, max_num_seqs=4, kernels="reference", spec=SpecConfig(max_depth=2, max_nodes=2)
    )
    engine = Engine(folder, draft="ngram", config=config)
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    def turn() -> tuple[int, int, int]:
        """Objects and tensors alive, and free blocks, after 250 steps."""
        before = engine.times.steps
        while engine.times.steps < before + 250:
            engine.generate([[5, 9, 5, 9, 7]] * 4, params)
        engine.audit()
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(isinstance(item, torch.Tensor) for item in objects), engine.blocks.num_free

    turn()
    first = turn()
    turn()
    last = turn()
    assert engine.times.steps >= 1000
    assert last[1] <= first[1]
    assert last[0] <= first[0] + 50
    assert last[2] == first[2]


def test_a_pool_beyond_the_free_memory_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "free_memory_bytes", lambda: 1 << 20)
    with pytest.raises(SpecdecError, match=r"kv_tokens \(4096\).*lower it to \d+"):
        Engine(tiny_llama, config=EngineConfig(kv_tokens=4096))
    engine = Engine(tiny_llama, config=EngineConfig(max_num_seqs=64))
    assert engine.memory_report().kv_pool <= 1 << 20


def test_the_pool_of_a_card_is_what_utilization_leaves() -> None:
    gb = 10**9
    blocks = num_blocks(free=70 * gb, total=80 * gb, workspace=2 * gb, block_bytes=gb // 10, utilization=0.9)
    assert blocks == 600  # 72 GB may be used, 10 are, 2 are workspace
    with pytest.raises(SpecdecError, match="gpu_memory_utilization"):
        num_blocks(free=9 * gb, total=80 * gb, workspace=2 * gb, block_bytes=gb // 10, utilization=0.9)


@pytest.mark.gpu
def test_the_card_holds_what_the_report_says(
    tiny_model_factory: Callable[..., Path], random_draft: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_factory("llama", hidden_size=2048, intermediate_size=4096, head_dim=64)
    draft = random_draft(folder, tmp_path / "draft")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config = EngineConfig(device="cuda", dtype="bfloat16", gpu_memory_utilization=0.5, spec=SPEC)
    engine = Engine(folder, draft=draft, config=config)
    engine.generate([[5, 6, 7] * 100] * 8, SamplingParams(max_tokens=32, ignore_eos=True))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == pytest.approx(engine.memory_report().total, rel=0.05)
