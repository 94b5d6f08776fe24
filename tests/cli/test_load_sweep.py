"""The load sweep: what it writes, what it leaves out, how it goes on; its arithmetic on made-up turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.load_sweeping import run as load_sweep_run
from specdec.cli.load_sweeping.figures import is_slower, point_figures, ratio
from specdec.cli.load_sweeping.run import requests_of
from specdec.cli.main import main


def turn(tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    values = {"cpu_seconds": 2 * seconds, "requests": 2, "verify_steps": tokens - 2, "drafted": 0}
    return {"tokens": tokens, "seconds": seconds, "accepted": 0, "probes": 0, "text_hashes": {"a": "x"}} | (
        values | more
    )


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{index}", "prompt": f"say {index} the in an the in an"} for index in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def words(tiny_llama: Path, prompts: Path, tmp_path: Path) -> list[str]:
    words = ["load-sweep", str(tiny_llama), "--draft", "ngram", "--data", str(prompts), "--max-tokens", "8"]
    return [*words, "--fixed", "chain:1,chain:2", "--out", str(tmp_path / "sweep")]


def test_a_sweep_writes_its_points_and_goes_on_where_it_stopped(
    words: list[str],
    tmp_path: Path,
    valid_record: Callable[[dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*words, "--concurrency", "1,3", "--turns", "1"]) == 0
    out = tmp_path / "sweep"
    record = json.loads((out / "load_sweep.json").read_text())
    valid_record(record)
    assert [point["clients"] for point in record["points"]] == [1, 3]
    for point in record["points"]:
        adaptive = point["settings"]["adaptive"]
        assert adaptive["identical"] == adaptive["compared"] == requests_of(point["clients"])
        assert point["best_fixed"] in ("off", "chain:1", "chain:2")
    assert (out / "load_sweep.png").stat().st_size > 1000
    assert json.loads((out / "run.json").read_text())["schema"] == "specdec.run/1"
    before = (out / "turns.jsonl").read_text()
    monkeypatch.setattr(load_sweep_run, "run_side_by_side", lambda loops: pytest.fail("measured again"))
    capsys.readouterr()
    assert main([*words, "--concurrency", "1,3", "--turns", "1"]) == 0
    assert (out / "turns.jsonl").read_text() == before
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["schema"] == "specdec.load_sweep/1"


def test_another_sweeps_folder_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "turns.jsonl").write_text('{"draft": "other"}\n')
    assert main([*words, "--concurrency", "1", "--turns", "1"]) == 1
    assert "holds" in capsys.readouterr().err


def test_wrong_shapes_and_counts_are_usage_errors(words: list[str]) -> None:
    assert main([*words, "--concurrency", "0"]) == 2
    assert main([*words, "--shape", "bush:3"]) == 2
    assert main([*words, "--fixed", "chain:1,chain:1"]) == 2


def test_ratios_pair_turns_and_the_best_fixed_one_may_be_none_at_all() -> None:
    off = {0: turn(100, 2.0), 1: turn(100, 4.0)}
    slow, fast = {0: turn(100, 2.5)}, {0: turn(100, 1.6), 1: turn(100, 3.2)}
    figures = point_figures({"off": off, "adaptive": fast, "chain:1": slow})
    assert figures["best_fixed"] == "off"
    assert figures["adaptive_over_off"]["value"] == pytest.approx(1.25)
    assert figures["settings"]["chain:1"]["over_off"] == {
        "value": pytest.approx(0.8),
        "interval": None,
        "turns": 1,
    }
    assert ratio(slow, {1: turn(100, 1.0)}) is None, "no turn in common"
    assert is_slower(slow, [off], 0.85)
    assert not is_slower(slow, [off], 0.8)


def test_answers_that_differ_are_counted() -> None:
    figures = point_figures(
        {"off": {0: turn(9, 1.0)}, "adaptive": {0: turn(9, 1.0, text_hashes={"a": "y"})}, "chain:1": {}}
    )
    assert (
        figures["settings"]["adaptive"]["identical"],
        figures["settings"]["adaptive"]["compared"],
    ) == (0, 1)
    assert "chain:1" not in figures["settings"]
