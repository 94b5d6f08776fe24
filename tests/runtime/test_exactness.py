"""What an exact text is exact against: the named target, or the one whose numbers have eight bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.exactness import TARGET, exact_against, exactness_notice
from specdec.requests import verification_fields
from specdec.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("weights", "kv_cache_dtype", "words"),
    [
        ("auto", "auto", TARGET),
        ("fp16-packed", "auto", TARGET),
        ("plain", "auto", TARGET),
        ("int8", "auto", "the target with int8 weights"),
        ("bf16-packed", "auto", "the target with bf16-packed weights"),
        ("auto", "fp8", "the target with fp8 KV cache"),
        ("int8", "int8", "the target with int8 weights and int8 KV cache"),
    ],
)
def test_rounded_numbers_are_named(weights: str, kv_cache_dtype: str, words: str) -> None:
    against = exact_against(weights=weights, kv_cache_dtype=kv_cache_dtype)
    assert against == words
    notice = exactness_notice(against)
    assert notice is None if words == TARGET else words in str(notice)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, TARGET),
        ({"draft_weights": "int8"}, TARGET),
        ({"weights": "int8"}, "the target with int8 weights"),
        ({"kernels": "reference", "kv_cache_dtype": "int8"}, "the target with int8 KV cache"),
    ],
)
def test_a_lossless_result_says_whose_text_it_is(
    settings: dict[str, Any], words: str, tiny_llama: Path
) -> None:
    """Catches `lossless` of a rounded target that reads as a promise about the named one."""
    config = EngineConfig(kv_tokens=64, max_num_seqs=1, **settings)
    (result,) = Engine(tiny_llama, draft="ngram", config=config).generate(
        [[1, 2, 3, 1, 2]], SamplingParams(temperature=0.0, max_tokens=4)
    )
    assert result.lossless
    assert verification_fields([result]) == {"verification": "exact", "exact_against": words}


def test_a_lossy_text_is_exact_against_nothing(tiny_llama: Path) -> None:
    config = EngineConfig(kv_tokens=64, max_num_seqs=1, allow_lossy=True)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=4, rule="typical")
    results = Engine(tiny_llama, draft="ngram", config=config).generate([[1, 2, 3, 1, 2]], params)
    fields = verification_fields(results)
    assert fields["exact_against"] is None
    assert str(fields["verification"]).startswith("typical")
