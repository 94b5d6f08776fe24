"""`specdec audit` through the command line, on a tiny target: exit codes, files, refusals, scorers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.cli.paper import Notes, Paper, Picture, Section, Table, cell_text, to_markdown
from specdec.cli.paper_page import to_html
from specdec.cli.tasks import CATEGORIES, exact_match_tasks, last_number, says_number, says_word
from specdec.drafter import DraftRequest
from specdec.errors import UsageError
from specdec.runner import ModelRunner, StepOutput
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree, chain_tree

SMALL = ["--limit", "3", "--max-tokens", "12", "--task-limit", "3", "--task-tokens", "6", "--tasks", "easy"]
QUICK = [*SMALL, "--draws", "200", "--engine-draws", "0", "--batch-size", "3"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "category": "x", "prompt": f"say {i} the in an the in an"} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_a_sound_target_passes_and_is_reported(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    command = ["audit", str(tiny_llama), "--data", str(prompts), "--out", str(out), *QUICK]
    assert main([*command, "--levels", "C1,C2,C3,C4,C5", "--rule", "deterministic"]) == 0
    summary = last_json(capsys)
    assert summary["passed"] is True
    assert summary["levels"] == dict.fromkeys(("C1", "C2", "C3", "C4", "C5"), True)
    assert summary["verification"] == "deterministic"
    assert summary["lossy"] is False
    record = json.loads((out / "audit.json").read_text())
    assert record["run"]["defaults"]["prompts"] == 3
    assert record["noise"]["positions"] > 0
    page, text = (out / "audit.html").read_text(), (out / "audit.md").read_text()
    assert "float32, batch 3" in page
    assert "http" not in page.split("<body>")[1], "the page needs nothing from outside"
    assert "C2: pass" in page
    assert "| C2" not in text
    assert "## C2: pass" in text


class OffByOne(ModelRunner):
    """Positions of drafted nodes one too far."""

    def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
        moved = [replace(tree) for tree in trees]
        for tree in moved:
            tree.__dict__["depths"] = [depth + (depth > 0) for depth in tree.depths]
        return super().run(plan, moved)


def test_a_failed_audit_exits_with_1_and_calls_a_bug_a_bug(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Failing is a result, not a mistake of the user: no error line, the report is written."""
    monkeypatch.setattr("specdec.engine_setup.ModelRunner", OffByOne)
    monkeypatch.setattr("specdec.drafts.ngram.NgramDrafter.propose", _always_something)
    out = tmp_path / "audit"
    command = ["audit", str(tiny_llama), "--data", str(prompts), "--out", str(out), *QUICK]
    assert main([*command, "--levels", "C4"]) == 1
    captured = capsys.readouterr()
    assert "error:" not in captured.err
    assert json.loads(captured.out.strip().splitlines()[-1])["passed"] is False
    assert "FAILED" in (out / "audit.md").read_text()


def _always_something(drafter: object, requests: list[DraftRequest]) -> list[DraftTree]:
    return [
        chain_tree(request.seq.token_ids[-1], [request.seq.token_ids[-1]] * request.max_depth)
        for request in requests
    ]


def test_a_lossy_rule_is_priced_and_named_everywhere(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    command = ["audit", str(tiny_llama), "--data", str(prompts), "--out", str(out), *QUICK]
    assert main([*command, "--levels", "C0", "--lossy", "thresholds", "--knob", "threshold_acc=0.5"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads(printed.strip().splitlines()[-1])
    name = "thresholds(threshold_single=1, threshold_acc=0.5)"
    assert summary["verification"] == name
    assert summary["lossy"] is True
    for text in (printed, (out / "audit.md").read_text(), (out / "audit.html").read_text()):
        assert name in text
    record = json.loads((out / "audit.json").read_text())
    assert [one["baseline"] for one in record["baselines"]] == [
        "strict-target",
        "collaborative-law",
        "speculative",
    ]
    assert record["baselines"][0]["total_variation"] == 0.0
    assert summary["levels"]["lossy"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lossy", "lenience", "--exact"], "--exact"),
        (["--weights", "int8", "--exact"], "--exact"),
        (["--weights", "bf16-packed", "--exact"], "--exact"),
        (["--lossy", "lenience", "--rule", "block"], "one of them"),
        (["--knob", "l=1"], "--knob needs"),
        (["--lossy", "block"], "--rule block"),
        (["--rule", "lenience", "--shape", "chain:2"], "--lossy lenience"),
        (["--levels", "C7"], "C7"),
        (["--lossy", "lenience", "--levels", "C2"], "C2"),
        (["--rule", "block"], "chain:DEPTH"),
        (["--tasks", "hard", "--levels", "C5"], "easy"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(
    tiny_llama: Path, prompts: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tiny_llama), "--data", str(prompts), *words]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_rule_or_knob_is_named(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tiny_llama), "--lossy", "leniency"]) == 1
    assert "leniency" in capsys.readouterr().err
    assert main(["audit", str(tiny_llama), "--lossy", "lenience", "--knob", "lenience=2"]) == 1
    assert "(0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 1,024.", 1024.0),
        ("3 + 4 = 7", 7.0),
        ("-5", -5.0),
        ("$12.50 in all", 12.5),
        ("none", None),
        ("7.", 7.0),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_scorers_and_task_sets() -> None:
    assert says_number(12)("It is 12.")
    assert not says_number(12)("12 of 13")
    assert says_word("river")("The word: River!")
    assert not says_word("river")("rivers")
    tasks = exact_match_tasks(["easy", "gsm8k"], 6, lambda text: [len(text)])
    assert len(tasks) == 12
    assert {task.category for task in tasks} == set(CATEGORIES)
    assert tasks == sorted(tasks, key=lambda task: task.difficulty > 3)
    sums = [task for task in tasks if task.category == "sum of one digit"]
    assert all(not task.is_right("no number") for task in sums)
    with pytest.raises(UsageError):
        exact_match_tasks(["hard"], 1, lambda text: [1])


def test_gsm8k_answers_are_read_from_the_worked_solutions() -> None:
    tasks = exact_match_tasks(["gsm8k"], 3, lambda text: [1])
    robe = next(task for task in tasks if task.id == "gsm8k-test-1")
    assert robe.is_right("2/2 = 1, so 2 + 1 = 3 bolts")
    assert not robe.is_right("It takes 4 bolts.")


def test_a_report_is_the_same_in_both_spellings(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    picture.write_bytes(b"not really a picture")
    paper = Paper(
        title="T <x>",
        lead="lead & more",
        sections=[
            Section(
                title="S",
                blocks=[
                    "words",
                    Notes(lines=["one", "two"]),
                    Table(columns=["a", "b"], rows=[["x|y", 0.123456], [None, True]], caption="c"),
                    Picture(path=picture, caption="shown"),
                ],
            )
        ],
    )
    text, page = to_markdown(paper), to_html(paper)
    assert "| x\\|y | 0.1235 |" in text
    assert "| - | yes |" in text
    assert "![shown](p.png)" in text
    assert "T &lt;x&gt;" in page
    assert "data:image/png;base64,bm90" in page
    assert "<li>two</li>" in page
    assert cell_text([1.0, 2.0]) == "1..2"
