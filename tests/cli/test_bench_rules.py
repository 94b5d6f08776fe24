"""Rules on the command lines of bench and generate: one setting a rule, a lossy one only where allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.cli.main import main


@pytest.fixture
def bench(tiny_llama: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "category": "ab"[i % 2], "prompt": f"say {i} the in an"} for i in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--data", str(prompts), "--max-tokens", "8", "--warm-up", "0", "--no-adaptive"]
    return ["bench", str(tiny_llama), "--draft", "ngram", "--temperature", "1", *sizes]


def settings(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])["settings"]


def test_bench_measures_every_rule_it_is_given(
    bench: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    rules = ["coupled", "block", "rejection"]
    assert main([*bench, *(word for rule in rules for word in ("--rule", rule)), "--out", str(out)]) == 0
    found = settings(capsys)
    assert [one["setting"] for one in found] == ["plain", *(f"ngram chain:3 {rule}" for rule in rules)]
    assert [one["rule"] for one in found] == ["coupled", *rules]
    assert all(one["lossless"] for one in found)
    # the coupled text is that of plain decoding, the others only have its law
    assert found[1]["identical"] == 3
    assert json.loads(out.read_text())["run"]["defaults"]["rules"] == rules


def test_a_lossy_bench_names_rule_and_knobs(bench: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lossy = [*bench, "--rule", "thresholds", "--knob", "threshold_acc=0.5"]
    assert main([*lossy, "--lossy"]) == 0
    found = settings(capsys)[1]
    label = "thresholds(threshold_single=1, threshold_acc=0.5)"
    assert found["setting"] == f"ngram chain:3 {label}"
    assert (found["rule"], found["lossless"]) == (label, False)
    for refused in (lossy, [*lossy, "--exact"]):
        assert main(refused) == 1
        error = capsys.readouterr().err
        assert "--lossy" in error
        assert label in error


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--rule", "nonsense"], 1, "rule nonsense is not known"),
        (["--rule", "block", "--rule", "block"], 1, "same setting twice"),
        (["--knob", "l=0.5"], 2, "--knob (l=0.5) needs one --rule"),
        (["--rule", "thresholds", "--rule", "block", "--knob", "threshold_acc=0.5"], 2, "one --rule"),
        (["--rule", "thresholds", "--knob", "threshold_acc"], 2, "must be NAME=VALUE"),
        (["--rule", "thresholds", "--knob", "threshold_acc=2", "--lossy"], 1, "threshold_acc (2.0)"),
    ],
)
def test_wrong_rules_and_knobs_are_refused_before_anything_runs(
    bench: list[str], words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*bench, *words]) == code
    assert message in capsys.readouterr().err


def test_generate_says_by_which_rule_it_verified(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", str(tiny_llama), "--draft", "ngram", "--prompt", "in the", "--max-tokens", "8"]
    command += ["--temperature", "1", "--rule", "typical"]
    assert main([*command, "--exact"]) == 1
    assert "rule (typical(" in capsys.readouterr().err
    assert main([*command, "--lossy"]) == 0
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert summary["verification"].startswith("typical(epsilon=0.09, delta=0.3, fallback=argmax")
