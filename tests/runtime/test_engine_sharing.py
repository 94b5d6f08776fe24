"""Several users of one engine, and steps that fail: nobody loses text, no block stays owned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.drafts.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.sequence import SamplingParams

PROMPTS = [[7, 3, 9, 20, 5], [40, 41], [8] * 21, [100, 3, 100, 3, 100, 3]]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[list[int]]:
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=1024))
    return [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]


def test_a_stream_survives_other_users_of_its_engine(tiny_llama: Path, expected: list[list[int]]) -> None:
    """A second caller's steps also move the stream's sequences; the stream must notice, not step on."""
    engine = Engine(tiny_llama, draft="ngram", config=EngineConfig(kv_tokens=1024))
    first, second = engine.stream(PROMPTS[:1], GREEDY), engine.stream(PROMPTS[1:2], GREEDY)
    tokens: list[list[int]] = [next(first).token_ids, next(second).token_ids]
    assert engine.generate(PROMPTS[2:3], GREEDY)[0].token_ids == expected[2]
    for stream, seen in ((first, tokens[0]), (second, tokens[1])):
        for piece in stream:
            seen.extend(piece.token_ids)
    assert tokens == expected[:2]
    assert engine.blocks.num_free == engine.blocks.num_blocks


# a drafter is to be asked in every step
ALWAYS = EngineConfig(kv_tokens=1024, spec=SpecConfig(adaptive=False))


class FailingDrafter(NgramDrafter):
    """Raises once, in its fifth proposal."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def propose(self, requests: Any) -> Any:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("planted")
        return super().propose(requests)


def test_a_failed_step_ends_its_callers_and_nobody_else(tiny_llama: Path, expected: list[list[int]]) -> None:
    """B75: an exception inside a step returns every block, and later requests are served as ever."""
    engine = Engine(tiny_llama, draft=lambda view: FailingDrafter(), config=ALWAYS)
    with pytest.raises(RuntimeError, match="planted"):
        engine.generate(PROMPTS, GREEDY)
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.scheduler.has_work
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == expected


def test_another_callers_sequence_starts_over_after_a_failed_step(
    tiny_llama: Path, expected: list[list[int]]
) -> None:
    engine = Engine(tiny_llama, draft=lambda view: FailingDrafter(), config=ALWAYS)
    waiting = engine.add(PROMPTS[0], GREEDY)
    with pytest.raises(RuntimeError, match="planted"):
        engine.generate(PROMPTS[1:], GREEDY)
    while not waiting.is_finished:
        engine.step()
    assert waiting.output_ids == expected[0]
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_engines_that_share_a_target_must_agree_on_it(tiny_llama: Path, expected: list[list[int]]) -> None:
    first = Engine(tiny_llama, config=EngineConfig(kv_tokens=1024, max_model_len=128))
    second = Engine(first, draft="ngram", config=EngineConfig(kv_tokens=512, max_model_len=64))
    assert second.decoder is first.decoder
    assert second.generate(PROMPTS[:1], GREEDY)[0].token_ids == expected[0]
    with pytest.raises(SpecdecError, match=r"max_model_len \(256\).*128"):
        Engine(first, config=EngineConfig(max_model_len=256))
    with pytest.raises(SpecdecError, match="weights"):
        Engine(first, config=EngineConfig(max_model_len=128, weights="plain"))


def test_a_request_may_bring_its_own_shape(tiny_llama: Path, expected: list[list[int]]) -> None:
    """Room behind the text follows the request's shape, not the engine's default."""
    engine = Engine(
        tiny_llama, draft="ngram", config=EngineConfig(kv_tokens=1024, spec=SpecConfig(max_nodes=4))
    )
    wide = SpecConfig(max_depth=16, max_nodes=32, top_k=4, ngram_min=1, adaptive=False)
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, spec=wide if row % 2 else None) for row in range(4)
    ]
    assert [result.token_ids for result in engine.generate(PROMPTS, params)] == expected
    off = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=20, ignore_eos=True, speculate=False))[0]
    assert off.token_ids == expected[0]
    assert off.stats.drafted == 0


def test_a_card_that_is_not_there_is_refused_by_name(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SpecdecError, match=r"device \(cuda\) needs a CUDA card"):
        Engine(tiny_llama, config=EngineConfig(device="cuda"))
