"""Heads of every variant are trained, saved, and served without changing a token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.drafts.checkpoint import read_stored
from specdec.drafts.variants import VARIANTS
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.sequence import SamplingParams
from specdec.train.config import TrainConfig
from specdec.train.run import TrainResult, train_draft

BASE = TrainConfig(
    draft_vocab_size=64,
    unroll=3,
    batch_rows=120,
    steps=12,
    learning_rate=5e-3,
    compute_dtype="float32",
    init="random",
    eval_sequences=0,
)
HEADS: dict[str, dict[str, Any]] = {
    "eagle-3": {"fc_norm": False, "norm_output": False, "norm_before_fc": True, "norm_before_residual": True},
    "qk-norm-and-biases": {"qk_norm": True, "attention_bias": True},
    "narrow-with-projections": {"hidden_size": 40},
    "wide-with-its-own-rows": {"hidden_size": 80, "embed": "own", "lm_head": "own", "qk_norm": True},
}


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers of the tiny target to random prompts."""
    model = load_hf_model(tiny_llama)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 200, (8, 6), generator=generator)
    texts = model.generate(prompts, max_new_tokens=16, do_sample=False, eos_token_id=None).tolist()
    path = tmp_path_factory.mktemp("answers") / "responses.jsonl"
    records = [{"prompt_token_ids": text[:6], "response_token_ids": text[6:]} for text in texts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("name", HEADS)
def test_a_variant_is_trained_saved_and_served(
    name: str, tiny_llama: Path, answers: Path, tmp_path: Path
) -> None:
    config = replace(BASE, **HEADS[name])

    def run(folder: str, config: TrainConfig) -> TrainResult:
        return train_draft(
            tiny_llama, boundaries=(1, 3, 4), data=answers, out=tmp_path / folder, config=config
        )

    before = run("start", replace(config, steps=1, learning_rate=1e-9))
    after = run("end", config)
    assert before.outcome.last_loss is not None
    assert after.outcome.last_loss is not None
    assert after.outcome.last_loss < before.outcome.last_loss - 0.1
    old, new = read_stored(before.folder), read_stored(after.folder)
    for key, value in HEADS[name].items():
        assert getattr(new.config, key) == value
    for tensor, found in new.tensors.items():
        assert tensor in ("d2t", "t2d") or not torch.equal(found, old.tensors[tensor]), f"{tensor} stayed"
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    prompts = [[7, 3, 9], [40, 41, 5, 6, 7, 8]]
    spec = SpecConfig(max_depth=3, top_k=2, max_nodes=6, adaptive=False)
    plain = Engine(tiny_llama, config=EngineConfig(kv_tokens=256)).generate(prompts, params)
    drafted = Engine(tiny_llama, draft=after.folder, config=EngineConfig(kv_tokens=256, spec=spec))
    assert [r.token_ids for r in drafted.generate(prompts, params)] == [r.token_ids for r in plain]


def test_every_variant_can_be_asked_for() -> None:
    """What the list of variants names follows from fields of the configuration of training."""
    fields = {*TrainConfig.__dataclass_fields__}
    assert VARIANTS.keys() - fields == {"embed_proj", "out_proj"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 40, "init": "ridge"}, r"--init random with hidden_size \(40\)"),
        ({"hidden_size": 40, "init": "last-layer"}, r"--init random with hidden_size \(40\)"),
        ({"norm_before_residual": True, "init": "ridge"}, "no norm_before_residual"),
        ({"norm_before_fc": True}, "--no-fc-norm"),
        ({"embed": "tied"}, "embed"),
        ({"distill_top_k": 0}, "distill_top_k"),
    ],
)
def test_a_head_that_training_cannot_start_is_refused_by_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        replace(BASE, **change)
