"""A smoke run on the real SmolLM2-135M: text equal to transformers, the shipped draft accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec.cli.datasets import load_prompts
from specdec.cli.main import main
from specdec.config import EngineConfig, SpecConfig
from specdec.drafts import shipped_drafts
from specdec.engine import Engine
from specdec.hf import load_hf_model
from specdec.sequence import SamplingParams
from specdec.stats import SpecStats

pytestmark = pytest.mark.real_model

TOKENS = 48
PARAMS = SamplingParams(max_tokens=TOKENS)


@pytest.fixture(scope="module")
def plain() -> Engine:
    from specdec.hub import resolve_target

    return Engine(resolve_target("smollm2-135m"), config=EngineConfig(max_num_seqs=8, max_model_len=1024))


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, str]]]:
    prompts = load_prompts("mt_bench")[::10]
    return [[{"role": "user", "content": prompt.turns[0]}] for prompt in prompts]


def test_plain_text_equals_transformers(
    smollm2: Path, plain: Engine, chats: list[list[dict[str, str]]]
) -> None:
    results = plain.generate(chats[:4], PARAMS)
    model = load_hf_model(smollm2)
    for chat, result in zip(chats[:4], results, strict=True):
        ids = torch.tensor([plain.encoder.encode(chat)])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        assert output[0, ids.shape[1] :].tolist() == result.token_ids


@pytest.mark.parametrize("batch", [1, 8])
def test_the_shipped_draft_changes_no_token_and_is_accepted(
    smollm2: Path, plain: Engine, chats: list[list[dict[str, str]]], batch: int
) -> None:
    """Wrong taps, norms or vocabulary would leave the text right and acceptance at nothing."""
    assert shipped_drafts() == ["smollm2-135m"]
    expected = [result.token_ids for result in plain.generate(chats, PARAMS)]
    spec = SpecConfig(max_depth=4, top_k=1, max_nodes=4, adaptive=False)
    config = EngineConfig(max_num_seqs=batch, max_model_len=1024, spec=spec)
    results = Engine(plain, draft="smollm2-135m", config=config).generate(chats, PARAMS)
    assert [result.token_ids for result in results] == expected
    total = SpecStats()
    for result in results:
        total.add(result.stats)
    # the figure on all of MT-bench is in results/; a few short answers scatter by about 0.1
    assert total.acceptance_length is not None
    assert total.acceptance_length > 1.25


def test_the_demo_ends_with_its_figures(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command as `make demo`, on two prompts."""
    assert main(["demo", "--work", str(tmp_path), "--prompts", "2", "--max-tokens", "16"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["identical"] == figures["prompts"] == 2
    assert figures["acceptance_length"] >= 1.0
    promised = {"target", "boundaries", "tokens_per_second_plain", "tokens_per_second_speculative", "speedup"}
    assert promised <= set(figures)
