"""`specdec sweep` keeps its points: each measured once, and anew when what it was measured with changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.audit.parity import Task
from specdec.cli.main import main
from specdec.cli.sweeping import run as sweep_run
from specdec.cli.sweeping.cost import draft_fingerprint
from specdec.cli.sweeping.points import PLAIN, SweepPoint
from specdec.errors import RuleMismatchError, SpecdecError

SMALL = ["--tasks", "easy", "--task-limit", "4", "--max-tokens", "8"]
RULES = ["--rule", "exact", "--rule", "thresholds:threshold_acc=0.5", "--rule", "lenience", "--lossy"]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def spy_on_measure(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the points that are measured from now on."""
    real, asked = sweep_run.measure, []

    def spied(bench: Any, point: SweepPoint) -> dict[str, Any]:
        asked.append(point.label)
        return real(bench, point)

    monkeypatch.setattr(sweep_run, "measure", spied)
    return asked


def test_a_sweep_measures_each_point_once(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    command = ["sweep", str(tiny_llama), "--out", str(out), "--batch-size", "2", *SMALL, *RULES]
    assert main(command) == 0
    summary = last_json(capsys)
    points = {point["rule"]: point for point in summary["points"] if point["draft"] != PLAIN}
    plain = next(point for point in summary["points"] if point["draft"] == PLAIN)
    assert plain["acceptance_length"] == 1.0
    assert plain["draft_memory_bytes"] == 0
    assert plain["git"]
    assert points["exact"]["exact"] is True
    assert points["exact"]["total_variation"] == 0.0
    lossy = points["thresholds:threshold_acc=0.5"]
    assert lossy["exact"] is False
    assert lossy["verified_by"] == "thresholds(threshold_single=1, threshold_acc=0.5)"
    # a lookup has no law, so a rule of p and q says why it is not run
    assert [one["label"] for one in summary["left_out"]] == ["ngram, lenience, chain:3, batch 2"]
    assert "law" in summary["left_out"][0]["refused"]
    record = json.loads((out / "sweep.json").read_text())
    assert len(record["points"][0]["right_by_task"]) == 4
    assert (out / "sweep.png").stat().st_size > 10_000
    assert "thresholds" in (out / "sweep.md").read_text()
    assert "data:image/png" in (out / "sweep.html").read_text()

    asked = spy_on_measure(monkeypatch)
    assert main(command) == 0
    again = last_json(capsys)
    assert again["points"] == summary["points"]
    # what was left out is no result, and is asked for again
    assert asked == ["ngram, lenience, chain:3, batch 2"]
    assert again["left_out"] == summary["left_out"]
    # other settings are other points
    asked.clear()
    assert main([*command, "--max-tokens", "9"]) == 0
    assert len(asked) == 4


def test_a_draft_trained_anew_in_the_same_folder_is_measured_anew(
    tiny_llama: Path,
    random_draft: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = random_draft(tiny_llama, tmp_path / "draft", seed=1)
    words = ["--batch-size", "4", "--draft", "ngram", "--draft", str(draft), *SMALL]
    command = ["sweep", str(tiny_llama), "--out", str(tmp_path / "sweep"), *words]
    asked = spy_on_measure(monkeypatch)
    assert main(command) == 0
    assert len(asked) == 3
    shutil.rmtree(draft)
    random_draft(tiny_llama, draft, seed=2)
    asked.clear()
    assert main(command) == 0
    assert asked == [f"{draft}, exact, chain:3, batch 4"]
    recorded = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["run"]["defaults"]
    fingerprints = recorded["draft_fingerprints"]
    assert fingerprints == {"none": None, "ngram": None, str(draft): draft_fingerprint(str(draft))}
    assert draft_fingerprint(f"ngram+{draft}") == fingerprints[str(draft)]


def test_other_tasks_of_the_same_name_are_measured_anew(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["sweep", str(tiny_llama), "--out", str(tmp_path / "s"), "--batch-size", "4", *SMALL]
    asked = spy_on_measure(monkeypatch)
    assert main(command) == 0
    assert len(asked) == 2
    real = sweep_run.exact_match_tasks

    def reworded(names: list[str], count: int, encode: Any) -> list[Task]:
        return real(names, count, lambda text: encode(text.upper()))

    monkeypatch.setattr(sweep_run, "exact_match_tasks", reworded)
    assert main(command) == 0
    assert len(asked) == 4


@pytest.mark.parametrize("draft", ["smollm2-135n", "ngram+nowhere", "none"])
def test_a_mistyped_draft_ends_a_sweep_before_its_work(
    tiny_llama: Path,
    tmp_path: Path,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = spy_on_measure(monkeypatch)
    out = tmp_path / "sweep"
    assert main(["sweep", str(tiny_llama), "--out", str(out), "--draft", draft, *SMALL]) in (1, 2)
    message = capsys.readouterr().err.strip().splitlines()
    assert len(message) == 1
    assert f"({draft.removeprefix('ngram+')})" in message[0]
    assert asked == []
    assert not out.exists()


@pytest.mark.parametrize(
    ("failing", "error"),
    [("ngram", SpecdecError("task 3: no")), ("none", RuleMismatchError("plain: no"))],
    ids=["another error", "plain decoding"],
)
def test_only_a_mismatch_leaves_a_point_out_and_never_plain_decoding(
    tiny_llama: Path,
    tmp_path: Path,
    failing: str,
    error: SpecdecError,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = sweep_run.measure

    def fails(bench: Any, point: SweepPoint) -> dict[str, Any]:
        if point.draft == failing:
            raise error
        return real(bench, point)

    monkeypatch.setattr(sweep_run, "measure", fails)
    out = tmp_path / "sweep"
    assert main(["sweep", str(tiny_llama), "--out", str(out), "--batch-size", "4", *SMALL]) == 1
    assert str(error) in capsys.readouterr().err
    assert not (out / "sweep.json").exists()
    # what had been measured is kept, the failure is not
    assert len(list((out / "points").glob("*.json"))) == (failing != "none")


def test_a_sweep_goes_on_where_it_stopped(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    command = ["sweep", str(tiny_llama), "--out", str(out), "--batch-size", "4", *SMALL]
    real, seen = sweep_run.measure, []

    def killed(bench: Any, point: SweepPoint) -> dict[str, Any]:
        seen.append(point.label)
        if point.draft != PLAIN and len(seen) == 2:
            raise KeyboardInterrupt
        return real(bench, point)

    monkeypatch.setattr(sweep_run, "measure", killed)
    assert main(command) == 130
    assert main(command) == 0
    assert seen == [
        "none, exact, -, batch 4",
        "ngram, exact, chain:3, batch 4",
        "ngram, exact, chain:3, batch 4",
    ]
    assert len(last_json(capsys)["points"]) == 2
