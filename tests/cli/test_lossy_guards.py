"""Nothing lossy, and nothing empty, by accident: refused before a target is read, exit 2."""

from __future__ import annotations

import pytest

from specdec.cli.main import main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "t", "--prompt", "a", "--rule", "typical", "--exact", "--lossy"], "--exact promises"),
        (["generate", "t", "--prompt", "a", "--rule", "typical", "--lossy", "--exact"], "--exact promises"),
        (["bench", "t", "--draft", "ngram", "--rule", "typical", "--exact", "--lossy"], "--exact promises"),
        (["audit", "t", "--lossy", "typical", "--exact"], "--exact promises"),
        (["audit", "t", "--levels", ""], "--levels ('') must name"),
        (["audit", "t", "--rule", " "], "--rule (' ') must name"),
        (["audit", "t", "--lossy", ""], "--lossy ('') must name"),
    ],
)
def test_contradictions_and_empty_names_are_wrong_usage(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["audit", "sweep"])
def test_no_tasks_are_wrong_usage(
    command: str, tiny_llama: object, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an audit that passes with nothing checked."""
    words = [command, str(tiny_llama), "--tasks", "", "--out", f"{tmp_path}/out"]
    words += ["--levels", "C5"] if command == "audit" else ["--draft", "ngram"]
    assert main(words) == 2
    assert "--tasks () must be some of easy, gsm8k" in capsys.readouterr().err
