"""Two runs side by side: paired by prompt, a verdict that follows the interval, unlike runs refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.cli.reporting.pairs import pair_records
from specdec.cli.reporting.records import read_records

Make = Callable[..., Path]
DRAFT = "draft chain:2"


def commits(values: list[int]) -> Callable[[dict[str, Any]], None]:
    """A change: what the four prompts commit in ten steps each."""

    def change(body: dict[str, Any]) -> None:
        for answer, value in zip(body["per_prompt"][DRAFT], values, strict=True):
            answer["committed"] = value

    return change


def paired(make: Make, change: Callable[[dict[str, Any]], Any], **options: Any) -> Any:
    old, new = read_records([make(), make(change, "new.json")])
    return pair_records(old, new, **options)


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([11, 13, 13, 15], "-0.20 (-0.20..-0.20), interval excludes 0: regression"),
        ([15, 17, 17, 19], "+0.20 (+0.20..+0.20), interval excludes 0: improvement"),
        ([13, 15, 15, 17], "+0.00 (+0.00..+0.00), interval holds 0: no change shown"),
    ],
)
def test_a_difference_is_paired_so_that_what_prompts_share_cancels(
    values: list[int], verdict: str, bench_record: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every prompt loses two tokens of ten steps: unpaired, the prompts' own spread would hide it."""
    old, new = bench_record(), bench_record(commits(values), "new.json")
    out = tmp_path / "diff.html"
    assert main(["report", "--diff", str(old), str(new), "--out", str(out)]) == 0
    summary = last_json(capsys)
    assert summary["fair"] is True
    first = f"{DRAFT}, made, batch 1, temperature 0: acceptance length {verdict}; n = 4 prompts, paired"
    assert summary["verdicts"][0] == first
    assert first in out.read_text()


def test_a_scattered_difference_holds_0(bench_record: Make) -> None:
    [pair] = paired(bench_record, commits([19, 11, 15, 16])).pairs
    assert pair.length.value == pytest.approx(0.025)
    assert pair.length.interval[0] < 0 < pair.length.interval[1]
    assert pair.length.detectable > abs(pair.length.value)


def test_speed_ups_are_compared_each_with_its_own_baseline(bench_record: Make) -> None:
    """The new machine is twice as slow in both: no difference, though tokens per second halve."""

    def slower(body: dict[str, Any]) -> None:
        for answers in body["per_prompt"].values():
            for answer in answers:
                answer["seconds"] = [2 * second for second in answer["seconds"]]

    [pair] = paired(bench_record, slower).pairs
    assert (pair.speedup.old, pair.speedup.new) == (2.0, 2.0)
    assert pair.speedup.verdict == "interval holds 0: no change shown"


def test_only_prompts_of_both_are_paired_and_turns_are_added_up(bench_record: Make) -> None:
    def fewer(body: dict[str, Any]) -> None:
        for answers in body["per_prompt"].values():
            # the second turn of p0, and no p3
            answers[3] |= {"id": "p0", "turn": 1}

    [pair] = paired(bench_record, fewer).pairs
    assert pair.prompts == ["p0", "p1", "p2"]
    # old: (13 + 15 + 15) / 30; new: p0 has 13 + 17 in 20 steps
    assert pair.length.old == pytest.approx(43 / 30)
    assert pair.length.new == pytest.approx(60 / 40)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda b: b.update(target="other"), "target (tiny and other)"),
        (lambda b: b["run"].update(dtype="bfloat16"), "dtype (float32 and bfloat16)"),
        (lambda b: b["run"].update(data_hash="e"), "data_hash (d and e)"),
        (lambda b: b["run"]["defaults"].update(max_tokens=64), "defaults.max_tokens (20 and 64)"),
        (lambda b: b["run"]["defaults"].update(batch_size=8), "batch_size (1 and 8)"),
        (lambda b: b["run"]["defaults"].update(temperature=1.0), "temperature (0.0 and 1.0)"),
        (lambda b: b["settings"][1].update(lossless=False), "lossless (yes and no)"),
        (lambda b: b["settings"][1].update(simulated=True), "simulated (no and yes)"),
    ],
)
def test_runs_that_differ_in_what_decides_the_figures_are_refused_or_flagged(
    change: Callable[[dict[str, Any]], Any],
    said: str,
    bench_record: Make,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "d.html"
    words = [
        "report",
        "--diff",
        str(bench_record()),
        str(bench_record(change, "new.json")),
        "--out",
        str(out),
    ]
    assert main(words) == 1
    assert said in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--allow-differences"]) == 0
    summary = last_json(capsys)
    assert summary["fair"] is False
    assert all(line.startswith("NOT A FAIR COMPARISON: ") for line in summary["verdicts"])
    assert "NOT A FAIR COMPARISON: the runs differ" in out.read_text()


def test_other_hardware_forbids_speed_alone(bench_record: Make) -> None:
    pairing = paired(bench_record, lambda body: body["run"]["hardware"].update(cpu="Another"))
    assert [str(one) for one in pairing.differing] == ["hardware.cpu (A CPU and Another)"]
    assert not pairing.forbidding
    assert pairing.pairs[0].length is not None
    assert pairing.pairs[0].speedup is None


def test_one_weight_in_folders_of_two_names_is_one_target(bench_record: Make) -> None:
    old, new = read_records(
        [
            bench_record(
                lambda b: b.update(conditions={"target_fingerprint": "f", "threads": 1}), "old.json"
            ),
            bench_record(
                lambda b: b.update(target="b", conditions={"target_fingerprint": "f", "threads": 2}),
                "new.json",
            ),
        ]
    )
    assert [(one.name, one.forbids) for one in pair_records(old, new).differing] == [
        ("conditions.threads", "speed")
    ]


def test_drafts_of_two_names_are_compared_where_each_run_has_one(bench_record: Make) -> None:
    def renamed(body: dict[str, Any]) -> None:
        body["settings"][1]["setting"] = "other chain:2"
        body["per_prompt"]["other chain:2"] = body["per_prompt"].pop(DRAFT)

    [pair] = paired(bench_record, renamed).pairs
    assert pair.label.startswith("other chain:2 against draft chain:2, made")
    assert pair.length.value == 0


def test_rows_that_the_other_run_lacks_are_named(
    bench_record: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def more(body: dict[str, Any]) -> None:
        body["settings"].append({**body["settings"][1], "setting": "ngram chain:2"})

    pairing = paired(bench_record, more)
    assert [pair.new.setting for pair in pairing.pairs] == [DRAFT]
    assert pairing.unpaired == ["ngram chain:2"]
    only = bench_record(lambda body: body["settings"].pop(1), "plain.json")
    assert main(["report", "--diff", str(bench_record()), str(only), "--out", str(tmp_path / "d.md")]) == 1
    assert "no drafting setting in common" in capsys.readouterr().err


def test_records_of_another_kind_are_not_compared(
    bench_record: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.json"
    run.write_text(json.dumps(json.loads(bench_record().read_text())["run"]))
    assert main(["report", "--diff", str(bench_record()), str(run), "--out", str(tmp_path / "d.md")]) == 2
    assert "only bench records are compared" in capsys.readouterr().err
