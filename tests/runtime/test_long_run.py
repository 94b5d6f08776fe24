"""A hundred thousand tokens of mixed requests: memory, objects and blocks end where they stood early on."""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.sampling_params import SamplingParams

TOKENS = 100_000
EVERY = 10_000
# what allocators and caches of bounded size may still take after the first two samples
SLACK_BYTES = 8 << 20
SLACK_OBJECTS = 500
STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the process holds between two requests."""

    rss: int
    objects: int
    tensors: int


def held() -> Held:
    gc.collect()
    objects = gc.get_objects()
    return Held(
        rss=int(STATM.read_text().split()[1]) * resource.getpagesize(),
        objects=len(objects),
        tensors=sum(isinstance(item, torch.Tensor) for item in objects),
    )


def mixed_params(chance: random.Random) -> SamplingParams:
    """Greedy and sampled, penalised, stopped, ranked; with drafts and without."""
    kind = chance.randrange(6)
    return SamplingParams(
        max_tokens=chance.randrange(20, 160),
        ignore_eos=kind != 5,
        temperature=chance.choice((0.0, 0.7, 1.0)),
        seed=chance.randrange(1 << 30),
        top_p=0.9 if kind == 1 else 1.0,
        repetition_penalty=1.2 if kind == 2 else 1.0,
        logprobs=2 if kind == 3 else None,
        stop_token_ids=(chance.randrange(200),) if kind == 4 else (),
        speculate=kind != 0,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
def test_a_hundred_thousand_tokens_leave_nothing_behind(
    tiny_model_factory: Callable[..., Path], random_draft: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_factory("llama")
    draft = random_draft(folder, tmp_path / "draft")
    spec = SpecConfig(max_depth=3, top_k=2, max_nodes=6, adaptive=False)
    # the pool is small, so that cached texts are given up and running ones give way all the time
    config = EngineConfig(kv_tokens=640, max_num_seqs=6, max_batch_tokens=64, max_model_len=256, spec=spec)
    engine = Engine(folder, draft=f"ngram+{draft}", config=config)
    chance = random.Random(0)
    beginnings = [[chance.randrange(3, 200) for _ in range(24)] for _ in range(4)]
    written, samples = 0, []
    while written < TOKENS:
        prompts, params = [], []
        for _ in range(12):
            own = [chance.randrange(3, 200) for _ in range(chance.randrange(1, 60))]
            prompts.append((chance.choice(beginnings) if chance.random() < 0.5 else []) + own)
            params.append(mixed_params(chance))
        if chance.random() < 0.1:
            # a reader that leaves in the middle
            stream = engine.stream(prompts[:3], params[:3])
            next(stream)
            stream.close()
        written += sum(len(result.token_ids) for result in engine.generate(prompts, params))
        if written >= EVERY * (len(samples) + 1):
            engine.audit()
            samples.append(held())
            print(written, samples[-1], flush=True)
    early, last = samples[1], samples[-1]
    assert engine.scheduler.num_preemptions > 0
    assert last.rss <= early.rss + SLACK_BYTES
    assert last.objects <= early.objects + SLACK_OBJECTS
    assert last.tensors <= early.tensors + 20
    assert not engine.scheduler.has_work
