"""What generate and bench refuse before they decode, and how a chat ends when its context is full."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from specdec.cli.main import main


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["generate", "TARGET", "--prompt", "a", "--limit", "2"], 2, "--limit (2) needs --prompts"),
        (["generate", "TARGET", "--limit", "2"], 2, "--limit (2) needs --prompts"),
        (["generate", "TARGET", "--prompt", "a", "--lossy"], 2, "--lossy needs --rule"),
        (["generate", "TARGET", "--prompt", "a \ud83d"], 1, "--prompt: not valid Unicode"),
        (["generate", "TARGET", "--prompt", "a", "--stop", "b", "--stop", "\udcff"], 1, "--stop: not valid"),
        (["bench", "TARGET", "--draft", "ngram", "--lossy"], 2, "--lossy needs --rule"),
        (["bench", "TARGET", "--shape", "chain:2"], 2, "--shape needs --draft"),
        (["bench", "TARGET", "--rule", "block"], 2, "--rule needs --draft"),
        (["bench", "TARGET", "--verify-cost", "--out", "x.json"], 2, "--out and --verify-cost exclude"),
        (["bench", "TARGET", "--verify-cost", "--draft", "ngram"], 2, "--draft and --verify-cost exclude"),
        (["bench", "TARGET", "--verify-cost", "--device", "cuda"], 2, "--device and --verify-cost exclude"),
        (
            ["generate", "TARGET", "--prompt", "a", "--draft", "ngram+ngram"],
            1,
            "must add a draft head to ngram",
        ),
        (["generate", "TARGET", "--prompt", "a", "--draft", "ngram+"], 1, "must add a draft head to ngram"),
        (["generate", "TARGET", "--prompt", "a", "--draft", ""], 1, '--draft ("") is empty; give ngram'),
        (["generate", "TARGET", "--prompt", "a", "--draft", "ngrm"], 1, "--draft (ngrm) is no draft; give"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused_in_one_line(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(tiny_llama) if word == "TARGET" else word for word in words]) == code
    assert message in one_error(capsys)


@pytest.mark.parametrize("command", [["generate", "--prompts"], ["bench", "--data"]])
def test_a_prompt_longer_than_the_context_is_named_before_any_is_decoded(
    tiny_llama: Path, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.txt"
    path.write_text("in the\n" * 3 + "x" * 700 + "\n")
    assert main([command[0], str(tiny_llama), command[1], str(path), "--batch-size", "1"]) == 1
    error = one_error(capsys)
    # BOS, user and assistant marks, end of turn: four tokens around 700 bytes
    assert f"{command[1]} ({path}): prompt 4 (704 tokens) must be shorter" in error
    assert "512" in error


def talk(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_a_chat_that_fills_the_context_says_so_and_ends_with_its_result(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, b"in the\n" + b"x" * 600 + b"\nnever asked\n")
    assert main(["generate", str(tiny_llama), "--max-tokens", "3"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.strip().splitlines()[-1])
    assert result["answers"] == 1
    assert 1 <= result["completion_tokens"] <= 3
    ends = [line for line in captured.err.splitlines() if line.startswith("the chat ends: ")]
    assert len(ends) == 1
    assert "512" in ends[0]


@pytest.mark.parametrize("content", [b"in \xff the\n"])
def test_a_chat_message_that_is_no_text_is_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, content)
    assert main(["generate", str(tiny_llama)]) == 1
    assert "error: chat message 1: not valid Unicode" in capsys.readouterr().err.splitlines()[-1]
