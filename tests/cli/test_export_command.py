"""`specdec export` and `specdec import`: a whole circle of them, and what is refused before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.cli.main import main
from specdec.drafts.checkpoint import StoredDraft, read_stored, write_draft
from specdec.provenance import RUN_SCHEMA

# the least depth at which 2, N // 2 and N - 3 differ
DEPTH = 7


@pytest.fixture(scope="module")
def target(tiny_model_factory: Callable[..., Path]) -> Path:
    return tiny_model_factory("llama", num_hidden_layers=DEPTH)


@pytest.fixture
def draft(target: Path, random_draft: Callable[..., Path], tmp_path: Path) -> Path:
    """A head that all four formats can hold."""
    stored = read_stored(random_draft(target, tmp_path / "made"))
    config = replace(stored.config, boundaries=(2, 3, 4), fc_norm=False, norm_output=False)
    tensors = {name: tensor for name, tensor in stored.tensors.items() if not name.startswith("fc_norm")}
    return write_draft(
        tmp_path / "draft", StoredDraft(config=config, contract=stored.contract, tensors=tensors)
    )


def _last(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_draft_goes_round_all_engines_and_comes_back_bit_by_bit(
    target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    current = draft
    for name in ("vllm", "sglang", "speculators", "eagle"):
        out, back = tmp_path / f"{name}-export", tmp_path / f"{name}-back"
        assert main(["export", str(current), "--to", name, "--target", str(target), "--out", str(out)]) == 0
        printed = _last(capsys)
        assert (printed["to"], printed["boundaries"]) == (name, [2, 3, 4])
        assert printed["serve"] in (out / "SERVING.md").read_text()
        assert sorted(path.name for path in out.iterdir()) == [
            "SERVING.md",
            "config.json",
            "model.safetensors",
            "run.json",
        ]
        record = json.loads((out / "run.json").read_text())
        assert record["schema"] == RUN_SCHEMA
        assert record["extra"]["serve"] == printed["serve"]
        assert main(["import", str(out), "--from", name, "--target", str(target), "--out", str(back)]) == 0
        assert _last(capsys)["lm_head"] == "target_rows"
        current = back
    first, last = read_stored(draft), read_stored(current)
    assert last.config == first.config
    assert last.contract.target_fingerprint == first.contract.target_fingerprint
    assert last.tensors.keys() == first.tensors.keys()
    assert all(torch.equal(last.tensors[name], tensor) for name, tensor in first.tensors.items())
    capsys.readouterr()
    words = [
        "generate",
        str(target),
        "--draft",
        str(current),
        "--prompt",
        "in the",
        "--max-tokens",
        "4",
        "--raw",
    ]
    assert main(words) == 0


def test_the_target_is_named_as_the_engine_is_to_load_it(
    target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "export",
        str(draft),
        "--to",
        "speculators",
        "--target",
        str(target),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--target-name", "org/target"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert _last(capsys)["serve"].startswith("vllm serve org/target --speculative-config")


def test_what_an_engine_cannot_hold_is_one_line_and_no_folder(
    target: Path, random_draft: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = random_draft(target, tmp_path / "made")
    out = tmp_path / "out"
    assert main(["export", str(draft), "--to", "eagle", "--target", str(target), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "error: --to eagle (SafeAILab's EAGLE repository) cannot hold this head: boundary 1" in error
    assert "export it --to vllm or sglang" in error
    assert not out.exists()


def test_a_damaged_import_writes_no_folder(
    target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a conversion that succeeds with a key missing (speculators #1114, fault B12)."""
    out = tmp_path / "out"
    assert main(["export", str(draft), "--to", "vllm", "--target", str(target), "--out", str(out)]) == 0
    tensors = load_file(out / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, out / "model.safetensors")
    back = tmp_path / "back"
    assert main(["import", str(out), "--from", "vllm", "--target", str(target), "--out", str(back)]) == 1
    assert "norm.weight is missing" in capsys.readouterr().err
    assert not back.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "DRAFT", "--to", "tgi", "--out", "new"], "--to (tgi) must be one of vllm, sglang"),
        (["export", "DRAFT", "--to", "vllm", "--out", "DRAFT"], "already exists"),
        (["export", "ngram", "--to", "vllm", "--out", "new"], "must be a trained head in a folder"),
        (["export", "ngram+DRAFT", "--to", "vllm", "--out", "new"], "must be a trained head in a folder"),
        (["import", "DRAFT", "--from", "medusa", "--out", "new"], "--from (medusa) must be one of"),
        (["import", "nowhere", "--from", "vllm", "--out", "new"], "is not a folder"),
        (["import", "DRAFT", "--from", "vllm", "--out", "DRAFT"], "already exists"),
    ],
)
def test_wrong_usage_ends_before_the_target_is_read(
    words: list[str], message: str, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"DRAFT": str(draft), "new": str(tmp_path / "new")}
    assert main([*(places.get(word, word) for word in words), "--target", "no-such-target"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
