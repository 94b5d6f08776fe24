"""What a study reports: paired differences, what could have been seen, and which score foresaw the order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.cli.bootstrap import ArmCounts, arm_difference, arm_interval
from specdec.cli.main import main
from specdec.cli.studying.picture import study_figure
from specdec.cli.studying.report import compare, foresight, print_findings
from specdec.cli.studying.scores import subset_scores
from specdec.errors import SpecdecError
from specdec.layer_select.artifact import FIELDS, SCHEMA
from specdec.train.study_arms import TapSet

CONVERSATIONS = 40


def _record(boundaries: tuple[int, ...], seed: int, gain: float, noise: np.ndarray) -> dict[str, Any]:
    offline = [
        {
            "committed": 20 + gain + float(x),
            "verify_steps": 10,
            "overlap": [4 + gain],
            "divergence": [2 - gain],
            "rows": [10],
        }
        for x in noise
    ]
    return {"boundaries": list(boundaries), "seed": seed, "offline": offline, "served": []}


@pytest.fixture
def noise() -> Callable[[int], np.ndarray]:
    return lambda seed: np.random.default_rng(seed).normal(size=CONVERSATIONS)


def _sets(*sets: tuple[str, tuple[int, ...]]) -> list[TapSet]:
    return [TapSet(boundaries=boundaries, names=(name,)) for name, boundaries in sets]


def test_a_shared_noise_cancels_in_a_paired_difference(noise: Callable[[int], np.ndarray]) -> None:
    """Prompts differ by one token in ten, sets by a tenth of that: only pairing can see it."""
    sets = _sets(("default", (2, 15, 27)), ("mine", (11, 18, 27)))
    records = [_record((2, 15, 27), s, 0.0, noise(s)) for s in range(3)]
    records += [_record((11, 18, 27), s, 0.1, noise(s)) for s in range(3)]
    reference, mine = compare(records, sets)
    assert reference.differences == {}
    assert mine.reference == (2, 15, 27)
    found = mine.differences["acceptance_length"]
    assert found.value == pytest.approx(0.01)
    assert found.interval == pytest.approx((0.01, 0.01))
    low, high = mine.intervals["acceptance_length"]
    assert high - low > 0.02


def test_what_could_be_seen_grows_with_the_noise_that_is_not_shared() -> None:
    generator = np.random.default_rng(0)
    base = generator.normal(20, 1, size=(3, CONVERSATIONS))
    steps = np.full_like(base, 10.0)
    quiet = ArmCounts(base + 0.1 + generator.normal(0, 0.05, size=base.shape), steps)
    loud = ArmCounts(base + 0.1 + generator.normal(0, 0.5, size=base.shape), steps)
    reference = ArmCounts(base, steps)
    assert arm_difference(loud, reference).detectable > 3 * arm_difference(quiet, reference).detectable


def test_the_interval_of_an_arm_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(60):
        values = generator.normal(15, 3, size=(1, CONVERSATIONS))
        low, high = arm_interval(ArmCounts(values, np.full_like(values, 10.0)), seed=trial)
        hits += low <= 1.5 <= high
    assert hits >= 50


def test_differences_pair_the_seeds_that_both_sets_have(noise: Callable[[int], np.ndarray]) -> None:
    """Several processes at one study finish seeds out of order: seed 2 must not be paired with seed 1."""
    sets = _sets(("default", (2, 15, 27)), ("mine", (11, 18, 27)))
    records = [_record((2, 15, 27), s, 0.0, noise(s)) for s in (0, 1, 2)]
    records += [_record((11, 18, 27), s, 0.1, noise(s)) for s in (2,)]
    found = compare(records, sets)[1].differences["acceptance_length"]
    assert found.interval == pytest.approx((0.01, 0.01))
    apart = compare([r for r in records if r["boundaries"][0] == 11 or r["seed"] < 2], sets)[1]
    assert apart.differences == {}


def test_the_table_says_what_difference_could_have_been_seen(
    noise: Callable[[int], np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    sets = _sets(("default", (2, 15, 27)), ("mine", (11, 18, 27)))
    records = [_record((2, 15, 27), 0, 0.0, noise(0)), _record((11, 18, 27), 0, 0.1, noise(1))]
    findings = compare(records, sets)
    print_findings("tiny", findings, [])
    seen = findings[1].differences["acceptance_length"].detectable
    assert seen > 0
    assert f"could have seen (5 % two-sided, power 80 %): {seen:.3f}" in capsys.readouterr().out


def test_sets_of_other_sizes_are_compared_with_the_uniform_rule(noise: Callable[[int], np.ndarray]) -> None:
    sets = _sets(("uniform", (2, 28)), ("mine", (11, 27)))
    records = [_record((2, 28), 0, 0.0, noise(0)), _record((11, 27), 0, 0.5, noise(0))]
    assert compare(records, sets)[1].reference == (2, 28)


def test_a_score_that_orders_sets_as_measured_gets_tau_one(noise: Callable[[int], np.ndarray]) -> None:
    boundaries = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12)]
    sets = _sets(*[(f"random{i}", b) for i, b in enumerate(boundaries)])
    records = [_record(b, 0, 0.3 * i, noise(0)) for i, b in enumerate(boundaries)]
    scores = {"depth": lambda taps: float(sum(taps)), "shallowness": lambda taps: -float(sum(taps))}
    ranks = {row["score"]: row for row in foresight(compare(records, sets), scores, 3)}
    assert ranks["depth"]["overlap"] == 1.0
    assert ranks["shallowness"]["acceptance_length"] == -1.0


@pytest.fixture
def answers(tiny_llama: Path, tmp_path: Path) -> Path:
    """Random texts: what is learnt does not matter here."""
    generator = np.random.default_rng(0)
    path = tmp_path / "responses.jsonl"
    with open(path, "w") as file:
        for number in range(10):
            ids = generator.integers(0, 200, size=16).tolist()
            record = {"id": f"p{number}", "prompt_token_ids": ids[:5], "response_token_ids": ids[5:]}
            file.write(json.dumps(record) + "\n")
    return path


def test_the_command_writes_table_picture_and_json(
    tiny_llama: Path,
    answers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    out, picture = tmp_path / "study", tmp_path / "study.png"
    words = [
        "study",
        str(tiny_llama),
        *("--data", str(answers), "--out", str(out), "--layers", "mine=1,3", "--k", "2,1", "--seeds", "1"),
        *("--random-sets", "1", "--train-tokens", "40", "--held-out", "3", "--served", "1"),
        *("--served-tokens", "4", "--epochs", "1", "--draft-vocab-size", "64"),
        *("--picture", str(picture), "--probe-tokens", "48"),
    ]
    assert main(words) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["heads"] == summary["planned"] == len(summary["findings"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads((out / "study.json").read_text())
    assert record["run"]["defaults"]["train_tokens"] == 40
    valid_record(record)
    for path in (out / "arms").rglob("result.json"):
        valid_record(json.loads(path.read_text()))


def test_recipes_are_compared_with_the_studys_own_training(
    tiny_llama: Path,
    answers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    out, picture = tmp_path / "study", tmp_path / "study.png"
    words = [
        *("study", str(tiny_llama), "--data", str(answers), "--out", str(out), "--layers", "mine=1,3"),
        *("--recipe", "lk:loss=lk", "--recipe", "plain:init=random,fc_norm=false,norm_output=false"),
        *("--seeds", "2", "--train-tokens", "40", "--held-out", "3", "--served", "1"),
        *("--served-tokens", "4", "--epochs", "1", "--draft-vocab-size", "64", "--picture", str(picture)),
    ]
    assert main(words) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["heads"] == summary["planned"] == 6
    base, lk, plain = summary["findings"]
    assert [one["names"] for one in (base, lk, plain)] == [["base"], ["lk"], ["plain"]]
    assert lk["changes"] == {"loss": "lk"}
    assert plain["changes"] == {"init": "random", "fc_norm": False, "norm_output": False}
    assert (base["reference"], plain["reference"]) == (None, [1, 3])
    for figures in (lk["figures"], plain["figures"]):
        gap = figures["overlap"]["value"] - base["figures"]["overlap"]["value"]
        assert figures["overlap"]["difference"]["value"] == pytest.approx(gap)
    assert picture.read_bytes().startswith(b"\x89PNG")
    valid_record(json.loads((out / "study.json").read_text()))
    page = tmp_path / "report.md"
    assert main(["report", str(out / "study.json"), "--out", str(page)]) == 0
    assert "differs from the study's own training by" in page.read_text()
    assert "plain  [init random, fc_norm False, norm_output False]" in page.read_text()
    weights = {}
    for path in (out / "arms").rglob("result.json"):
        record = json.loads(path.read_text())
        valid_record(record)
        weights[path.parent.name] = record["trained_weights"]
    # two norms of the taps are gone
    assert weights["1-3.plain.seed0"] < weights["1-3.seed0"] == weights["1-3.lk.seed1"]
    other = [word.replace("lk:loss=lk", "lk:loss=lk-mix") for word in words]
    assert main(other) == 1
    assert "is of a recipe lk with other changes, {'loss': 'lk'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "11,18"], "--layers (11,18) must be NAME="),
        (["--layers", "mine=1,9"], "boundary 9 must be in 0..4"),
        (["--layers", "mine=none.json"], "--layers (none.json) must be a selection.json"),
        (["--k", "0"], "--k (0) must be"),
        (["--k", "9"], "--k (9) must be in 1..4"),
        (["--seeds", "x"], "--seeds (x) must be"),
        (["--held-out", "16"], "lower one of them"),
        (["--scores", "none.json"], "none.json"),
        (["--random-sets", "-1"], "--random-sets (-1) must be at least 0"),
        (["--probe-tokens", "-1"], "--probe-tokens (-1) must be at least 0"),
        (["--max-hours", "nan"], "--max-hours (nan) must be"),
        (["--epochs", "0"], "--epochs (0.0) must be"),
        (["--lr", "nan"], "--lr (nan) must be"),
        (["--draft-vocab-size", "0"], "--draft-vocab-size (0) must be"),
        (["--chain", "100"], "--chain (100) must be"),
        (
            ["--layers", "a=1,2", "--layers", "a=2,3"],
            "--layers a ([1, 2]) needs a name that no other set has",
        ),
        (["--layers", "random1=1,2,3"], "--layers random1 ([1, 2, 3]) needs a name"),
        (["--recipe", "kl"], "--recipe (kl) must be NAME:option=value"),
        (["--recipe", "base:loss=lk"], "the study's own training is called base"),
        (["--recipe", "more:epochs=9"], "--recipe more: 'epochs' must be one of"),
        (["--recipe", "norms:fc_norm=maybe"], "fc_norm (maybe) must be true or false"),
        (["--recipe", "kl:loss=lk"], "--recipe needs one tap set for all"),
        (["--layers", "a=1,2", "--recipe", "kl:loss=kl"], "--recipe kl changes nothing"),
        (["--layers", "a=1,2", "--recipe", "x:fc_norm=false"], "--recipe x: init (ridge) needs fc_norm"),
        (["--layers", "a=1,9", "--recipe", "x:loss=lk"], "--layers a: boundary 9 must be in 0..4"),
        (
            ["--layers", "a=1,2", "--recipe", "x:loss=lk", "--recipe", "x:ema=0.9"],
            "--recipe x is given twice",
        ),
        (["--layers", "a=1,2", "--recipe", "x:loss=lk", "--k", "2"], "--k and --recipe exclude each other"),
        (["--picture", "study.jpg"], "--picture (study.jpg) must end in .png"),
        (["--train-tokens", "10", "--probe-tokens", "9"], "--probe-tokens (9) needs more training"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str],
    said: str,
    tiny_llama: Path,
    answers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["study", str(tiny_llama), "--data", str(answers), "--out", str(tmp_path / "s")]
    command += ["--held-out", "3", "--served", "1", "--train-tokens", "40"]
    command += ["--draft-vocab-size", "64", *words]
    assert main(command) in (1, 2)
    printed = capsys.readouterr().err.splitlines()
    assert said in printed[-1]


def test_a_picture_in_place_of_the_data_is_refused(
    tiny_llama: Path, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = answers.rename(tmp_path / "answers.png")
    before = data.read_bytes()
    command = ["study", str(tiny_llama), "--data", str(data), "--out", str(tmp_path / "s")]
    assert main([*command, "--picture", str(data)]) == 2
    assert "is the file that --data is read from" in capsys.readouterr().err
    assert data.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"cka": "x"},
        {"scores": {}},
        {"scores": {"matrix_entropy": {"sign": 1, "values": [0.1]}}},
        {"cka": [[1.0, None], [None, 1.0]]},
    ],
)
def test_scores_that_were_edited_are_one_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    row = [0.5] * 5
    document: dict[str, Any] = dict.fromkeys(FIELDS)
    document |= {"schema": SCHEMA, "target": {"fingerprint": "f", "num_layers": 4}, "boundaries": [1, 2]}
    document |= {"estimator": "matrix_entropy", "lambda": 2.0, "constraints": {"allowed": [1, 2, 3, 4]}}
    document |= {"cka": [row] * 5, "scores": {"matrix_entropy": {"sign": 1, "values": row}}}
    path = tmp_path / "selection.json"
    path.write_text(json.dumps(document))
    assert subset_scores(path, "f")["matrix_entropy"]((1, 2)) == 0.5
    path.write_text(json.dumps(document | damage))
    with pytest.raises(SpecdecError, match=r"--scores .* was edited"):
        subset_scores(path, "f")


def test_the_picture_says_lengths_and_paired_differences_in_numbers(
    noise: Callable[[int], np.ndarray],
) -> None:
    sets = _sets(("default", (2, 15, 27)), ("mine", (11, 18, 27)))
    records = [_record((2, 15, 27), s, 0.0, noise(s)) for s in range(2)]
    records += [_record((11, 18, 27), s, 0.1, noise(s)) for s in range(2)]
    findings = compare(records, sets)
    lengths, *differences = study_figure(findings, title="tiny").axes
    shown = {note.get_text() for note in lengths.texts}
    assert shown == {f"{finding.values['acceptance_length']:.3f}" for finding in findings}
    # the reference has no difference from itself, so one number a panel
    assert [[note.get_text() for note in axes.texts] for axes in differences] == [["+0.010"], ["+0.010"]]


def test_a_streamed_set_is_studied_as_the_file_of_the_same_rows(
    tiny_llama: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra [data] is not installed")
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    datasets.Dataset.from_list([*rows, rows[0]]).to_parquet(tmp_path / "set" / "train.parquet")
    studies = {}
    for name, data in (("file", str(answers)), ("set", f"hf:{tmp_path / 'set'},limit=10")):
        out = tmp_path / f"study-of-{name}"
        words = ["study", str(tiny_llama), "--data", data, "--out", str(out), "--probe-tokens", "0"]
        words += ["--held-out", "3", "--served", "0", "--train-tokens", "40", "--draft-vocab-size", "64"]
        # conversations are read, split and run through the target; no head is trained
        assert main([*words, "--max-hours", "0"]) == 0
        studies[name] = json.loads((out / "study.json").read_text())["run"]
    assert studies["set"]["extra"]["study"] == studies["file"]["extra"]["study"]
    (copy,) = (tmp_path / "home" / "datasets").iterdir()
    assert studies["set"]["data_hash"] == hashlib.sha256(copy.read_bytes()).hexdigest()


def test_data_that_is_neither_file_nor_set_is_refused_with_both_ways_out(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["study", str(tiny_llama), "--data", "nowhere.jsonl", "--out", str(tmp_path / "s")]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "--data (nowhere.jsonl) is not a file; write one with specdec regenerate" in said
    assert "hf:NAME" in said
