"""A command that is silent for long says that it is starting, once, and only then."""

from __future__ import annotations

import sys

import pytest

from specdec.cli import main as program
from specdec.cli.console import Bar, emit_json, print_table, say
from specdec.cli.first_words import FirstWords, first_words


def test_a_silent_start_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = FirstWords(patience_s=0.0)
    words.watch("specdec bench").join()
    assert capsys.readouterr().err == "specdec bench is starting: what it needs is being read\n"


def test_a_command_that_spoke_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = FirstWords(patience_s=60.0)
    thread = words.watch("specdec bench")
    words.said()
    thread.join(timeout=30.0)
    assert not thread.is_alive()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "speak",
    [
        lambda: say("word"),
        lambda: Bar("prompts", 3),
        lambda: print_table("title", ["a"], [[1]]),
        lambda: emit_json({}),
        lambda: program.main(["bench"]),
    ],
    ids=["remark", "bar", "table", "json", "error"],
)
def test_whatever_is_said_counts(speak: object, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(first_words, "said", lambda: said.append(True))
    assert callable(speak)
    speak()
    assert said


@pytest.mark.parametrize(
    ("words", "watched"),
    [
        (["rules"], ["specdec rules"]),
        (["rules", "--help"], []),
        (["--version"], []),
        ([], []),
    ],
)
def test_only_a_command_that_runs_is_watched(
    words: list[str], watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(first_words, "watch", seen.append)
    monkeypatch.setattr(sys, "argv", ["specdec", *words])
    assert program.main() == 0
    assert seen == watched
    assert program.main(words) == 0
    assert seen == watched, "a program that calls main() has its own way of waiting"


def test_a_process_that_does_not_speak_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the line once for each process of torchrun."""
    seen: list[str] = []
    monkeypatch.setattr(first_words, "watch", seen.append)
    monkeypatch.setattr(sys, "argv", ["specdec", "rules"])
    monkeypatch.setenv("RANK", "1")
    assert program.main() == 0
    assert not seen
