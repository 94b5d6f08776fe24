"""Grids of bench: points, turns, resuming, what may be compared, and settings that lose."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.benching import run as bench_run
from specdec.cli.benching.conditions import (
    differences,
    engine_conditions,
    require_comparable,
)
from specdec.cli.benching.energy import EnergyMeter, energy_meter
from specdec.cli.benching.points import points_of, split_draft
from specdec.cli.benching.sides import parse_numbers
from specdec.cli.benching.table import repeatability_sentence, times
from specdec.cli.datasets import Prompt, choose_prompts
from specdec.cli.main import main
from specdec.config import EngineConfig
from specdec.drafter import DraftRequest
from specdec.drafts.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.tree import DraftTree, chain_tree

TURNS = ["say the in an", "and on"]


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    """Two sets: conversations of two turns, and prompts alone."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    rows = [
        {"id": f"a{i}", "category": "xy"[i % 2], "turns": [f"{i} {TURNS[0]}", TURNS[1]]} for i in range(3)
    ]
    one.write_text("".join(json.dumps(row) + "\n" for row in rows))
    two.write_text("".join(json.dumps({"id": f"b{i}", "prompt": f"the {i} on"}) + "\n" for i in range(3)))
    return one, two


@pytest.fixture
def bench(tiny_llama: Path, sets: tuple[Path, Path], tmp_path: Path) -> list[str]:
    words = [
        "bench",
        str(tiny_llama),
        "--draft",
        "ngram",
        "--max-tokens",
        "8",
        "--out",
        str(tmp_path / "o.json"),
    ]
    return [*words, "--no-adaptive", "--data", str(sets[0]), "--data", str(sets[1])]


def written(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "o.json").read_text())


def test_a_grid_has_a_row_for_every_setting_at_every_point(
    bench: list[str], sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--batch-size", "1,2", "--temperature", "0,1", "--turns", "2", "--limit", "2", "--repeats", "2"]
    assert main([*bench, *grid, "--draft", "ngram@chain:1"]) == 0
    shown = capsys.readouterr()
    record = written(tmp_path)
    assert record["complete"] is True
    assert record["points"]["finished"] == record["points"]["planned"] == 8
    rows = record["settings"]
    names = ["plain", "ngram chain:3", "ngram chain:1"]
    assert [row["setting"] for row in rows] == names * 8
    assert {(row["data"], row["batch_size"], row["temperature"]) for row in rows} == {
        (str(name), size, temperature) for name in sets for size in (1, 2) for temperature in (0.0, 1.0)
    }
    for row in rows:
        # conversations of one turn end with it
        assert (row["prompts"], row["answers"]) == (2, 4 if row["data"] == str(sets[0]) else 2)
        assert row["tokens"] == row["acceptance"]["committed"] + row["acceptance"]["first_tokens"]
        assert row["memory"]["total"] > row["memory"]["weights"] > 0
        assert sum(row["step_time"]["shares"].values()) == pytest.approx(1.0)
        if row["setting"] != "plain":
            assert row["identical"] == row["equal_lengths"] == row["answers"]
            assert row["repeatability"]["acceptance_length_range"] == 0.0
            assert row["repeatability"]["identical_texts"] == row["answers"]
            assert repeatability_sentence(row) in shown.err
    assert json.loads(shown.out.strip().splitlines()[-1])["settings"] == rows
    pooled = {(one["setting"], one["temperature"], one["batch_size"]): one for one in record["pooled"]}
    assert len(pooled) == 3 * 4
    for (name, temperature, size), one in pooled.items():
        cells = [
            row
            for row in rows
            if (row["setting"], row["temperature"], row["batch_size"]) == (name, temperature, size)
        ]
        assert (one["prompts"], one["answers"]) == (4, 6)
        assert one["tokens"] == sum(row["tokens"] for row in cells)
        steps = [sum(row["acceptance"][key] for row in cells) for key in ("committed", "verify_steps")]
        assert one["acceptance_length"] == steps[0] / steps[1]
        seconds = sum(row["seconds"] for row in cells)
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / seconds, rel=1e-2)
        if name != "plain":
            plain = pooled["plain", temperature, size]
            assert one["speedup"] == pytest.approx(one["tokens_per_second"] / plain["tokens_per_second"])
            assert one["identical"] == 6
            low, high = one["speedup_interval"]
            assert low <= high
    assert record["run"]["defaults"]["batch_size"] == [1, 2]
    assert record["peak_rss_bytes"] > 1 << 20


def test_later_turns_go_on_with_what_plain_decoding_wrote(
    bench: list[str], tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting answers the same second prompt, or a speed-up would compare different texts."""
    runs = []
    real = bench_run.run_interleaved
    monkeypatch.setattr(bench_run, "run_interleaved", lambda *a, **k: runs.append(real(*a, **k)) or runs[-1])
    assert main([*bench, "--turns", "2", "--batch-size", "2"]) == 0
    first = runs[0]
    assert [(row.id, row.turn) for row in first.rows] == [
        ("a0", 0),
        ("a1", 0),
        ("a0", 1),
        ("a1", 1),
        ("a2", 0),
        ("a2", 1),
    ]
    answer, second = first.results["plain"][0][0], first.rows[2]
    messages = [
        {"role": "user", "content": f"0 {TURNS[0]}"},
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": TURNS[1]},
    ]
    expected = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert second.token_ids == tiny_tokenizer.encode(expected, add_special_tokens=False)
    assert [one["turn"] for one in written(tmp_path)["per_prompt"]["plain"][:4]] == [0, 0, 1, 1]


def test_turns_that_do_not_fit_the_context_are_left_out_and_said(
    tiny_model_factory: Any, sets: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_model_factory("llama", max_position_embeddings=64)
    words = [
        "bench",
        str(target),
        "--data",
        str(sets[0]),
        "--turns",
        "2",
        "--max-tokens",
        "24",
        "--ignore-eos",
    ]
    assert main([*words, "--out", str(tmp_path / "o.json")]) == 0
    record = written(tmp_path)
    assert {(one["id"], one["turn"]) for one in record["left_out"]} == {("a0", 1), ("a1", 1), ("a2", 1)}
    assert record["settings"][0]["answers"] == 3
    assert "left out:" in capsys.readouterr().err


def test_a_killed_grid_goes_on_where_it_was(
    bench: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most the point under way is lost, and nothing goes on with other settings unasked."""
    done = []
    real = bench_run.run_interleaved

    def killed(*a: Any, **k: Any) -> Any:
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt
        return real(*a, **k)

    grid = [*bench, "--batch-size", "1,2"]
    monkeypatch.setattr(bench_run, "run_interleaved", killed)
    assert main(grid) == 130
    before = written(tmp_path)
    assert (before["complete"], before["points"]["finished"], before["points"]["planned"]) == (False, 2, 4)
    assert main(grid) == 2
    assert "2 finished points of 4" in capsys.readouterr().err
    assert written(tmp_path) == before
    assert main([*grid, "--resume", "--max-tokens", "9"]) == 2
    assert "other settings" in capsys.readouterr().err
    done.append(1)
    assert main([*grid, "--resume"]) == 0
    after = written(tmp_path)
    assert after["complete"]
    assert len(done) == 6
    assert after["settings"][:4] == before["settings"]
    assert len(after["pooled"]) == 4
    assert before["pooled"] == []
    assert len(after["settings"]) == 8
    assert len(after["per_prompt"]["plain"]) == 12
    assert after["run"]["extra"]["earlier"][0]["points"] == 2
    # a finished record is replaced by a new run, as any output
    assert main([*grid, "--limit", "1"]) == 0
    assert len(written(tmp_path)["per_prompt"]["plain"]) == 4


def test_a_slow_drafter_is_printed_as_slower(
    bench: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B68: with a sleep in the drafter the factor falls below 1, and the table says so in words."""
    real = NgramDrafter.propose

    def sleepy(self: NgramDrafter, requests: Any) -> Any:
        time.sleep(0.1)
        return real(self, requests)

    monkeypatch.setattr(NgramDrafter, "propose", sleepy)
    assert main([*bench, "--limit", "1"]) == 0
    text = capsys.readouterr().out
    row = json.loads(text.strip().splitlines()[-1])["settings"][1]
    assert row["speedup"] < 1
    assert row["step_time"]["shares"]["draft"] > 0
    assert "x slower" in text


def test_factors_below_one_stay_below_one_in_print() -> None:
    assert (times(1.25), times(1.0), times(0.99999), times(0.5)) == (
        "1.250x",
        "1.000x",
        "0.999x slower",
        "0.500x slower",
    )


def test_a_speed_up_between_unlike_runs_is_refused_by_name(tiny_llama: Path) -> None:
    """B68: everything but speculation must be alike; drafts, shapes and policies may differ."""
    base = engine_conditions(Engine(tiny_llama, config=EngineConfig(kv_tokens=64)))
    other = engine_conditions(Engine(tiny_llama, config=EngineConfig(kv_tokens=64, dtype="float16")))
    require_comparable("a over b", base, dict(base))
    with pytest.raises(SpecdecError, match=r"no speed-up of a over b.*dtype \('float16' and 'float32'\)"):
        require_comparable("a over b", other, base)
    assert not {"spec", "draft_weights", "kv_tokens"} & set(base)
    assert {"target_fingerprint", "threads", "cpu", "dtype", "device", "kernels"} <= set(base)
    assert differences({**base, "threads": 99}, base)[0].startswith("threads (99 and")


def test_numbers_sets_and_drafts_are_spelled(tmp_path: Path) -> None:
    assert parse_numbers("--batch-size", "1,4,8", int, 1) == [1, 4, 8]
    assert parse_numbers("--temperature", "0,0.7", float, 0.0) == [0.0, 0.7]
    for text in ("", "0", "1,x", "1,1", "1.5"):
        with pytest.raises(UsageError, match=r"--batch-size"):
            parse_numbers("--batch-size", text, int, 1)
    for text in ("nan", "inf", "-1"):
        with pytest.raises(UsageError, match=r"--temperature"):
            parse_numbers("--temperature", text, float, 0.0)
    assert split_draft("ngram@tree:2x2:4") == ("ngram", "tree:2x2:4")
    assert split_draft("me@home/draft") == ("me@home/draft", None)
    assert len(points_of(["a", "b"], [1, 8], [0.0])) == 4
    with pytest.raises(UsageError, match="same set twice"):
        points_of(["a", "a"], [1], [0.0])
    prompts = [Prompt(id=str(number), category="c", turns=("x",)) for number in range(10)]
    assert [one.id for one in choose_prompts(prompts, 4, spread=True)] == ["0", "2", "5", "7"]
    assert [one.id for one in choose_prompts(prompts, 4, spread=False)] == ["0", "1", "2", "3"]
    assert choose_prompts(prompts, 99, spread=True) == prompts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "0"], "--batch-size"),
        (["--temperature", "hot"], "--temperature"),
        (["--transformers", "--batch-size", "2"], "one prompt at a time"),
        (["--resume"], "--resume needs --out"),
        (["--spread"], "--spread needs --limit"),
        (["--draft", "ngram@chain:0"], "chain:0"),
        (["--url", "http://localhost:1", "--data", "a", "--data", "b"], "exclude each other"),
    ],
)
def test_options_that_cannot_be_are_wrong_usage(
    words: list[str], message: str, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tiny_llama), *words]) == 2
    assert message in capsys.readouterr().err


class _Counter:
    """NVML's one function that is used, with a card that does not count."""

    def __init__(self, millijoules: dict[int, int]) -> None:
        self.millijoules = millijoules

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int, value: Any) -> int:
        if handle not in self.millijoules:
            return 3
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.millijoules[handle]
        return 0


def test_energy_is_the_sum_of_cards_or_nothing() -> None:
    assert EnergyMeter(_Counter({0: 1500, 1: 500}), [0, 1]).joules() == 2.0
    assert EnergyMeter(_Counter({0: 1500}), [0, 1]).joules() is None
    assert energy_meter("cpu") is None


def test_every_repeat_of_an_adaptive_bench_drafts_alike(
    bench: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches acceptance learnt in one repeat, or at one point, that decides how much the next one drafts."""

    def hopeful(self: NgramDrafter, requests: list[DraftRequest]) -> list[DraftTree]:
        """Something for every sequence, nearly always wrong: estimates fall."""
        return [
            chain_tree(one.seq.token_ids[-1], [7] * min(one.max_depth, one.max_nodes)) for one in requests
        ]

    monkeypatch.setattr(NgramDrafter, "propose", hopeful)
    runs: list[Any] = []
    engines: list[Engine] = []
    real, made = bench_run.run_interleaved, bench_run.make_engines

    def built(*a: Any, **k: Any) -> dict[str, Engine]:
        found = made(*a, **k)
        engines.append(found["ngram chain:3"])
        return found

    monkeypatch.setattr(bench_run, "make_engines", built)
    monkeypatch.setattr(bench_run, "run_interleaved", lambda *a, **k: runs.append(real(*a, **k)) or runs[-1])
    words = [word for word in bench if word != "--no-adaptive"]
    options = ["--pass-costs", "fixed", "--repeats", "2", "--batch-size", "3", "--max-tokens", "40"]
    # a warm-up would have taught the first repeat as well
    options += ["--warm-up", "0"]
    assert main([*words, *options, "--ignore-eos"]) == 0
    for run in runs:
        answers = run.results["ngram chain:3"]
        counts = [[(one.stats.drafted, one.stats.accepted) for one in repeats] for repeats in answers]
        assert sum(drafted for (drafted, _), _ in counts) > 0
        assert all(first == second for first, second in counts)
    (engine,) = engines
    learnt = engine.budget.shared.first
    engine.forget_estimates()
    assert engine.budget.shared.first != learnt, "there was nothing to forget"
