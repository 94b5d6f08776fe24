"""Simulated acceptance on the command line: said loudly, refused where it could be mistaken for a result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.cli.main import main


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"say {i}"}) + "\n" for i in range(3)))
    return path


def last_json(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


def test_bench_says_that_acceptance_was_simulated_and_compares_speed_only(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    words = ["bench", str(tiny_llama), "--draft", "random", "--shape", "chain:4", "--data", str(prompts)]
    words += ["--simulate-acceptance", "3.5", "--max-tokens", "120", "--no-adaptive", "--out", str(out)]
    assert main(words) == 0
    text = capsys.readouterr().out
    summary = last_json(text)
    assert "SIMULATED" in text.splitlines()[0]
    assert summary["simulated"] is True
    assert summary["simulated_acceptance_length"] == 3.5
    assert "nothing here is lossless" in summary["simulation"]
    plain, simulated = summary["settings"]
    assert "simulated" not in plain
    assert simulated["simulated"] is True
    assert simulated["lossless"] is False
    assert "identical" not in simulated
    assert simulated["tokens"] == plain["tokens"] == 360
    assert simulated["acceptance"]["acceptance_length"] == pytest.approx(3.5, abs=0.7)
    assert json.loads(out.read_text())["run"]["defaults"]["simulate_acceptance"] == 3.5


def test_generate_says_that_acceptance_was_simulated(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(tiny_llama), "--draft", "ngram", "--prompt", "in the", "--max-tokens", "12"]
    assert main([*words, "--simulate-acceptance", "2"]) == 0
    seen = capsys.readouterr()
    summary = last_json(seen.out)
    assert summary["simulated"] is True
    assert summary["verification"] == "simulated acceptance of 2"
    assert summary["completion_tokens"] == 12
    assert "SIMULATED" in seen.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["bench", "T", "--simulate-acceptance", "2"], "needs --draft"),
        (["bench", "T", "--draft", "ngram", "--simulate-acceptance", "2", "--exact"], "--exact"),
        (["bench", "T", "--draft", "ngram", "--simulate-acceptance", "4.5"], "must be in 1..4"),
        (["bench", "T", "--verify-cost", "--simulate-acceptance", "2"], "--verify-cost"),
        (["generate", "T", "--prompt", "x", "--simulate-acceptance", "2"], "needs --draft"),
        (["generate", "T", "--draft", "ngram", "--prompt", "x", "--simulate-acceptance", "0"], "in 1..4"),
        (
            ["generate", "T", "--draft", "ngram", "--prompt", "x", "--simulate-acceptance", "2", "--exact"],
            "--exact",
        ),
    ],
)
def test_what_cannot_be_simulated_is_wrong_usage(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert error in capsys.readouterr().err
