"""`specdec sweep`: every point measured once, costs by the stated formulas, dominated points marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.cli.sweep_cost import DraftCost, draft_cost, flops_per_token, row_flops, target_weights
from specdec.cli.sweep_points import AXES, PLAIN, SweepPoint, check_lossy, grid, mark_dominated, parse_rule
from specdec.config import ModelConfig
from specdec.errors import SpecdecError, UsageError

SMALL = ["--tasks", "easy", "--task-limit", "4", "--max-tokens", "8"]
RULES = ["--rule", "exact", "--rule", "thresholds:threshold_acc=0.5", "--rule", "lenience", "--lossy"]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


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

    def not_again(*args: Any) -> dict[str, Any]:
        raise AssertionError("a kept point is not measured again")

    monkeypatch.setattr("specdec.cli.sweep_run.measure", not_again)
    assert main(command) == 0
    assert last_json(capsys)["points"] == summary["points"]
    # other settings are other points
    with pytest.raises(AssertionError):
        main([*command, "--max-tokens", "9"])


def test_a_sweep_goes_on_where_it_stopped(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specdec.cli import sweep_run

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


def test_flops_follow_the_formula(tiny_llama: Path) -> None:
    """Counted by hand for the tiny Llama: 4 layers, hidden 64, 4 heads over 2 KV heads of 24, MLP 96."""
    config = ModelConfig.from_folder(tiny_llama)
    layer = 64 * 96 + 2 * 64 * 48 + 96 * 64 + 3 * 64 * 96
    assert target_weights(config) == 4 * layer + config.vocab_size * 64
    width = 4 * 4 * 24
    found = flops_per_token(config, DraftCost(), verify_steps=10, drafted=30, committed=20, context=50.0)
    assert found is not None
    assert found[0] == pytest.approx(2 * (2 * target_weights(config) + 4 * width * 50.0))
    assert found[1] == 0.0
    assert row_flops(0, width, 50.0) == 4 * width * 50.0
    assert flops_per_token(config, DraftCost(), verify_steps=0, drafted=0, committed=0, context=1.0) is None


def test_the_shipped_draft_costs_what_its_record_says() -> None:
    cost = draft_cost("smollm2-135m")
    assert draft_cost("ngram+smollm2-135m") == cost
    assert cost.training_target_tokens == 461659
    assert cost.training_tap_bytes == 461659 * 3 * 576 * 2
    assert cost.weights > 16384 * 576
    assert cost.memory_bytes(10) == cost.weight_bytes + 10 * (4 * 2 * 3 * 64 + 4 * 3 * 576)
    assert draft_cost("ngram") == DraftCost()
    with pytest.raises(SpecdecError, match="nowhere"):
        draft_cost("nowhere")


def point(label: str, batch: int = 1, **values: float | None) -> dict[str, Any]:
    return {"label": label, "batch_size": batch, **dict.fromkeys(AXES, 1.0), **values}


def test_dominated_points_are_marked() -> None:
    """Better on one axis and no worse on the others; more acceptance is better; batches do not mix."""
    points = [
        point("a", acceptance_length=2.0),
        point("b", acceptance_length=1.5),
        point("c", acceptance_length=2.5, total_variation=1.2),
        point("d", batch=8, acceptance_length=1.0),
        point("e", acceptance_length=1.0, total_variation=None),
        point("a again", acceptance_length=2.0),
    ]
    assert mark_dominated(points) == [[], ["a", "a again"], [], [], [], []]


def test_the_grid_begins_with_plain_decoding() -> None:
    points = grid(["x", "y"], ["exact"], ["chain:2", "chain:3"], [1, 4])
    assert [point.label for point in points[:2]] == ["none, exact, -, batch 1", "none, exact, -, batch 4"]
    assert len(points) == 2 + 8
    assert len({point.key({"seed": 0}) for point in points}) == 10
    assert points[3].key({"seed": 0}) != points[3].key({"seed": 1})
    with pytest.raises(UsageError, match="--rule"):
        grid(["x"], ["exact", "exact"], ["chain:2"], [1])


def test_rules_are_spelled_with_their_knobs() -> None:
    bound = parse_rule("typical:epsilon=0.2,fallback=target")
    assert bound is not None
    assert "epsilon=0.2" in bound.label
    assert "fallback=target" in bound.label
    assert parse_rule("exact") is None
    with pytest.raises(SpecdecError, match="no knob"):
        parse_rule("block:x=1")
    with pytest.raises(SpecdecError):
        parse_rule("lenience:lenience=7")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rule", "lenience"], "--lossy"),
        (["--rule", "block", "--lossy", "--exact"], "--exact"),
        (["--rule", "block", "--shape", "bush"], "--shape"),
        (["--rule", "lenience", "--lossy", "--temperature", "0"], "--temperature"),
    ],
)
def test_lossy_never_by_accident(
    tiny_llama: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(tiny_llama), "--out", str(tmp_path / "s"), *words]) == 2
    assert message in capsys.readouterr().err
    check_lossy(["block", "exact"], lossy=False, exact=True)
