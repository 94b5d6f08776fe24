"""regenerate, generate and bench through the command line, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.cli.answers import finished_answers, ordered_prompts
from specdec.cli.benching.figures import row_figures
from specdec.cli.benching.measure import BenchPrompt, Interleaved, Measured, run_interleaved
from specdec.cli.bootstrap import ratio_interval
from specdec.cli.datasets import Prompt
from specdec.cli.main import main
from specdec.cli.shapes import parse_shape
from specdec.config import ModelConfig
from specdec.errors import UsageError
from specdec.stats import SpecStats


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "category": "ab"[i % 2], "prompt": f"say {i} the in an"} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_regenerate_writes_answers_and_goes_on_where_it_stopped(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted run loses nothing that was written, and repeats nothing (B31's kind, for data)."""
    out = tmp_path / "answers.jsonl"
    command = [
        "regenerate",
        str(prompts),
        "--target",
        str(tiny_llama),
        "--out",
        str(out),
        "--max-tokens",
        "9",
    ]
    assert main(command) == 0
    whole = out.read_text()
    summary = last_json(capsys)
    records = [json.loads(line) for line in whole.splitlines()]
    assert summary["answers"] == 5
    assert summary["answer_tokens"] == sum(len(record["response_token_ids"]) for record in records)
    for record in records:
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
        assert 1 <= len(record["response_token_ids"]) <= 9
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:20])  # killed in the middle of a line
    assert main(command) == 0
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["id"] for r in again) == sorted(r["id"] for r in records)
    by_id = {record["id"]: record["response_token_ids"] for record in records}
    assert all(record["response_token_ids"] == by_id[record["id"]] for record in again)


def test_regenerate_does_not_touch_a_foreign_file(tiny_llama: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "notes.jsonl"
    out.write_text('{"mine": 1}\n')
    assert main(["regenerate", str(prompts), "--target", str(tiny_llama), "--out", str(out)]) == 1
    assert out.read_text() == '{"mine": 1}\n'


def test_regenerate_does_not_mix_answers_of_different_sampling(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file holds the answers of one target under one setting, or training learns from a mixture."""
    out = tmp_path / "answers.jsonl"
    command = ["regenerate", str(prompts), "--target", str(tiny_llama), "--out", str(out), "--limit", "2"]
    assert main([*command, "--max-tokens", "5"]) == 0
    before = out.read_text()
    assert main([*command, "--max-tokens", "6"]) == 1
    assert "max_tokens 5" in capsys.readouterr().err
    assert out.read_text() == before


def test_balanced_order_takes_categories_in_turn() -> None:
    prompts = [Prompt(id=str(i), category="aaab"[i % 4], turns=("x",)) for i in range(16)]
    order = [prompt.category for prompt in ordered_prompts(prompts, "balanced", 0)]
    assert sorted(order[:8]) == ["a"] * 4 + ["b"] * 4
    assert len(order) == 16
    assert ordered_prompts(prompts, "file", 0) == prompts


def test_finished_answers_counts_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "1", "response_token_ids": [1, 2]}\n{"id": "2", "resp')
    assert finished_answers(path) == ({"1"}, 2)
    assert path.read_text().endswith("]}\n")


@pytest.mark.parametrize("draft", [[], ["--draft", "ngram"]])
def test_generate_answers_one_prompt(
    tiny_llama: Path, draft: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny_llama), "--prompt", "in the", "--max-tokens", "12", *draft]) == 0
    result = last_json(capsys)
    assert 1 <= result["completion_tokens"] <= 12
    assert result["verification"] == "exact"
    if not draft:
        assert result["drafted"] == 0


def test_generate_answers_a_file_of_prompts(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "texts.jsonl"
    command = ["generate", str(tiny_llama), "--prompts", str(prompts), "--out", str(out), "--max-tokens", "8"]
    assert main([*command, "--draft", "ngram", "--batch-size", "2"]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["id"] for record in records] == ["p0", "p1", "p2", "p3", "p4"]
    assert last_json(capsys)["completion_tokens"] == sum(record["completion_tokens"] for record in records)


def test_bench_measures_every_setting_beside_plain(
    tiny_llama: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    command = ["bench", str(tiny_llama), "--draft", "ngram", "--shape", "chain:2", "--shape", "tree:2x2:4"]
    command += [
        "--data",
        str(prompts),
        "--max-tokens",
        "10",
        "--no-adaptive",
        "--transformers",
        "--out",
        str(out),
    ]
    assert main(command) == 0
    summary = last_json(capsys)
    names = [one["setting"] for one in summary["settings"]]
    assert names == ["plain", "ngram chain:2", "ngram tree:2x2:4", "transformers"]
    for one in summary["settings"][1:]:
        assert one["identical"] == one["prompts"] == 5
        # another engine has no speed-up, which is against the same engine
        assert one["relative" if one["setting"] == "transformers" else "speedup"] > 0
        assert ("speedup" in one) != ("relative" in one)
    whole = json.loads(out.read_text())
    assert len(whole["per_prompt"]["plain"]) == 5
    assert whole["definitions"]["acceptance_length"]
    plain = whole["settings"][0]["acceptance"]
    assert plain["acceptance_length"] == 1.0
    assert plain["acceptance_rate"] is None


def test_verify_cost_is_measured_by_rows(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny_llama), "--verify-cost", "--weights", "plain"]) == 0
    summary = last_json(capsys)
    assert (summary["dtype"], summary["weights"]) == ("float32", "plain")
    passes = summary["passes"]
    assert [one["rows"] for one in passes] == [1, 4, 8, 12, 16, 24, 32]
    config = ModelConfig.from_folder(tiny_llama)
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    in_layer = config.hidden_size * (qkv + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    operations = 2 * (8 * config.num_layers * in_layer + 5 * config.vocab_size * config.hidden_size)
    assert passes[2]["least_ms"] * summary["matrix_gflop_per_s"] * 1e6 == pytest.approx(operations)
    assert passes[2]["least_relative"] == pytest.approx(passes[2]["least_ms"] / passes[0]["ms"])
    assert passes[0]["relative"] == 1.0
    assert all(one["ms"] > 0 for one in passes)


def test_summary_arithmetic_to_the_last_digit() -> None:
    """Two prompts with known counts and times: lengths, rates, speedup by hand."""
    prompts = [BenchPrompt(id=str(i), category="c", token_ids=[1]) for i in range(2)]

    def measured(tokens: int, seconds: float, steps: list[int]) -> Measured:
        stats = SpecStats()
        for accepted in steps:
            stats.record_step([1, 1, 1], 3, accepted, accepted + 1)
        return Measured(token_ids=[7] * tokens, seconds=seconds, stats=stats)

    results = {
        "plain": [[measured(4, 4.0, [])], [measured(10, 10.0, [])]],
        "fast": [[measured(4, 1.0, [2])], [measured(10, 5.0, [0, 1, 3, 3, 2])]],
    }
    run = Interleaved(rows=prompts, batches=[0, 1], results=results, warm_up={"plain": [], "fast": []})
    fast = row_figures("fast", run)
    # plain 14 tokens in 14 s, fast 14 tokens in 6 s
    assert fast["speedup"] == pytest.approx(14 / 6)
    assert fast["acceptance"]["acceptance_length"] == pytest.approx((3 + 14) / 6)
    assert fast["identical"] == 2
    assert fast["tokens_per_second"] == pytest.approx(14 / 6)


def test_every_setting_decodes_every_batch_in_turn() -> None:
    """The order turns round from batch to batch, so that no setting always comes first."""
    prompts = [BenchPrompt(id=str(i), category="c", token_ids=[i]) for i in range(5)]
    calls: list[tuple[str, int]] = []

    def decoder(name: str):  # type: ignore[no-untyped-def]
        def decode(batch):  # type: ignore[no-untyped-def]
            calls.append((name, len(batch)))
            return [Measured(token_ids=[1], seconds=1.0, stats=SpecStats()) for _ in batch]

        return decode

    decoders = {"a": decoder("a"), "b": decoder("b")}
    run = run_interleaved(
        decoders,
        prompts,
        batch_size=2,
        repeats=2,
        warm_up=1,
        on_progress=lambda done, note: None,
        reference="a",
    )
    assert calls[:2] == [("a", 2), ("b", 2)]  # warm-up
    assert [name for name, _ in calls[2:8]] == ["a", "b", "b", "a", "a", "b"]
    assert all(len(repeats) == 2 for repeats in run.results["a"])
    assert [row.id for row in run.rows] == [prompt.id for prompt in prompts]
    assert len(run.warm_up["b"]) == 2


def test_bootstrap_interval_covers_the_ratio_and_needs_two_prompts() -> None:
    low, high = ratio_interval([2.0, 4.0, 3.0, 5.0], [1.0, 2.0, 2.0, 2.0]) or (0, 0)
    assert low < 14 / 7 < high
    assert ratio_interval([1.0], [1.0]) is None
    assert ratio_interval([3.0] * 9, [2.0] * 9) == pytest.approx((1.5, 1.5))


@pytest.mark.parametrize(
    "text", ["chain", "chain:0", "chain:x", "tree:3:4", "tree:3x2", "bush:3", "chain:33", "tree:5x2:3"]
)
def test_wrong_shapes_are_usage_errors_that_name_the_option(text: str) -> None:
    """B71: k = 0, nodes below depth, fractions: the message names flag and value."""
    with pytest.raises(UsageError, match=r"--shape"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["bench", "no-such-folder"], 1, "no-such-folder"),
        (["bench", "TARGET", "--data", "no_such_set"], 1, "no_such_set"),
        (["bench", "TARGET", "--shape", "chain:0"], 2, "--shape"),
        (["bench", "TARGET", "--data", "DATA", "--draft", "nothing-here"], 1, "--draft"),
        (["bench", "TARGET", "--data", "mt_bench"], 1, "512"),
        (["bench", "TARGET", "--out", "DATA/x.json"], 2, "--out"),
        (["generate", "TARGET", "--prompts", "DATA", "--out", "DATA/x.json"], 2, "--out"),
        (["bench", "TARGET", "--transformers", "--temperature", "1"], 2, "--transformers"),
        (["generate", "TARGET", "--prompt", "x", "--temperature", "nan"], 2, "--temperature"),
        (["generate", "TARGET", "--prompt", "x", "--prompts", "dev"], 2, "--prompts"),
        (["generate", "TARGET", "--prompt", "the " * 600], 1, "512"),
        (["regenerate", "dev", "--target", "TARGET", "--out", "x.jsonl", "--order", "up"], 2, "--order"),
        (["regenerate", "dev", "--target", "no-such-folder", "--out", "x.jsonl"], 1, "no-such-folder"),
    ],
)
def test_wrong_input_is_one_line_that_names_what_was_wrong(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {"TARGET": str(tiny_llama), "DATA": str(prompts), "DATA/x.json": str(prompts / "x.json")}
    assert main([known.get(word, word) for word in arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert list(tmp_path.glob("x.jsonl")) == []
