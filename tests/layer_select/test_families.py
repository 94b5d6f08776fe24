"""Other architectures go through the same pass and the same command as Llama."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from specdec import hf
from specdec.cli.select_layers import select_layers
from specdec.layer_select import read_selection
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.score import score_layers
from specdec.layer_select.texts import read_texts

GEMMA = {"query_pre_attn_scalar": 24}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("gemma2", {**GEMMA, "final_logit_softcapping": 5.0}),
    ("gemma3_text", GEMMA),
    ("gpt_neox", {}),
    ("biogpt", {}),
]
app = typer.Typer()
app.command()(select_layers)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"question {i}: what is the {i * 7}th thing in the list?"} for i in range(80)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_every_estimator_and_the_probe_measure_the_family(
    family: str,
    settings: dict[str, Any],
    tiny_model_factory: Callable[..., Path],
    tiny_tokenizer: Any,
    prompts: Path,
) -> None:
    model = hf.load_hf_model(tiny_model_factory(family, num_hidden_layers=5, **settings))
    config = ScoreConfig(
        tokens=1500, batch_tokens=500, estimators=("all",), probe_tokens=600, probe_heldout=100, probe_dims=16
    )
    scores = score_layers(model, read_texts(prompts, tiny_tokenizer, config), config)
    assert scores.probe is not None
    for name in scores.names:
        values = scores.informativeness(name)
        assert values.shape == (6,)
        assert torch.isfinite(values).all()
        assert values.std() > 0
    assert torch.isfinite(scores.cka()).all()
    assert torch.isfinite(scores.probe.explained([(1, 3, 5), (2, 4, 5)])).all()


@pytest.mark.parametrize(("family", "settings"), FAMILIES[:3], ids=[name for name, _ in FAMILIES[:3]])
def test_the_command_selects_layers_for_the_family(
    family: str,
    settings: dict[str, Any],
    tiny_model_factory: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    specdec_home: Path,
) -> None:
    target = tiny_model_factory(family, num_hidden_layers=5, **settings)
    out = tmp_path / "selection.json"
    words = [target, "--data", prompts, "--tokens", 1500, "--out", out]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    document = read_selection(out)
    assert len(document["boundaries"]) == 3
    assert document["target"]["num_layers"] == 5
