"""Steps launched before the one before them is read change no text, no count, and no block's owner.

On the processor nothing runs at the same time, but the order of the host's work is that of a card.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.device.flight import Fetch
from specdec.engine import Engine
from specdec.request_options import RequestOptions
from specdec.requests import GenerationResult
from specdec.sampling_params import SamplingParams
from specdec.sequence import Sequence

CHAIN = SpecConfig(max_depth=4, max_nodes=4, adaptive=False)
SHORT = SpecConfig(max_depth=2, max_nodes=2, adaptive=False)
TREE = SpecConfig(max_depth=3, top_k=2, max_nodes=6, adaptive=False)
ADAPTIVE = SpecConfig(max_depth=3, max_nodes=3)
KINDS: list[dict[str, Any]] = [
    {},
    {"spec": SHORT},
    {"temperature": 0.9, "top_p": 0.9, "rule": "coupled"},
    {"stop_token_ids": tuple(range(0, 264, 9))},
    {"spec": TREE, "temperature": 0.7, "rule": "coupled"},
    {"stop": ("e",), "spec": TREE},
    {"speculate": False, "temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_k": 8, "rule": "block"},
    {"temperature": 1.1, "top_k": 8, "rule": "block", "spec": ADAPTIVE},
    {"temperature": 0.8, "spec": TREE, "rule": "target-only"},
]
HOSTS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"logprobs": 1},
    {"temperature": 1.0, "rule": "rejection"},
    {"spec": ADAPTIVE},
    {"spec": ADAPTIVE, "temperature": 1.0, "rule": "coupled"},
]


@dataclass(frozen=True)
class Known:
    """A request and what it says alone, without overlap."""

    prompt: list[int]
    params: SamplingParams
    result: GenerationResult


def made(knowing_engine: Callable[..., Engine], known: list[Known], **settings: Any) -> Engine:
    """An engine on the device path whose drafts know the texts of some requests."""
    texts = {which.params.seed: which.prompt + which.result.token_ids for which in known}
    sizes: dict[str, Any] = {"kv_tokens": 2048, "max_num_seqs": 16, "kernels": "reference", "spec": CHAIN}
    return knowing_engine(texts, **{**sizes, **settings})


def requests(kinds: list[dict[str, Any]], count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    roots = [[rng.randrange(3, 250) for _ in range(length)] for length in (7, 19, 34)]
    made = []
    for number in range(count):
        prompt = [*rng.choice(roots), *(rng.randrange(3, 250) for _ in range(rng.randrange(1, 5)))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 30), ignore_eos=True, seed=number, **kinds[number % len(kinds)]
        )
        made.append((prompt, params))
    return made


def alone(
    knowing_engine: Callable[..., Engine], kinds: list[dict[str, Any]], count: int, seed: int = 3
) -> list[Known]:
    engine = made(knowing_engine, [], overlap=False, prefix_cache=False)
    return [
        Known(prompt, params, engine.generate([prompt], params)[0])
        for prompt, params in requests(kinds, count, seed)
    ]


@pytest.fixture(scope="module")
def known(knowing_engine: Callable[..., Engine]) -> list[Known]:
    return alone(knowing_engine, KINDS, 16)


@pytest.fixture(scope="module")
def known_of_hosts(knowing_engine: Callable[..., Engine]) -> list[Known]:
    return alone(knowing_engine, [*KINDS, *HOSTS], 24, seed=4)


def answers(engine: Engine, known: list[Known]) -> list[tuple[Any, ...]]:
    results = engine.generate([which.prompt for which in known], [which.params for which in known])
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return [(r.token_ids, r.text, r.finish_reason, r.stats.to_dict()) for r in results]


def test_text_and_every_count_are_those_of_steps_one_after_another(
    knowing_engine: Callable[..., Engine], known: list[Known]
) -> None:
    """Ends of every kind in the middle of steps; prompts are read while others decode."""
    settings: dict[str, Any] = {"max_batch_tokens": 256, "max_num_seqs": 5}
    expected = answers(made(knowing_engine, known, overlap=False, **settings), known)
    assert [tokens for tokens, *_ in expected] == [which.result.token_ids for which in known]
    engine = made(knowing_engine, known, **settings)
    assert answers(engine, known) == expected
    assert {"stop", "length"} == {reason for _, _, reason, _ in expected}
    per_depth = sum((Counter(dict(enumerate(s["accepted_per_depth"]))) for *_, s in expected), Counter())
    assert per_depth[3] > 0, "no whole chain was accepted"
    assert engine.pipeline.steps_ahead > 10
    assert "a request waits" in engine.pipeline.declined
    # the same prompts again: what the cache holds are true rows
    assert [tokens for tokens, *_ in answers(engine, known)] == [tokens for tokens, *_ in expected]
    assert engine.prefixes is not None
    assert engine.prefixes.counts.hits > 0


def play(
    engine: Engine, now: list[float], pool: list[Known], rng: random.Random, arrivals: float, count: int = 14
) -> Counter[str]:
    """One schedule of arrivals, aborts and deadlines; every text is checked, every step audited."""
    seen: Counter[str] = Counter()
    open_ones: dict[int, tuple[Sequence, Known]] = {}
    added = 0
    while added < count or open_ones:
        while added < count and (not open_ones or rng.random() < arrivals):
            which = rng.choice(pool)
            options = RequestOptions(
                priority=rng.randrange(2), deadline_s=rng.choice([None] * 5 + [3.0]), kv_ttl_s=0.0
            )
            seq = engine.add(which.prompt, which.params, options)
            open_ones[seq.seq_id] = seq, which
            added += 1
        if rng.random() < 0.12:
            seq, which = open_ones.pop(rng.choice(list(open_ones)))
            engine.abort([seq])
            assert seq.output_ids == which.result.token_ids[: seq.num_output]
            seen["abort in flight"] += bool(engine.pipeline.held_tables)
        if engine.scheduler.has_work:
            for seq in engine.step():
                _, which = open_ones.pop(seq.seq_id)
                seen[str(seq.finish_reason)] += 1
                whole = which.result.token_ids
                assert seq.output_ids == (
                    whole[: seq.num_output] if seq.finish_reason == "timeout" else whole
                )
        engine.audit()
        now[0] += rng.random()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return seen


def test_random_schedules_keep_every_text_and_every_block(
    knowing_engine: Callable[..., Engine], known: list[Known], known_of_hosts: list[Known]
) -> None:
    seen: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for seed in range(4):
        rng, now = random.Random(seed), [0.0]
        pool = known_of_hosts if seed < 2 else known
        engine = made(
            knowing_engine,
            pool,
            clock=lambda now=now: now[0],  # type: ignore[misc]
            kv_tokens=[96, 256, 112, 256][seed],
            block_size=rng.choice([4, 8, 16]),
            max_num_seqs=8,
            max_batch_tokens=[256, 64, 16, 256][seed],
        )
        for _ in range(2):
            seen += play(engine, now, pool, rng, [0.7, 0.3][seed % 2])
        seen["preempted"] += engine.scheduler.num_preemptions
        seen["ahead"] += engine.pipeline.steps_ahead
        reasons += engine.pipeline.declined
    assert all(seen[what] for what in ("stop", "length", "timeout", "abort in flight", "preempted")), seen
    assert seen["ahead"] > 30
    assert {"a request waits", "token budget"} <= set(reasons), reasons


def test_the_next_step_is_launched_before_the_last_one_is_read_or_committed(
    knowing_engine: Callable[..., Engine], known: list[Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(knowing_engine, known)
    step, events = engine.device_step, []
    assert step is not None
    wait, commit, launch_after = Fetch.wait, engine._commit, step.launch_after
    monkeypatch.setattr(Fetch, "wait", lambda fetch: (events.append("wait"), wait(fetch))[1])
    monkeypatch.setattr(engine, "_commit", lambda *a: (events.append("commit"), commit(*a))[1])
    monkeypatch.setattr(step, "launch_after", lambda *a: (events.append("launch"), launch_after(*a))[1])
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    engine.generate([known[0].prompt], params)
    ahead = engine.pipeline.steps_ahead
    assert ahead > 3
    # the prompt's step, then each step ahead and the one before it, and one step at the end
    assert events == ["commit", *["launch", "wait", "commit"] * ahead, "wait", "commit"]


def test_blocks_of_an_aborted_sequence_are_free_only_after_its_step(
    knowing_engine: Callable[..., Engine],
) -> None:
    engine = made(knowing_engine, [], prefix_cache=False)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first, second = (engine.add([5, 6, 7 + index], params) for index in range(2))
    for _ in range(4):
        engine.step()
    assert engine.pipeline.steps_ahead > 0
    engine.abort([first])
    assert engine.pipeline.held_tables
    assert not first.block_table
    held = [block for table in engine.pipeline.held_tables for block in table]
    assert all(engine.blocks.users(block) == 1 for block in held)
    engine.step()
    assert not engine.pipeline.held_tables
    engine.abort([second])
    # nobody is left: nothing stays in flight
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_a_full_pool_makes_the_next_step_wait(
    knowing_engine: Callable[..., Engine], known: list[Known]
) -> None:
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    prompts = [known[0].prompt[:6], known[0].prompt[:5]]
    found = []
    for overlap in (False, True):
        engine = made(knowing_engine, [], overlap=overlap, kv_tokens=40, block_size=4)
        found.append([r.token_ids for r in engine.generate(prompts, params)])
        engine.audit()
    assert found[0] == found[1]
    assert engine.pipeline.declined["pool"] > 0
    assert engine.pipeline.steps_ahead > 0


@pytest.mark.parametrize("draft_name", [None, "ngram"])
def test_lookups_wait_for_their_text_and_plain_decoding_does_not(
    tiny_llama: Path, draft_name: str | None
) -> None:
    spec = SpecConfig(max_depth=3, max_nodes=3, adaptive=False, ngram_min=1)
    params = [SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=9, ignore_eos=True)]
    found = []
    for overlap in (False, True):
        config = EngineConfig(kv_tokens=512, kernels="reference", overlap=overlap, spec=spec)
        engine = Engine(tiny_llama, draft=draft_name, config=config)
        results = engine.generate([[5, 9, 5, 9, 7], [4, 8]], params)
        found.append([(result.token_ids, result.stats.to_dict()) for result in results])
    assert found[0] == found[1]
    assert ("drafts of the host" in engine.pipeline.declined) == (draft_name == "ngram")
    assert (engine.pipeline.steps_ahead > 5) == (draft_name is None)


def test_a_step_that_fails_in_flight_leaves_nothing_behind(
    knowing_engine: Callable[..., Engine], known: list[Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(knowing_engine, known)
    prompt, params = known[0].prompt, SamplingParams(max_tokens=24, ignore_eos=True)
    expected = engine.generate([prompt], params)[0].token_ids
    commit, calls = engine._commit, []

    def breaks(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("broken")
        commit(*arguments)

    monkeypatch.setattr(engine, "_commit", breaks)
    seq = engine.add(prompt, params)
    for _ in range(3):
        engine.step()
    with pytest.raises(RuntimeError, match="broken"):
        engine.step()
    assert engine.failed == [seq]
    engine.audit()
    while engine.scheduler.has_work:
        engine.step()
    assert seq.output_ids == expected


def test_bad_logits_in_a_step_end_their_sequence_though_the_next_one_runs(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=512, kernels="reference"))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 8, 4]]
    expected = engine.generate(prompts, params)[0].token_ids
    assert engine.device_step is not None
    target, passes = engine.device_step.runner.target, []
    inner = target.logits

    def poisoned(normed: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        logits = inner(normed)
        if len(passes) == 5:
            logits[1] = torch.nan
        return logits

    target.logits = poisoned  # type: ignore[method-assign]
    results = engine.generate(prompts, params)
    assert results[0].token_ids == expected
    assert results[1].finish_reason == "error"
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_card_writes_the_same_text_with_and_without_overlap(
    tiny_llama: Path, draft: Path, known: list[Known], cuda_graphs: bool
) -> None:
    found = []
    for overlap in (False, True):
        config = EngineConfig(
            kv_tokens=2048,
            max_num_seqs=5,
            spec=CHAIN,
            device="cuda",
            overlap=overlap,
            cuda_graphs=cuda_graphs,
        )
        engine = Engine(tiny_llama, draft=draft, config=config)
        found.append(answers(engine, known))
    assert engine.pipeline.steps_ahead > 20
    assert found[0] == found[1]
