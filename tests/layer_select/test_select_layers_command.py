"""`specdec select-layers` end to end on tiny random targets: files, last line, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from specdec.cli.select_layers import select_layers
from specdec.errors import SpecdecError
from specdec.layer_select import read_selection

app = typer.Typer()
app.command()(select_layers)

EXPECTED_KEYS = {
    "schema", "target", "boundaries", "objective", "lambda", "estimator", "search", "constraints", "scores",
    "cka", "runners_up", "stability", "cost", "settings", "warnings", "hashes",
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt": f"question {i}: what is the {i * 7}th thing in the list of things?"} for i in range(120)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words: Any) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_command_writes_selection_picture_and_run_record(
    family: str, tiny_model_factory: Callable[..., Path], prompts: Path, tmp_path: Path, specdec_home: Path
) -> None:
    target = tiny_model_factory(family, num_hidden_layers=6)
    out, picture = tmp_path / "made" / "selection.json", tmp_path / "made" / "selection.png"
    result = run(target, "--data", prompts, "--tokens", 3000, "--out", out, "--picture", picture)
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    document = read_selection(out)
    assert set(document) == EXPECTED_KEYS
    assert last["boundaries"] == document["boundaries"] == sorted(set(document["boundaries"]))
    assert len(document["boundaries"]) == 3
    assert document["target"]["num_layers"] == 6
    assert len(document["target"]["fingerprint"]) == 64
    assert [len(row) for row in document["cka"]] == [7] * 7
    assert len(document["scores"]["matrix_entropy"]["values"]) == 7
    assert document["cost"]["tokens"] == last["tokens"] <= 3000
    assert document["cost"]["peak_memory_gib"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "made" / "selection.run.json").read_text())
    assert record["data_hash"] == document["hashes"]["calibration"]
    assert record["defaults"]["choose"]["diversity_weight"] == 2.0
    assert "tokens/s" in result.stderr or "scoring boundaries" in result.stderr


def test_same_seed_gives_the_same_evidence_and_choice(
    tiny_llama: Path, prompts: Path, tmp_path: Path, specdec_home: Path
) -> None:
    documents = []
    for name in ("first.json", "second.json"):
        assert run(tiny_llama, "--data", prompts, "--tokens", 1500, "--out", tmp_path / name).exit_code == 0
        document = read_selection(tmp_path / name)
        del document["cost"]
        documents.append(document)
    assert documents[0] == documents[1]


def test_options_reach_the_search(
    tiny_model_factory: Callable[..., Path], prompts: Path, tmp_path: Path, specdec_home: Path
) -> None:
    target = tiny_model_factory("llama", num_hidden_layers=6)
    out = tmp_path / "selection.json"
    words = ["--allowed", "0,2-4,6", "--min-gap", 2, "--num-layers", 4, "--estimator", "effective_rank"]
    result = run(target, "--data", prompts, "--tokens", 1000, "--lambda", 0.5, "--out", out, *words)
    assert result.exit_code == 0, result.output
    document = read_selection(out)
    assert document["boundaries"] == [0, 2, 4, 6]
    assert (document["lambda"], document["estimator"]) == (0.5, "effective_rank")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-layers", 5], "target has 4 layers, 5 requested"),
        (["--num-layers", 0], r"num_layers \(0\)"),
        (["--tokens", 0], r"tokens \(0\)"),
        (["--min-gap", 9], "min_gap 9"),
        (["--estimator", "surprise"], "must be one of"),
        (["--allowed", "2-x"], r"--allowed \(2-x\)"),
        (["--allowed", "7"], r"must be in 0\.\.4"),
        (["--data", "no-such-set"], "no-such-set"),
        (["--device", "tpu"], r"--device \(tpu\)"),
        (["--dtype", "fp8"], r"dtype \(fp8\)"),
        (["--out", "/proc/nowhere/selection.json"], "--out"),
    ],
)
def test_wrong_input_is_one_clear_error_and_leaves_earlier_output_alone(
    tiny_llama: Path, prompts: Path, tmp_path: Path, specdec_home: Path, words: list[Any], message: str
) -> None:
    out = tmp_path / "selection.json"
    out.write_text("earlier")
    result = run(tiny_llama, "--data", prompts, "--tokens", 500, "--out", out, *words)
    assert isinstance(result.exception, SpecdecError), result.output
    with pytest.raises(SpecdecError, match=message):
        raise result.exception
    assert out.read_text() == "earlier"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "schema"),
        ('{"schema": "specdec.selection/9"}', "specdec.selection/9"),
        (
            '{"schema": "specdec.selection/1", "boundaries": [3, 3], "target": {"num_layers": 4}}',
            "distinct, ascending",
        ),
        (
            '{"schema": "specdec.selection/1", "boundaries": [5], "target": {"num_layers": 4}}',
            r"in 0\.\.4",
        ),
    ],
)
def test_selection_files_that_do_not_hold_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "selection.json"
    path.write_text(content)
    with pytest.raises(SpecdecError, match=message):
        read_selection(path)
