"""`specdec watch`: each threshold passes and fails at the right value, and every output says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specdec.cli.main import main

Make = Callable[..., Path]
DRAFT = "draft chain:2"


def loses(tokens: int) -> Callable[[dict[str, Any]], None]:
    """A change: every prompt commits fewer tokens in its ten steps."""

    def change(body: dict[str, Any]) -> None:
        for answer in body["per_prompt"][DRAFT]:
            answer["committed"] -= tokens

    return change


def slows(factor: float) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        for answer in body["per_prompt"][DRAFT]:
            answer["seconds"] = [factor * second for second in answer["seconds"]]

    return change


def outcome(
    capsys: pytest.CaptureFixture[str], words: list[str], valid: Callable[[dict[str, Any]], None]
) -> tuple[int, dict[str, Any]]:
    code = main(["watch", *words])
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    valid(summary)
    return code, summary


@pytest.mark.parametrize(
    ("words", "failed"),
    [
        (["--min-acceptance-length", "1.5"], []),
        (["--min-acceptance-length", "1.51"], ["min-acceptance-length"]),
        (["--min-speedup", "2.0"], []),
        (["--min-speedup", "2.01"], ["min-speedup"]),
        (["--exact"], ["exact"]),
        (["--min-speedup", "3", "--min-acceptance-length", "3"], ["min-acceptance-length", "min-speedup"]),
    ],
)
def test_thresholds_hold_to_the_last_digit(
    words: list[str],
    failed: list[str],
    bench_record: Make,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    code, summary = outcome(capsys, [str(bench_record()), *words], valid_record)
    assert code == (1 if failed else 0)
    assert [check["name"] for check in summary["checks"] if not check["passed"]] == failed
    assert summary["failed"] == len(failed)


@pytest.mark.parametrize(
    ("change", "words", "failed"),
    [
        (loses(0), [], []),
        (loses(1), [], ["max-drop"]),
        (loses(-1), [], []),
        (loses(1), ["--max-drop", "0.11"], []),
        (loses(1), ["--max-drop", "0.09"], ["max-drop"]),
        (slows(1.1), ["--max-speedup-drop", "0.2"], []),
        (slows(1.1), ["--max-speedup-drop", "0.1"], ["max-speedup-drop"]),
        (lambda b: b["run"].update(dtype="bfloat16"), [], ["comparable"]),
        (lambda b: b["run"]["hardware"].update(cpu="B"), ["--max-speedup-drop", "1"], ["max-speedup-drop"]),
        (lambda b: b["settings"].append({**b["settings"][1], "setting": "x"}), [], ["in-baseline"]),
    ],
)
def test_a_baseline_is_kept_or_not(
    change: Callable[[dict[str, Any]], Any],
    words: list[str],
    failed: list[str],
    bench_record: Make,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    run, baseline = bench_record(change, "new.json"), bench_record()
    code, summary = outcome(capsys, [str(run), "--baseline", str(baseline), *words], valid_record)
    assert [check["name"] for check in summary["checks"] if not check["passed"]] == failed
    assert code == (1 if failed else 0)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda row: row.update(identical=4), "4 of 4 identical"),
        (lambda row: row.update(identical=4, lossless=False, rule="typical"), "lossy rule typical"),
        (lambda row: row.update(identical=4, simulated=True), "acceptance was simulated"),
        (lambda row: row.pop("identical"), "not compared"),
    ],
)
def test_exact_means_every_text_and_an_exact_rule(
    change: Callable[[dict[str, Any]], Any],
    found: str,
    bench_record: Make,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    run = bench_record(lambda body: change(body["settings"][1]))
    code, summary = outcome(capsys, [str(run), "--exact"], valid_record)
    assert summary["checks"][0]["found"].startswith(found)
    assert code == (0 if found == "4 of 4 identical" else 1)


def test_junit_and_summaries_say_what_the_table_says(
    bench_record: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    junit, github, file = tmp_path / "ci" / "watch.xml", tmp_path / "step.md", tmp_path / "s.md"
    github.write_text("earlier step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(github))
    words = [str(bench_record()), "--min-speedup", "2", "--exact", "--junit", str(junit), "--github-summary"]
    code, _ = outcome(capsys, [*words, "--summary-file", str(file)], valid_record)
    assert code == 1
    suites = ElementTree.parse(junit).getroot()
    assert (suites.get("tests"), suites.get("failures")) == ("2", "1")
    cases = {case.get("classname"): case for case in suites.iter("testcase")}
    assert set(cases) == {"specdec.watch.min-speedup", "specdec.watch.exact"}
    assert cases["specdec.watch.min-speedup"].find("failure") is None
    failure = cases["specdec.watch.exact"].find("failure")
    assert failure is not None
    assert (
        failure.get("message") == "3 of 4 identical; wanted 4 of 4 identical to no speculation on the target"
    )
    text = file.read_text()
    assert "1 of 2 checks FAILED." in text
    assert "| FAIL | exact | draft chain:2 | 3 of 4 identical |" in text
    assert github.read_text() == "earlier step\n" + text


def test_one_setting_can_be_watched_among_many(
    bench_record: Make,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    def more(body: dict[str, Any]) -> None:
        slow = {**body["settings"][1], "setting": "ngram chain:2", "speedup": 0.5}
        body["settings"].append(slow)

    run, baseline = bench_record(more, "more.json"), bench_record()
    words = [str(run), "--baseline", str(baseline), "--min-speedup", "1"]
    assert outcome(capsys, words, valid_record)[0] == 1
    assert outcome(capsys, [*words, "--setting", DRAFT], valid_record)[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench.json"], "nothing to check; give --baseline"),
        (["bench.json", "--max-drop", "0.1"], "--max-drop (0.1) needs --baseline"),
        (["bench.json", "--max-speedup-drop", "0.1"], "--max-speedup-drop (0.1) needs --baseline"),
        (["bench.json", "--max-drop", "-1", "--baseline", "bench.json"], "--max-drop"),
        (
            ["bench.json", "--exact", "--setting", "ngram"],
            "--setting (ngram) does not draft in bench.json; it has",
        ),
        (["none.json", "--exact"], "RUN (none.json) cannot be read"),
        (["run.json", "--exact"], "RUN (run.json) is a run record"),
        (["plain.json", "--exact"], "has no setting that drafts"),
        (["bench.json", "--exact", "--junit", "bench.json"], "is the file that RUN is read from"),
        (["bench.json", "--exact", "--github-summary"], "--github-summary needs $GITHUB_STEP_SUMMARY"),
        (["bench.json", "--exact", "--junit", "a", "--summary-file", "a"], "is the file that --junit writes"),
    ],
)
def test_what_cannot_be_watched_is_wrong_usage(
    words: list[str],
    said: str,
    bench_record: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    body = json.loads(bench_record().read_text())
    bench_record(lambda made: made["settings"].pop(1), "plain.json")
    Path("run.json").write_text(json.dumps(body["run"]))
    assert main(["watch", *words]) == 2
    assert said in capsys.readouterr().err
    assert json.loads(Path("bench.json").read_text()) == body
