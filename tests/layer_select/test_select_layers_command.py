"""`specdec select-layers` end to end on tiny random targets: files, last line, refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from specdec.cli.select_layers import select_layers
from specdec.errors import SpecdecError, UsageError
from specdec.layer_select import picture_theme, read_selection
from specdec.layer_select.artifact import FIELDS

app = typer.Typer()
app.command()(select_layers)

EARLIER = '{"schema": "specdec.selection/2"}'


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
def test_command_writes_selection_pictures_and_run_record(
    family: str,
    tiny_model_factory: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    specdec_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picture_theme, "DOTS_PER_INCH", 40)
    target = tiny_model_factory(family, num_hidden_layers=8)
    out, picture = tmp_path / "made" / "selection.json", tmp_path / "made" / "selection.png"
    words = ["--picture", picture, "--print-pictures", "--resamples", 20]
    result = run(target, "--data", prompts, "--tokens", 3000, "--out", out, *words)
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    document = read_selection(out)
    assert tuple(document) == FIELDS
    assert last["boundaries"] == document["boundaries"] == sorted(set(document["boundaries"]))
    assert len(document["boundaries"]) == 3
    assert document["target"]["num_layers"] == 8
    assert len(document["target"]["fingerprint"]) == 64
    assert [len(row) for row in document["cka"]] == [9] * 9
    assert all(len(score["values"]) == 9 for score in document["scores"].values())
    assert len(document["scores"]) >= 6
    assert document["cost"]["tokens"] == last["tokens"] <= 3000
    assert document["cost"]["peak_memory_gib"] > 0
    assert document["objective"]["probe"]["overlap_second"] > 0
    assert all(each["probe"] is not None for each in document["references"].values())
    assert set(document["references"]) == {"default", "uniform", "last_third"}
    assert len(document["evidence"]["block_influence"]) == 8
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in last["pictures"])
    assert len(last["pictures"]) == 6
    record = json.loads((tmp_path / "made" / "selection.run.json").read_text())
    assert record["data_hash"] == document["hashes"]["calibration"]
    assert record["defaults"]["choose"]["diversity_weight"] == 2.0
    assert "tokens/s" in result.stderr or "scoring boundaries" in result.stderr
    for heading in ("chosen", "default [2, N/2, N-3]", "how sure", "Kendall", "searches", "GiB"):
        assert heading in result.stdout


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
    words = [
        *("--allowed", "0,2-4,6", "--min-gap", 2, "--num-layers", 3, "--estimator", "effective_rank"),
        *("--force", "2", "--forbid", "0", "--engine", "vllm", "--search", "kdpp", "--theta", 0.5),
        *("--estimators", "renyi_0.5", "--no-probe", "--resamples", 0),
    ]
    result = run(target, "--data", prompts, "--tokens", 1000, "--lambda", 0.5, "--out", out, *words)
    assert result.exit_code == 0, result.output
    document = read_selection(out)
    assert document["boundaries"] == [2, 4, 6]
    assert (document["lambda"], document["estimator"], document["search"]) == (0.5, "effective_rank", "kdpp")
    assert document["constraints"]["engine"] == "vllm"
    assert list(document["scores"]) == ["effective_rank", "renyi_0.5"]
    assert document["settings"]["choose"]["dpp_weight"] == 0.5
    assert document["objective"]["probe"] is None
    assert document["stability"]["bootstrap"] is None


def test_the_probe_can_decide(
    tiny_model_factory: Callable[..., Path], prompts: Path, tmp_path: Path, specdec_home: Path
) -> None:
    target = tiny_model_factory("llama", num_hidden_layers=6)
    out = tmp_path / "selection.json"
    words = ["--objective", "entropy+cka=0.25,probe=0.75", "--resamples", 3]
    result = run(target, "--data", prompts, "--tokens", 1500, "--out", out, *words)
    assert result.exit_code == 0, result.output
    document = read_selection(out)
    assert document["objective"]["terms"] == {"matrix_entropy+cka": 0.25, "probe": 0.75}
    assert document["objective"]["probe"]["overlap_second"] > 0


def test_the_default_texts_span_four_domains_in_equal_parts(
    tiny_llama: Path, tmp_path: Path, specdec_home: Path
) -> None:
    out = tmp_path / "selection.json"
    words = ["--tokens", 6000, "--no-probe", "--resamples", 3, "--out", out]
    result = run(tiny_llama, *words)
    assert result.exit_code == 0, result.output
    document = read_selection(out)
    assert set(document["cost"]["domains"]) == {"prose", "code", "maths", "chat"}
    assert set(document["cost"]["domains"].values()) == {1500}
    assert {choice["name"] for choice in document["stability"]["domains"]} == set(document["cost"]["domains"])
    assert "only code" in result.stdout


def test_an_interrupted_pass_is_continued(
    tiny_llama: Path, prompts: Path, tmp_path: Path, specdec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.layer_select import score

    words = [tiny_llama, "--data", prompts, "--tokens", 5000, "--resamples", 3, "--no-probe"]
    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    assert run(*words, "--out", whole).exit_code == 0
    saved = tmp_path / "pass.pt"
    real, batches = score.kept_states, []

    def interrupted(*arguments: Any) -> Any:
        batches.append(1)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(score, "kept_states", interrupted)
    assert run(*words, "--out", resumed, "--resume", saved).exit_code != 0
    assert saved.exists()
    assert not resumed.exists()
    assert run(*words, "--out", resumed, "--resume", saved).exit_code == 0
    first, second = read_selection(whole), read_selection(resumed)
    assert first["scores"] == second["scores"]
    assert first["cka"] == second["cka"]
    assert first["boundaries"] == second["boundaries"]


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--num-layers", 5], SpecdecError, "target has 4 layers, 5 requested; lower --num-layers"),
        (["--num-layers", 0], UsageError, r"--num-layers \(0\)"),
        (["--tokens", 0], UsageError, r"--tokens \(0\)"),
        (["--min-gap", 9], SpecdecError, "--min-gap 9"),
        (["--lambda", -1], UsageError, r"--lambda \(-1"),
        (["--theta", "nan"], UsageError, r"--theta \(nan\)"),
        (["--resamples", -1], UsageError, r"--resamples \(-1\)"),
        (["--estimator", "surprise"], UsageError, "must be one of"),
        (["--estimators", "surprise"], UsageError, "must be one of"),
        (["--objective", "luck"], UsageError, r"--objective \(luck\)"),
        (["--objective", "luck+cka"], UsageError, "must be one of"),
        (["--objective", "probe", "--no-probe"], UsageError, "needs the probe"),
        (["--search", "lucky"], UsageError, r"--search \(lucky\)"),
        (["--allowed", "2-x"], UsageError, r"--allowed \(2-x\)"),
        (["--allowed", "4-2"], UsageError, r"--allowed \(4-2\)"),
        (["--force", "two"], UsageError, r"--force \(two\)"),
        (["--forbid", ""], UsageError, r"--forbid \(\)"),
        (["--allowed", "7"], SpecdecError, r"must be in 0\.\.4"),
        (["--force", "9"], SpecdecError, r"forced boundary \(9\)"),
        (["--force", "2", "--forbid", "2"], SpecdecError, "both forced and forbidden"),
        (["--force", "1-4"], SpecdecError, "4 boundaries are forced, 3 requested"),
        (["--engine", "tgi"], UsageError, r"engine \(tgi\) must be one of"),
        (["--engine", "sglang", "--force", "4"], SpecdecError, "cannot be captured by sglang"),
        (["--engine", "sglang", "--num-layers", 4], SpecdecError, "engine sglang"),
        (["--data", "no-such-set"], SpecdecError, "no-such-set"),
        (["--data", "prose=no-such-file"], SpecdecError, "no-such-file"),
        (["--data", "prose=dev,"], SpecdecError, "must be DOMAIN=FILE"),
        (["--data", "prose=dev,prose=dev"], SpecdecError, "twice"),
        (["--device", "tpu"], UsageError, r"--device \(tpu\)"),
        (["--device", "cpu", "--device-map", "auto"], UsageError, "exclude each other"),
        (["--device-map", "sideways"], UsageError, r"--device-map \(sideways\) must be one of auto"),
        (["--dtype", "fp8"], UsageError, r"--dtype \(fp8\) must be one of float32"),
        (["--out", "/proc/nowhere/selection.json"], UsageError, "--out"),
        (["--picture", "/proc/nowhere/selection.png"], UsageError, "--picture"),
        (["--resume", "/proc/nowhere/pass.pt"], UsageError, "--resume"),
        (["--print-pictures"], UsageError, "needs --picture"),
        (["--picture", "evidence.jpg"], UsageError, r"--picture \(evidence\.jpg\) must end in \.png"),
        (["--allowed", "1-99999999999"], UsageError, r"--allowed .* names boundary 99999999999"),
        (["--lambda", "1e300"], UsageError, r"--lambda \(1e\+300\)"),
        (["--seed", 2**70], UsageError, "--seed"),
        (["--data", "calibration", "--tokens", 10], SpecdecError, r"--tokens \(10\) must be at least 16"),
    ],
)
def test_wrong_input_is_one_clear_error_and_leaves_earlier_output_alone(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    specdec_home: Path,
    words: list[Any],
    kind: type[SpecdecError],
    message: str,
) -> None:
    out = tmp_path / "selection.json"
    out.write_text(EARLIER)
    result = run(tiny_llama, "--data", prompts, "--tokens", 500, "--out", out, *words)
    assert type(result.exception) is kind, result.output
    with pytest.raises(SpecdecError, match=message):
        raise result.exception
    assert out.read_text() == EARLIER


def test_texts_too_few_for_the_probe_are_refused_before_the_target_is_loaded(
    tiny_llama: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec import hf

    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(hf, "load_hf_model", loaded)
    result = run(tiny_llama, "--data", prompts, "--tokens", 10, "--out", tmp_path / "s.json")
    assert isinstance(result.exception, SpecdecError)
    assert "--no-probe" in str(result.exception)
    assert "reading calibration texts" in result.stderr


def test_one_file_for_two_outputs_is_refused(tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    same = tmp_path / "same.png"
    result = run(tiny_llama, "--data", prompts, "--out", same, "--picture", same)
    assert type(result.exception) is UsageError
    assert "written by --out as well" in str(result.exception)


def test_a_picture_that_fails_leaves_the_earlier_selection(
    tiny_llama: Path, prompts: Path, tmp_path: Path, specdec_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.layer_select import picture

    def broken(*_: Any) -> Any:
        raise SpecdecError("no ink")

    monkeypatch.setattr(picture, "draw_stability", broken)
    out = tmp_path / "selection.json"
    out.write_text(EARLIER)
    words = ["--tokens", 800, "--no-probe", "--resamples", 2, "--picture", tmp_path / "s.png"]
    result = run(tiny_llama, "--data", prompts, "--out", out, *words)
    assert "no ink" in str(result.exception)
    assert out.read_text() == EARLIER
    assert not (tmp_path / "s.png").exists()
