"""Greedy text of 200 prompts with the shipped draft against the plain text of that engine: no token differs.

The processor in fp32, a card in fp32 and, with fixed order of every sum, in bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specdec.cli.datasets import load_prompts
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.sequence import SamplingParams

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PROMPTS = 200
PARAMS = SamplingParams(max_tokens=48)
CHAIN = SpecConfig(max_depth=4, max_nodes=4, adaptive=False)
TREE = SpecConfig(max_depth=4, top_k=4, max_nodes=15, adaptive=False)
SERVED = EngineConfig(max_num_seqs=16, max_model_len=1024, kv_tokens=16 * 1024)


def differing(folder: Path, config: EngineConfig) -> list[int]:
    """Numbers of the prompts whose text the draft changes."""
    chats = [
        [{"role": "user", "content": prompt.turns[0]}] for prompt in load_prompts("six_tasks")[::2][:PROMPTS]
    ]
    assert len(chats) == PROMPTS
    plain = Engine(folder, config=config)
    drafted = Engine(plain, draft="smollm2-135m", config=config)
    expected = plain.generate(chats, PARAMS)
    results = drafted.generate(chats, PARAMS)
    accepted = sum(result.stats.accepted for result in results)
    assert accepted > PROMPTS, "a draft that is never right shows nothing"
    pairs = zip(expected, results, strict=True)
    return [index for index, (one, other) in enumerate(pairs) if one.token_ids != other.token_ids]


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_processor_writes_the_same_200_texts_in_fp32(smollm2: Path, spec: SpecConfig) -> None:
    assert differing(smollm2, replace(SERVED, spec=spec)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_card_writes_the_same_200_texts_when_deterministic(smollm2: Path, dtype: str) -> None:
    config = replace(SERVED, device="cuda", dtype=dtype, deterministic=True, spec=CHAIN)
    assert differing(smollm2, config) == []
