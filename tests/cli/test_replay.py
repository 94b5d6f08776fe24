"""Replayed conversations: what is counted as repeated, and what a turn costs with the cache."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.datasets import Prompt
from specdec.cli.main import main
from specdec.cli.replaying.turns import conversations_of

TALKS = [
    {"id": "a", "turns": ["What is a prefix?", "Give an example."]},
    {"id": "b", "turns": ["Name a colour."]},
    {"id": "c", "turns": ["Count to ten.", "Now backwards."]},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(talk) + "\n" for talk in TALKS))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["replay", *words]) == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def test_turns_that_a_prompt_lacks_are_lent_by_those_behind_it() -> None:
    prompts = [
        Prompt(id=str(i), category="none", turns=turns) for i, turns in enumerate([("a", "b"), ("c",)])
    ]
    talks = conversations_of(prompts, 5, 3, 7)
    assert [talk.asks for talk in talks] == [["a", "b", "c"], ["c", "b", "c"]]
    assert [talk.seed for talk in talks] == [7, 8]


@pytest.mark.parametrize("block_size", ["4", "64"])
def test_later_turns_compute_no_more_than_a_token_again(
    tiny_llama: Path,
    data: Path,
    tmp_path: Path,
    block_size: str,
    capsys: pytest.CaptureFixture[str],
    valid_record: Callable[[dict[str, Any]], None],
) -> None:
    """Whatever the block size: a block of 64 is larger than what a turn adds."""
    out = tmp_path / "replay.json"
    words = [str(tiny_llama), "--data", str(data), "--max-tokens", "6", "--batch-size", "2"]
    summary = run(capsys, *words, "--block-size", block_size, "--out", str(out))
    assert (summary["conversations"], summary["turns"], summary["identical"]) == (3, 9, 9)
    assert summary["acceptance_difference"] == 0
    record = json.loads(out.read_text())
    valid_record(record)
    assert record["run"]["defaults"]["block_size"] == int(block_size)
    later = [turn for turn in record["per_turn"] if turn["turn"] > 1]
    assert summary["repeated_tokens"] == sum(turn["repeated_tokens"] for turn in later) > 0
    assert summary["recomputed_tokens"] == sum(turn["recomputed_tokens"] for turn in later)
    # an answer's last token has no row, and nothing else is computed again
    assert all(turn["recomputed_tokens"] <= 1 for turn in later)
    assert all(turn["prompt_tokens"] > turn["repeated_tokens"] for turn in later)


def test_a_pool_too_small_to_keep_all_gives_blocks_up_and_counts_what_that_costs(
    tiny_llama: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_llama), "--data", str(data), "--max-tokens", "4", "--batch-size", "1", "--turns", "2"]
    whole = run(capsys, *words)
    small = run(capsys, *words, "--kv-tokens", "144")
    assert small["blocks_given_up"] > whole["blocks_given_up"] == 0
    assert small["recomputed_share"] > whole["recomputed_share"]
    assert small["identical"] == small["turns"] == 6


def test_conversations_that_outgrow_the_context_are_refused_before_the_first_answer(
    tiny_llama: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tiny_llama), "--data", str(data), "--max-tokens", "4000"]) == 2
    assert "--turns (3): conversation a may have" in capsys.readouterr().err
