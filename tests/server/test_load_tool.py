"""`specdec bench --url` against our own server: its figures reconcile with the server's counters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.engine import Engine

PROMPTS = 6


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"p{i}", "prompt": f"say {i} the in an"}) + "\n" for i in range(PROMPTS))
    )
    return path


def loaded(live: Any, prompts: Path, out: Path, *words: str) -> dict[str, Any]:
    command = ["bench", "--url", live.url, "--data", str(prompts), "--max-tokens", "8", "--out", str(out)]
    assert main([*command, "--ignore-eos", *words]) == 0
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def test_a_sweep_counts_what_the_server_counts(
    live: Any, prompts: Path, tmp_path: Path, valid_record: Callable[[dict[str, Any]], None]
) -> None:
    before = {name: live.metric(name) for name in NAMES}
    record = loaded(live, prompts, tmp_path / "load.json", "--concurrency", "1,3", "--warm-up", "0")
    valid_record(record)
    live.wait_until_idle()
    counted = {name: live.metric(name) - before[name] for name in NAMES}
    points = record["points"]
    assert [point["concurrency"] for point in points] == [1, 3]
    for point in points:
        assert (point["completed"], point["errors"], point["unsent"]) == (PROMPTS, {}, 0)
        assert point["completion_tokens"] == 8 * PROMPTS
        assert point["ttft_ms"]["n"] == point["tpot_ms"]["n"] == PROMPTS
    told = [point["acceptance"] for point in points]
    for name, key in NAMES.items():
        ours = sum(point[key] for point in points) if key in points[0] else sum(one[key] for one in told)
        assert counted[name] == ours, name
    assert told[0]["acceptance_length"] == told[0]["committed"] / told[0]["verify_steps"]
    assert (tmp_path / "load.png").exists()
    assert (record["schema"], record["model"]) == ("specdec.load/1", "tiny")
    assert record["run"]["defaults"]["concurrency"] == [1, 3]
    assert len(record["per_request"][1]) == PROMPTS
    assert "tpot_ms" in record["definitions"]


NAMES = {
    "prompt_tokens_total": "prompt_tokens",
    "generation_tokens_total": "completion_tokens",
    "spec_decode_num_verify_steps_total": "verify_steps",
    "spec_decode_num_draft_tokens_total": "drafted",
    "spec_decode_num_accepted_tokens_total": "accepted",
    "spec_decode_num_committed_tokens_total": "committed",
}


def test_turns_and_shared_prefixes_are_found_in_the_prefix_cache(
    live: Any, prompts: Path, tmp_path: Path
) -> None:
    """Two groups of three conversations with two turns each: at least prefixes and histories are found."""
    shared = ["--shared-prefix", "120", "--prefix-groups", "2", "--turns", "2", "--cold"]
    point = loaded(live, prompts, tmp_path / "load.json", "--concurrency", "1", *shared)["points"][0]
    assert point["completed"] == 2 * PROMPTS
    # with one client: each of the other 4 first turns finds its group's prefix, each second turn its first
    assert point["cached_tokens"] > 0.8 * (4 * 120 + PROMPTS * 120)
    again = loaded(live, prompts, tmp_path / "load.json", "--concurrency", "1", *shared)["points"][0]
    # a salt of its own: nothing of the first run is found by the second
    assert again["cached_tokens"] == point["cached_tokens"]


def test_completions_sampled_by_seed_go_too(live: Any, prompts: Path, tmp_path: Path) -> None:
    words = [
        "--endpoint",
        "completions",
        "--temperature",
        "1",
        "--request-rate",
        "200",
        "--goodput",
        "e2el:60000",
    ]
    extra = ["--extra-body", '{"speculative": {"enabled": false}}']
    point = loaded(live, prompts, tmp_path / "load.json", *words, *extra)["points"][0]
    assert point["completed"] == PROMPTS
    assert point["request_rate"] == 200
    assert point["request_goodput"] == point["request_throughput"]
    assert point["acceptance"]["acceptance_length"] == 1


def test_refusals_of_the_server_are_counted_and_no_answer_at_all_is_a_failure(
    live: Any,
    make_engine: Callable[..., Engine],
    solo: Engine,
    serving: Any,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "load.json"
    with serving(make_engine(solo, max_num_seqs=1), max_waiting=1) as small:
        point = loaded(small, prompts, out, "--warm-up", "0", "--max-tokens", "64")["points"][0]
        small.wait_until_idle()
    refused = point["errors"].get("http 429", 0)
    assert refused >= 1
    assert point["completed"] + refused == PROMPTS
    capsys.readouterr()
    wrong = ["--extra-body", '{"top_p": 7}', "--warm-up", "0", "--limit", "2"]
    assert main(["bench", "--url", live.url, "--data", str(prompts), *wrong]) == 1
    assert "gave no whole answer; the first: http 400" in capsys.readouterr().err
    assert main(["bench", "--url", live.url, "--data", str(prompts), "--extra-body", '{"top_p": 7}']) == 1
    assert "the server does not answer as asked: http 400" in capsys.readouterr().err
