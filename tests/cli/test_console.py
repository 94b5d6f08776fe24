"""stdout carries the result and nothing else; failures are one line and an exit code."""

import json
import os
from collections.abc import Callable

import pytest
import typer

import specdec.cli.main as program
from specdec.cli import console
from specdec.errors import SpecdecError, StoppedError, UsageError


def test_the_json_line_is_compact_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    console.emit_json({"tau": 1.5, "name": "é", "none": None})
    out = capsys.readouterr().out
    assert out == '{"tau":1.5,"name":"é","none":null}\n'


def test_nan_never_reaches_the_json_line() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.emit_json({"acceptance_rate": float("nan")})


def test_a_table_keeps_brackets_and_shows_missing_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches rich reading [2, 15] as markup and dropping it."""
    console.print_table(
        "taps [batch 1]", ["name", "tau", "same"], [["[2, 15]", None, True], ["x", 1.25, False]]
    )
    out = capsys.readouterr().out
    assert "[2, 15]" in out
    assert "taps [batch 1]" in out
    assert "1.250" in out
    assert " - " in out


def test_a_wide_table_is_not_wrapped_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table("wide", ["a", "b"], [["x" * 70, "y" * 70]])
    assert any("x" * 70 in line and "y" * 70 in line for line in capsys.readouterr().out.splitlines())


def test_progress_in_a_log_goes_to_stderr_and_is_sparse(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a log of ten thousand progress lines, and progress that spoils stdout."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with console.progress("train", total=100) as bar:
        for _ in range(100):
            now[0] += 0.1
            bar.advance(note="loss 2.5")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) <= 3
    assert lines[-1] == "train: 100/100, 10 s done"


def _failing(error: BaseException) -> Callable[..., int]:
    def run(**_: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (
            SpecdecError("k (0) must be at least 1;\nset --k 4"),
            1,
            "error: k (0) must be at least 1; set --k 4\n",
        ),
        (UsageError("--k (0) must be at least 1"), 2, "error: --k (0) must be at least 1\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (StoppedError("stopped at step 3"), 143, "error: stopped at step 3\n"),
        (PermissionError(13, "Permission denied", "/out"), 1, "error: /out: Permission denied\n"),
        (
            OSError(28, "No space left on device"),
            1,
            "error: a file could not be read or written: No space left on device\n",
        ),
    ],
)
def test_a_failure_is_one_line_and_a_code(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SPECDEC_DEBUG", raising=False)
    monkeypatch.setattr(program, "app", _failing(error))
    assert program.main(["pull", "x"]) == code
    captured = capsys.readouterr()
    assert captured.err == text
    assert captured.out == ""


def test_an_interrupt_says_so_whatever_typer_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 0.29 of typer returns 130 in silence; versions before raise Abort."""
    monkeypatch.setattr(program, "app", lambda **_: 130)
    assert program.main(["pull", "x"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    monkeypatch.setattr(program, "app", _failing(typer.Abort()))
    assert program.main(["pull", "x"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_who_interrupts_a_long_command_reads_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> int:
        with console.resumable("checkpoints are in out"):
            raise KeyboardInterrupt

    monkeypatch.setattr(program, "app", interrupted)
    assert program.main(["train", "x"]) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "interrupted; the same command goes on: checkpoints are in out",
        "error: interrupted",
    ]


def test_things_are_counted_in_words() -> None:
    assert [console.counted(number, "thread") for number in (0, 1, 2)] == [
        "0 threads",
        "1 thread",
        "2 threads",
    ]


def test_a_mistake_of_ours_is_not_dressed_up_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "app", _failing(AssertionError("blocks are owned once")))
    with pytest.raises(AssertionError):
        program.main(["pull", "x"])


def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    monkeypatch.setattr(program, "app", _failing(SpecdecError("no")))
    assert program.main([]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["pull"], "target"),
        (["pull", "x", "--source", "ftp"], "'auto', 'pypi', 'hub'"),
        (["pull", "x", "--sorce", "hub"], "--sorce"),
        (["pul"], "pul"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 0
    assert "pull" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specdec ")


def test_a_command_line_result_is_json_at_the_end(
    tiny_llama: os.PathLike[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["pull", str(tiny_llama), "--cache-dir", str(tiny_llama) + "-cache"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["model_type"] == "llama"
