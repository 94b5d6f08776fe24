"""Random schedules on a real tiny engine: each text is that of its request alone, each step passes the audit.

Greedy, sampled, penalties, stops, trees, chains, lookups, rules that need whole trees, aborts, deadlines,
shared prefixes, turns of one talk, salts, pins, a pool so small that requests give way, cold tiers.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.request_options import RequestOptions
from specdec.sequence import SamplingParams, Sequence

CHAIN = SpecConfig(max_depth=4, max_nodes=4, ngram_min=1)
TREE = SpecConfig(max_depth=3, top_k=3, max_nodes=8, adaptive=False, ngram_min=1)
WIDE = SpecConfig(max_depth=6, top_k=2, max_nodes=12, adaptive=False, ngram_min=1)
STEADY = SpecConfig(max_depth=2, max_nodes=2, adaptive=False, ngram_min=1)
KINDS: list[dict[str, Any]] = [
    {},
    {"spec": TREE},
    {"speculate": False},
    {"stop": ("e",)},
    {"stop_token_ids": tuple(range(0, 264, 9))},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.0, "spec": WIDE, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.7, "top_k": 20, "speculate": False},
    {"temperature": 1.0, "spec": TREE, "rule": "rejection"},
    {"logit_bias": {7: 4.0, 11: -100.0}, "frequency_penalty": 0.5},
    {"temperature": 0.8, "rule": "coupled", "min_p": 0.02},
    {"spec": STEADY, "min_tokens": 4, "stop": ("a",)},
]


@dataclass(frozen=True)
class Known:
    """A request and what it says alone."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    finish_reason: str | None


def run_alone(engine: Engine, prompt: list[int], params: SamplingParams) -> Known:
    result = engine.generate([prompt], params)[0]
    return Known(prompt, params, result.token_ids, result.finish_reason)


@pytest.fixture(scope="module")
def draft(
    tiny_llama: Path, random_draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> str:
    return str(random_draft(tiny_llama, tmp_path_factory.mktemp("draft") / "head"))


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=64))


@pytest.fixture(scope="module")
def known(base: Engine, draft: str) -> dict[str, list[Known]]:
    """Requests run one at a time, without a prefix cache, by drafter; talks of up to three turns."""
    answers: dict[str, list[Known]] = {}
    for drafter in ("ngram", draft, f"ngram+{draft}"):
        rng = random.Random(3)
        engine = Engine(
            base, draft=drafter, config=EngineConfig(kv_tokens=512, spec=CHAIN, prefix_cache=False)
        )
        roots = [[rng.randrange(264) for _ in range(length)] for length in (9, 20, 33)]
        made: list[Known] = []
        for number in range(3 * len(KINDS)):
            history = rng.choice(roots)
            if made and rng.random() < 0.6:
                last = rng.choice(made)
                history = (last.prompt + last.tokens)[: rng.randrange(8, 70)]
            prompt = [*history, *(rng.randrange(264) for _ in range(rng.randrange(1, 6)))]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 16),
                ignore_eos=True,
                seed=number,
                **KINDS[number % len(KINDS)],
            )
            made.append(run_alone(engine, prompt, params))
        answers[drafter] = made
    return answers


def play(
    engine: Engine,
    now: list[float],
    pool: list[Known],
    rng: random.Random,
    requests: int,
    seen: Counter[str],
) -> None:
    """One schedule; counts what happened."""
    open_ones: dict[int, tuple[Sequence, Known]] = {}
    added = 0
    while added < requests or open_ones:
        while added < requests and (not open_ones or rng.random() < 0.6):
            which = rng.choice(pool)
            options = RequestOptions(
                priority=rng.randrange(3),
                cache_salt=rng.choice([None, None, None, "tenant"]),
                kv_ttl_s=rng.choice([0.0, 3.0, 30.0]),
                deadline_s=rng.choice([None] * 9 + [4.0]),
            )
            seq = engine.add(which.prompt, which.params, options)
            open_ones[seq.seq_id] = seq, which
            added += 1
        if rng.random() < 0.03:
            seq, _ = open_ones.pop(rng.choice(list(open_ones)))
            engine.abort([seq])
            seen["aborted"] += 1
        if engine.scheduler.has_work:
            for seq in engine.step():
                _, expected = open_ones.pop(seq.seq_id)
                if seq.finish_reason == "timeout":
                    seen["timeout"] += 1
                    assert seq.output_ids == expected.tokens[: seq.num_output]
                else:
                    seen["whole"] += 1
                    seen["chunked"] += seq.prompt_len > engine.config.max_batch_tokens
                    seen["drafted"] += seq.stats.drafted
                    assert (seq.output_ids, seq.finish_reason) == (expected.tokens, expected.finish_reason)
        engine.audit()
        now[0] += rng.random()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    seen["schedules"] += 1


HAPPENS = (
    *("whole", "aborted", "timeout", "chunked", "drafted", "preempted", "pinned"),
    *("hits", "copied", "fetched", "resumed", "evicted"),
)


def explore(base: Engine, known: dict[str, list[Known]], seeds: range, requests: int) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        drafter = rng.choice(list(known))
        now = [0.0]
        config = EngineConfig(
            kv_tokens=rng.choice([128, 160, 256]),
            block_size=rng.choice([4, 8, 16]),
            max_num_seqs=rng.choice([4, 8, 64]),
            max_batch_tokens=rng.choice([16, 40, 256]),
            spec=CHAIN,
            host_cache_gb=rng.choice([0.0, 0.0005, 0.1]),
        )
        engine = Engine(base, draft=drafter, config=config, clock=lambda now=now: now[0])  # type: ignore[misc]
        # a pool goes through several schedules, so that blocks of earlier ones are about
        for _ in range(4):
            play(engine, now, known[drafter], rng, requests, seen)
        assert engine.prefixes is not None
        seen["preempted"] += engine.scheduler.num_preemptions
        seen["pinned"] += engine.prefixes.num_pinned
        seen.update(vars(engine.prefixes.counts))
    print(dict(seen))
    assert all(seen[name] for name in HAPPENS), f"the schedules never came to some of it: {seen}"


def test_texts_of_random_schedules_are_those_of_requests_alone(
    base: Engine, known: dict[str, list[Known]]
) -> None:
    explore(base, known, range(6), requests=16)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_texts_of_many_random_schedules_are_those_of_requests_alone(
    base: Engine, known: dict[str, list[Known]]
) -> None:
    """SPECDEC_ENGINE_SCHEDULES says how many, SPECDEC_SEED with which seed to begin."""
    count, first = (
        int(os.environ.get(name, default))
        for name, default in (("SPECDEC_ENGINE_SCHEDULES", "300"), ("SPECDEC_SEED", "1000"))
    )
    explore(base, known, range(first, first + count // 4), requests=64)


def test_a_request_aborted_at_any_step_leaves_no_block_and_harms_no_other(
    base: Engine, known: dict[str, list[Known]]
) -> None:
    """B54: while it waits, in the second of four chunks of its prompt, between its drafts."""
    drafter, pool = list(known.items())[-1]
    config = EngineConfig(kv_tokens=256, block_size=4, max_batch_tokens=16, spec=STEADY)
    engine = Engine(base, draft=drafter, config=config)
    others = pool[:3]
    longest = max(pool, key=lambda one: len(one.prompt))
    assert len(longest.prompt) >= 3 * 16
    where: set[str] = set()
    for steps in range(14):
        running = [engine.add(one.prompt, one.params) for one in others]
        gone = engine.add(longest.prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        # nothing of it may be known, or it would begin in the middle
        gone.options = RequestOptions(cache_salt=f"{steps}")
        for _ in range(steps):
            engine.step()
        where.add(
            gone.status.value if gone.num_computed == 0 else "chunk" if gone.is_prefilling else "drafts"
        )
        engine.abort([gone])
        engine.audit()
        assert not gone.block_table
        while engine.scheduler.has_work:
            assert gone not in engine.step()
            engine.audit()
        assert engine.blocks.num_used == 0
        assert [seq.output_ids for seq in running] == [one.tokens for one in others]
    assert where >= {"waiting", "chunk", "drafts"}


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_replay_of_talks_recomputes_little_and_accepts_as_much_as_cold(
    base: Engine, draft: str, block_size: int
) -> None:
    """Multi-turn replay: each prompt repeats the talk so far; acceptance by counts, not by luck."""
    rng = random.Random(5)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for drafter in ("ngram", f"ngram+{draft}"):
        settings: dict[str, Any] = {"kv_tokens": 8192, "block_size": block_size, "spec": TREE}
        cold = Engine(base, draft=drafter, config=EngineConfig(prefix_cache=False, **settings))
        warm = Engine(base, draft=drafter, config=EngineConfig(**settings))
        talks = [[rng.randrange(264) for _ in range(220 + 5 * talk)] for talk in range(4)]
        before = [0] * len(talks)
        repeated = recomputed = 0
        steps: dict[str, list[int]] = {"cold": [0, 0], "warm": [0, 0]}
        for _ in range(4):
            sequences = {}
            for name, engine in (("cold", cold), ("warm", warm)):
                sequences[name] = [engine.add(talk, params) for talk in talks]
                while engine.scheduler.has_work:
                    engine.step()
                for seq in sequences[name]:
                    steps[name][0] += seq.stats.committed
                    steps[name][1] += seq.stats.verify_steps
            assert [s.output_ids for s in sequences["warm"]] == [s.output_ids for s in sequences["cold"]]
            repeated += sum(before)
            recomputed += sum(
                max(0, length - seq.num_cached_tokens)
                for length, seq in zip(before, sequences["warm"], strict=True)
            )
            talks = [[*seq.token_ids, *(rng.randrange(264) for _ in range(7))] for seq in sequences["warm"]]
            before = [len(seq.token_ids) for seq in sequences["warm"]]
        assert steps["warm"] == steps["cold"]
        # an answer's last token, which has no row
        assert recomputed == 3 * len(talks) < 0.05 * repeated
