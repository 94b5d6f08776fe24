"""Every command line and program of CONTRIBUTING.md's how-tos, read from the document and run as it stands.

Only what a tiny model on a processor cannot follow is changed, in `adapted`: no card, and small numbers.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## How-tos\n")[1].split("\n## ")[0]
# numbers that a tiny model can follow, appended to the words of the document; the last of two counts
SMALL: dict[str, list[str]] = {
    "select-layers": ["--tokens", "300", "--resamples", "5"],
    "regenerate": ["--total-tokens", "600", "--max-tokens", "24"],
    "train": ["--steps", "2", "--draft-vocab-size", "96", "--eval-sequences", "2"],
    "bench": ["--limit", "2", "--max-tokens", "8"],
    "study": [
        *("--k", "3", "--seeds", "1", "--random-sets", "0", "--train-tokens", "40", "--held-out", "2"),
        *("--served", "1", "--served-tokens", "4", "--draft-vocab-size", "64", "--probe-tokens", "0"),
    ],
    "audit": [
        *("--limit", "2", "--max-tokens", "8", "--tasks", "easy", "--task-limit", "2", "--task-tokens", "4"),
        *("--draws", "200", "--engine-draws", "0"),
    ],
}


def sections() -> dict[str, list[str]]:
    """Code blocks of each how-to, in order."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^### ", DOCUMENT, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        found[title] = re.findall(r"^```(?:python)?\n(.*?)^```", body, flags=re.MULTILINE | re.DOTALL)
    return found


def commands(block: str) -> list[list[str]]:
    """The command lines of a block."""
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.startswith("specdec ")]


def adapted(words: list[str]) -> list[str]:
    """A line as a machine without a card runs it, with small numbers."""
    kept = list(words)
    for option in ("--device", "--dtype"):
        if option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return [*kept, *SMALL.get(kept[0], [])]


@pytest.fixture
def workplace(
    tmp_path: Path, tiny_model_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with the reader's model in it."""
    # prompts of real sets are long in a vocabulary of bytes
    model = tiny_model_factory("llama", max_position_embeddings=8192)
    (tmp_path / "my-model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_document_has_five_how_tos_that_hold_commands() -> None:
    found = sections()
    assert list(found) == [
        "Your own model on a GPU node",
        "Export to vLLM",
        "Choose layers",
        "Read an acceptance report",
        "Write a new drafter or verification rule",
    ]
    for blocks in found.values():
        lines = [line for block in blocks for line in block.splitlines() if line.strip()]
        assert any(line.startswith("specdec ") for line in lines)
        assert all("class RepeatDrafter" in block or commands(block) for block in blocks)


def test_every_command_line_does_what_it_says(
    workplace: Path, random_draft: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One reader, from the first how-to to the last, in one folder."""
    for blocks in sections().values():
        for words in [words for block in blocks for words in commands(block)]:
            if words[1:3] == ["report", "--diff"]:
                # what was measured the week before
                Path("baseline.json").write_text(Path("bench.json").read_text())
            capsys.readouterr()
            code = main(adapted(words[1:]))
            out, err = capsys.readouterr()
            assert code == 0, f"{shlex.join(words)}: {err}"
            summary: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
            assert isinstance(summary, dict)
            if "--out" in words:
                assert Path(words[words.index("--out") + 1]).exists(), shlex.join(words)
    for name in ("report.html", "layers.html", "diff.html"):
        assert "<h1>" in Path(name).read_text()
    assert Path("report.md").exists()
    assert Path("watch.xml").exists()


def test_the_drafter_of_the_document_works(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [program] = [
        block for block in sections()["Write a new drafter or verification rule"] if "RepeatDrafter" in block
    ]
    exec(compile(program, "CONTRIBUTING.md", "exec"), {"__name__": "__main__"})
    assert float(capsys.readouterr().out.strip()) >= 1.0
