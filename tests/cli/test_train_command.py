"""`specdec train` at the command line: refusals by flag, one run to a folder, stopping, full disks."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError

import specdec.drafts.checkpoint as drafts
from specdec.cli.main import main
from specdec.hf import load_hf_model
from specdec.provenance import folder_fingerprint
from specdec.train.checkpoint import latest_state
from specdec.train.run import LOCK_NAME
from specdec.train.trainer import Trainer


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers of the tiny target to random prompts."""
    model = load_hf_model(tiny_llama)
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("answers") / "responses.jsonl"
    lines = []
    for number in range(6):
        prompt = torch.randint(0, 200, (1, 6), generator=generator)
        text = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[0].tolist()
        record = {"id": f"p{number}", "prompt_token_ids": text[:6], "response_token_ids": text[6:]}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture
def words(tiny_llama: Path, answers: Path, tmp_path: Path) -> list[str]:
    """A command line that trains six steps."""
    named = ["--layers", "1,3,4", "--data", str(answers), "--out", str(tmp_path / "draft")]
    small = ["--steps", "6", "--save-every", "2", "--batch-tokens", "20", "--draft-vocab-size", "64"]
    quick = ["--init", "random", "--dtype", "float32", "--eval-sequences", "0", "--unroll", "2"]
    return ["train", str(tiny_llama), *named, *small, *quick]


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the failure, after the lines of progress."""
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[-1].removeprefix("error: ")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--dtype", "int8", "--dtype ('int8') must be one of auto, float32, bfloat16"),
        ("--lr", "-1", "--lr (-1.0) must be above 0.0"),
        ("--batch-tokens", "0", "--batch-tokens (0) must be a whole number"),
        ("--kv-heads", "0", "--kv-heads (0) must be"),
        ("--loss", "mse", "--loss ('mse') must be one of"),
        (
            "--init",
            "ridge --no-fc-norm",
            "--init (ridge) needs --fc-norm and --self-attending; use --init random",
        ),
    ],
)
def test_a_value_out_of_range_is_wrong_usage_of_its_flag(
    option: str, value: str, message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, option, *value.split()]) == 2
    assert _error(capsys).startswith(message)


def test_resuming_with_another_option_names_its_flag_before_a_target_is_read(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(words) == 0
    monkeypatch.setattr("specdec.train.run.prepare", lambda *_, **__: pytest.fail("the target was read"))
    for more in ([], ["--dry-run"]):
        assert main([*words, "--lr", "1e-3", *more]) == 1
        assert _error(capsys).startswith("--lr (0.001) differs from the run being resumed")


def test_a_finished_run_stays_as_recorded(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    before = (tmp_path / "draft" / "run.json").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "draft" / "run.json").read_bytes() == before
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again == first
    assert again["loss"] > 0
    assert again["rows_per_second"] > 0


def test_a_stopped_run_says_so_and_ends_143(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer._step

    def stopping(self: Trainer, *args: Any) -> Any:
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    monkeypatch.setattr(Trainer, "_step", stopping)
    assert main(words) == 143
    assert "stopped by a signal at step 3 of 6; the same command goes on" in _error(capsys)
    assert latest_state(tmp_path / "draft") == tmp_path / "draft" / "checkpoints" / "step-00000003.pt"
    monkeypatch.setattr(Trainer, "_step", step)
    assert main(words) == 0
    assert json.loads((tmp_path / "draft" / "run.json").read_text())["extra"]["complete"]


def test_a_second_run_on_one_folder_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    with FileLock(folder / LOCK_NAME):
        assert main(words) == 1
        assert "draft) is being written by another run" in _error(capsys)
        assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
    assert main(words) == 0
    assert not (folder / LOCK_NAME).exists()


def test_a_refused_run_leaves_no_folder(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--layers", "1,9"]) == 1
    assert "--layers (9) must be in 0..4" in _error(capsys)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(("known", "code"), [(None, 0), ("own", 0), ("f" * 64, 1)])
def test_answers_of_another_target_are_refused(
    known: str | None,
    code: int,
    words: list[str],
    answers: Path,
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "copied.jsonl"
    data.write_bytes(answers.read_bytes())
    if known is not None:
        written_by = folder_fingerprint(tiny_llama) if known == "own" else known
        record = {"extra": {"target_fingerprint": written_by}}
        data.with_suffix(".run.json").write_text(json.dumps(record))
    assert main([*words, "--data", str(data), "--steps", "1"]) == code
    if code:
        assert "copied.jsonl) was written by another target (fingerprint ffffffffffff, not " in _error(capsys)


def _limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize(
    ("options", "what"),
    [([], "checkpoint ("), (["--states-cache", "CACHE"], "--states-cache (")],
    ids=["checkpoint", "states"],
)
def test_a_full_disk_is_one_line(options: list[str], what: str, words: list[str], tmp_path: Path) -> None:
    """A limit on file size fails as a full disk or a quota does: in the middle of a write."""
    size = 40_000 if not options else 4_000
    named = [str(tmp_path / "cache") if word == "CACHE" else word for word in options]
    done = subprocess.run(
        [sys.executable, "-m", "specdec.cli.main", *words, *named],
        preexec_fn=_limited(size),
        env=os.environ | {"SPECDEC_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {what}")
    assert last.endswith("cannot be written: File too large")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch.save

    def full(state: Any, file: Any) -> None:
        if state["step"] == 4:
            with open("/dev/full", "wb", buffering=0) as disk:
                file.file = disk
                save(state, file)
        save(state, file)

    monkeypatch.setattr(torch, "save", full)
    assert main(words) == 1
    assert _error(capsys).endswith("step-00000004.pt) cannot be written: No space left on device")
    names = [path.name for path in (tmp_path / "draft" / "checkpoints").iterdir()]
    assert names == ["step-00000002.pt"]


def test_a_draft_that_cannot_be_written_is_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(drafts, "save_file", full)
    assert main(words) == 1
    message = _error(capsys)
    assert message.startswith(f"draft folder ({tmp_path / 'draft'}) cannot be written: ")
    assert "No space left on device" in message
    assert latest_state(tmp_path / "draft") is not None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "x", "--temperature", "-1"], "--temperature (-1.0) must be a number in [0.0, 100.0]"),
        (["generate", "x", "--seed", "-5"], "--seed (-5) must be an integer in 0.."),
        (
            ["generate", "x", "--min-tokens", "9", "--max-tokens", "5"],
            "--min-tokens (9) must be at most --max-",
        ),
        (["generate", "x", "--bad-word", ""], "--bad-word (''"),
        (["generate", "x", "--shape", "tree:4x2:3"], "--shape (tree:4x2:3): max_nodes (3) must be at least"),
        (["select-layers", "x", "--num-layers", "0"], "--num-layers (0) must be at least 1"),
        (["select-layers", "x", "--lambda", "-1"], "--lambda (-1.0) must be a finite number"),
        (["select-layers", "x", "--tokens", "1"], "--tokens (1) must be at least 4"),
        (["select-layers", "x", "--estimator", "luck"], "--estimator (luck) must be one of"),
    ],
)
def test_other_commands_name_their_flags_too(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    error = _error(capsys)
    assert error.startswith(message)
    assert "--max-depth" not in error
