"""No command writes over what it reads, over somebody else's file, or into something that is no file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

from specdec.cli.main import main
from specdec.cli.outputs import require_not_input, require_writable
from specdec.errors import UsageError
from specdec.provenance import RUN_SCHEMA


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "in the"}\n{"id": "b", "prompt": "the in"}\n')
    return path


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of an error; nothing else may have been said."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    "content",
    [
        '{"theme": "dark"}',
        '{"id": "mine"}',
        '{"id": "mine", "response_token_ids": [1]}',
        "a",
        '{"theme": "dark"}\n{"a": 1}',
    ],
)
def test_regenerate_leaves_a_foreign_file_without_a_last_line_end_as_it_was(
    tiny_llama: Path, prompts: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "settings.json"
    out.write_text(content)
    assert main(["regenerate", str(prompts), "--target", str(tiny_llama), "--out", str(out)]) == 1
    assert "choose another file" in one_error(capsys)
    assert out.read_text() == content
    assert not out.with_suffix(".run.json").exists()


def test_regenerate_goes_on_after_a_first_answer_cut_short(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    command = [
        "regenerate",
        str(prompts),
        "--target",
        str(tiny_llama),
        "--out",
        str(out),
        "--max-tokens",
        "3",
    ]
    assert main(command) == 0
    whole = out.read_text()
    out.write_text(whole[:30])
    assert main(command) == 0
    assert out.read_text() == whole


def test_regenerate_does_not_mix_answers_of_two_precisions(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["regenerate", str(prompts), "--target", str(tiny_llama), "--out", str(out)]
    assert main([*command, "--max-tokens", "3", "--dtype", "bfloat16"]) == 0
    assert json.loads(out.with_suffix(".run.json").read_text())["dtype"] == "bfloat16"
    written = out.read_text()
    capsys.readouterr()
    assert main([*command, "--max-tokens", "3"]) == 1
    assert "dtype 'bfloat16', not 'float32'" in one_error(capsys)
    assert out.read_text() == written


def test_a_claimed_name_does_not_give_away_a_file_that_is_no_answer(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "settings.json"
    out.write_text('{"theme": "dark"}')
    out.with_suffix(".run.json").write_text(json.dumps({"schema": RUN_SCHEMA, "extra": {}}))
    assert main(["regenerate", str(prompts), "--target", str(tiny_llama), "--out", str(out)]) == 1
    assert out.read_text() == '{"theme": "dark"}'


@pytest.mark.parametrize("link", ["same", "symbolic", "hard"])
@pytest.mark.parametrize("command", ["regenerate", "generate", "bench", "select-layers", "picture"])
def test_no_command_writes_over_its_input(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    command: str,
    link: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # a picture's name ends in .png, which no input's does: only a link can lead to one
    out = prompts if link == "same" else tmp_path / ("out.png" if command == "picture" else "out.jsonl")
    if link == "symbolic":
        out.symlink_to(prompts)
    elif link == "hard":
        os.link(prompts, out)
    before = prompts.read_bytes()
    words = {
        "regenerate": ["regenerate", str(prompts), "--target", str(tiny_llama)],
        "generate": ["generate", str(tiny_llama), "--prompts", str(prompts)],
        "bench": ["bench", str(tiny_llama), "--data", str(prompts)],
        "select-layers": ["select-layers", str(tiny_llama), "--data", f"mine={prompts}"],
        "picture": ["select-layers", str(tiny_llama), "--data", f"mine={prompts}"],
    }[command]
    option = "--picture" if command == "picture" else "--out"
    if command == "picture":
        words += ["--out", str(tmp_path / "selection.json")]
    assert main([*words, option, str(out)]) == 2
    why = "must end in .png" if (command, link) == ("picture", "same") else "is the file that"
    assert f"{option} ({out}) {why}" in one_error(capsys)
    assert prompts.read_bytes() == before


def test_generate_does_not_write_over_its_grammar(tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    grammar = tmp_path / "g.ebnf"
    grammar.write_text('root ::= "in"')
    command = ["generate", str(tiny_llama), "--prompts", str(prompts), "--ebnf", str(grammar)]
    assert main([*command, "--out", str(grammar)]) == 2
    assert grammar.read_text() == 'root ::= "in"'


@pytest.mark.parametrize("command", ["generate", "regenerate", "select-layers"])
@pytest.mark.parametrize("content", ['{"mine": 1}', "not json", "[]"])
def test_a_run_record_never_replaces_another_file(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    command: str,
    content: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, record = tmp_path / "keep.jsonl", tmp_path / "keep.run.json"
    record.write_text(content)
    words = {
        "regenerate": ["regenerate", str(prompts), "--target", str(tiny_llama)],
        "generate": ["generate", str(tiny_llama), "--prompts", str(prompts)],
        "select-layers": ["select-layers", str(tiny_llama), "--data", str(prompts)],
    }[command]
    assert main([*words, "--out", str(out)]) == 2
    assert "keep.run.json, which is no run record of specdec" in one_error(capsys)
    assert record.read_text() == content
    assert not out.exists()


def test_generate_replaces_its_own_answers_and_record(
    tiny_llama: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "keep.jsonl"
    command = ["generate", str(tiny_llama), "--prompts", str(prompts), "--max-tokens", "2", "--out", str(out)]
    assert main(command) == 0
    assert main([*command, "--limit", "1"]) == 0
    assert len(out.read_text().splitlines()) == 1
    assert json.loads((tmp_path / "keep.run.json").read_text())["extra"]["answers"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "keep.jsonl", "keep.run.json"}


def test_a_second_run_on_the_same_answers_is_refused(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    command = [
        "regenerate",
        str(prompts),
        "--target",
        str(tiny_llama),
        "--out",
        str(out),
        "--max-tokens",
        "2",
    ]
    with FileLock(tmp_path / ".answers.jsonl.lock"):
        assert main(command) == 1
        assert "is being written by another run" in one_error(capsys)
        assert not out.exists()
    assert main(command) == 0


def test_only_regular_files_are_written(tmp_path: Path) -> None:
    pipe, file, link, loose = (tmp_path / name for name in ("pipe", "file", "link", "loose"))
    os.mkfifo(pipe)
    file.write_text("x")
    link.symlink_to(file)
    loose.symlink_to(tmp_path / "nothing")
    for path in (file, link, loose, tmp_path / "new"):
        require_writable("--out", path)
    with file.open("a") as handle:
        streams = [Path(f"/dev/fd/{handle.fileno()}"), Path(f"/proc/self/fd/{handle.fileno()}")]
        for path in (pipe, Path("/dev/null"), Path("/dev/stdout"), *streams):
            with pytest.raises(UsageError, match=r"--out .* is a device, a pipe or a stream"):
                require_writable("--out", path)


def test_files_that_do_not_exist_are_compared_by_where_they_would_be(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    inputs = {"--data": tmp_path / "x.jsonl", "--ebnf": None}
    require_not_input("--out", tmp_path / "a" / "x.jsonl", inputs)
    with pytest.raises(UsageError, match=r"--data"):
        require_not_input("--out", tmp_path / "a" / ".." / "x.jsonl", inputs)
