"""The prefix cache in the whole engine: same text, same proposals, and nothing computed twice.

A warm run is held against a cold one of an engine without the cache, proposal by proposal: acceptance alone
would hide one stale draft row.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import TapDrafter
from specdec.engine import Engine
from specdec.request_options import RequestOptions
from specdec.sequence import SamplingParams, Sequence
from specdec.tree import DraftTree

GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
CHAIN = SpecConfig(max_depth=4, max_nodes=4, adaptive=False, ngram_min=1)
TREE = SpecConfig(max_depth=3, top_k=3, max_nodes=8, adaptive=False, ngram_min=1)
SETTINGS = [("ngram", CHAIN), ("head", CHAIN), ("head", TREE), ("ngram+head", TREE)]
SETTING_IDS = ["ngram-chain", "head-chain", "head-tree", "both-tree"]


@pytest.fixture(scope="module")
def draft(
    tiny_llama: Path, random_draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return random_draft(tiny_llama, tmp_path_factory.mktemp("draft") / "head")


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> Engine:
    """The weights that every engine of this file shares."""
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=64))


Make = Callable[..., Engine]


@pytest.fixture
def make(base: Engine, draft: Path) -> Make:
    def made(drafter: str = "none", clock: Callable[[], float] = lambda: 0.0, **config: Any) -> Engine:
        spelling = None if drafter == "none" else drafter.replace("head", str(draft))
        settings = {"kv_tokens": 2048, "spec": CHAIN, **config}
        return Engine(base, draft=spelling, config=EngineConfig(**settings), clock=clock)

    return made


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(264) for _ in range(length)]


def watch_trees(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Every tree that will be proposed: tokens and parents."""
    seen: list[tuple[list[int], list[int]]] = []
    if engine.drafter is not None:
        propose = engine.drafter.propose

        def watched(requests: Any) -> list[DraftTree]:
            trees = propose(requests)
            seen.extend((list(tree.token_ids), list(tree.parents)) for tree in trees)
            return trees

        engine.drafter.propose = watched  # type: ignore[method-assign]
    return seen


def run(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> Sequence:
    """One request, with the audit after each step."""
    seq = engine.add(prompt, params, RequestOptions(**options))
    while not seq.is_finished:
        engine.step()
        engine.audit()
    if engine.prefixes is not None and engine.prefixes.tiers is not None:
        assert engine.prefixes.tiers.settle()
    return seq


def solo(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], list[Any]]:
    """Text and trees of an engine without the cache."""
    assert engine.prefixes is None
    seen = watch_trees(engine)
    return run(engine, prompt, params).output_ids, seen


@pytest.mark.parametrize(("drafter", "spec"), SETTINGS, ids=SETTING_IDS)
@pytest.mark.parametrize("shared", [16, 31, 33])
def test_a_hit_changes_no_token_and_no_proposal(
    make: Make, drafter: str, spec: SpecConfig, shared: int
) -> None:
    """B52: the next token after the shared part differs, at and around the border of a block."""
    first = text(1, 60)
    second = [*first[:shared], (first[shared] + 1) % 264, *text(2, 12)]
    expected = solo(make(drafter, spec=spec, prefix_cache=False), second)
    engine = make(drafter, spec=spec)
    run(engine, first)
    trees = watch_trees(engine)
    seq = run(engine, second)
    assert (seq.output_ids, trees) == expected
    # the draft row of the last shared token depends on the one behind it; at a border its state is kept
    behind = "head" in drafter and shared % 16 > 0
    assert seq.num_cached_tokens == shared - behind
    assert engine.prefixes is not None
    assert engine.prefixes.counts.copied == (shared % 16 > behind or (shared % 16 == 0 and "head" in drafter))
    # the first one's blocks are as they were: its own text comes back whole, draft rows included
    again = solo(make(drafter, spec=spec, prefix_cache=False), first)
    trees.clear()
    repeated = run(engine, first)
    assert (repeated.output_ids, trees) == again
    assert repeated.num_cached_tokens == 59


@pytest.mark.parametrize("drafter", ["none", "head"])
def test_a_prompt_that_ends_with_a_block_still_computes_its_last_token(make: Make, drafter: str) -> None:
    """B52: 32 tokens, page 16, asked twice."""
    prompt = text(3, 32)
    expected = solo(make(drafter, prefix_cache=False), prompt)
    engine = make(drafter)
    run(engine, prompt)
    trees = watch_trees(engine)
    seq = run(engine, prompt)
    assert (seq.output_ids, trees) == expected
    assert seq.num_cached_tokens == 31
    assert seq.stats.verify_steps > 0


@pytest.mark.parametrize(("drafter", "spec"), SETTINGS, ids=SETTING_IDS)
def test_the_turns_of_a_talk_recompute_nothing(make: Make, drafter: str, spec: SpecConfig) -> None:
    """Each turn repeats the whole talk; only the last token of an answer never had a row."""
    engine = make(drafter, spec=spec)
    trees = watch_trees(engine)
    rng = random.Random(9)
    for talk in range(2):
        history, repeated = text(20 + talk, 40), 0
        for turn in range(3):
            expected = solo(make(drafter, spec=spec, prefix_cache=False), history)
            trees.clear()
            seq = run(engine, history)
            assert (seq.output_ids, trees) == expected
            assert seq.num_cached_tokens == max(0, repeated - 1)
            repeated = len(seq.token_ids)
            history = seq.token_ids + text(100 * talk + turn, rng.randrange(1, 20))


@pytest.mark.parametrize(("drafter", "spec"), SETTINGS, ids=SETTING_IDS)
def test_a_request_that_gives_way_at_any_step_comes_back_as_it_was(
    make: Make, drafter: str, spec: SpecConfig
) -> None:
    """Also where all it had is there, thanks to a twin: then the first thing it does again is to draft."""
    prompt = text(12, 27)
    expected = solo(make(drafter, spec=spec, prefix_cache=False), prompt)
    engine = make(drafter, spec=spec, block_size=4)
    trees = watch_trees(engine)
    assert engine.drafter is not None
    run(engine, prompt, cache_salt="twin")
    for every, salt in ((2, "alone"), (3, "alone too"), (2, "twin"), (3, "twin")):
        trees.clear()
        seq, steps = engine.add(prompt, GREEDY, RequestOptions(cache_salt=salt)), 0
        while not seq.is_finished:
            engine.step()
            steps += 1
            if steps % every == 0 and not seq.is_finished:
                engine.scheduler.preempt(seq)
                engine.drafter.release(seq.seq_id)
            engine.audit()
        assert (seq.output_ids, trees) == expected
    assert engine.prefixes is not None
    assert engine.prefixes.counts.resumed > 0


def test_a_request_without_drafts_serves_one_with_and_the_other_way_round(make: Make) -> None:
    """Rows of a request that kept no taps are no use to a head; the head's rows are of use to all."""
    prompt = text(5, 50)
    plain = SamplingParams(max_tokens=20, ignore_eos=True, speculate=False)
    expected = solo(make("head", prefix_cache=False), prompt)
    engine = make("head")
    assert run(engine, prompt, plain).output_ids == expected[0]
    assert run(engine, prompt, plain).num_cached_tokens == 49
    trees = watch_trees(engine)
    seq = run(engine, prompt)
    assert seq.num_cached_tokens == 0
    assert (seq.output_ids, trees) == expected
    trees.clear()
    assert run(engine, prompt).num_cached_tokens == 49
    assert trees == expected[1]
    assert run(engine, prompt, plain).output_ids == expected[0]


@pytest.mark.parametrize("drafter", ["ngram", "head"])
def test_another_salt_finds_nothing(make: Make, drafter: str) -> None:
    prompt = text(6, 40)
    engine = make(drafter)
    found = [
        run(engine, prompt, cache_salt=salt).num_cached_tokens for salt in ("a", "b", None, "a", "b", None)
    ]
    assert found == [0, 0, 0, 39, 39, 39]


@pytest.mark.parametrize("drafter", ["ngram", "head"])
def test_concurrent_requests_share_a_prefix_while_it_is_in_use(make: Make, drafter: str) -> None:
    system = text(7, 64)
    prompts = [system + text(30 + row, 5 + row) for row in range(6)]
    expected = [solo(make(drafter, prefix_cache=False), prompt)[0] for prompt in prompts]
    engine = make(drafter)
    sequences = [engine.add(prompts[0], GREEDY)]
    for _ in range(3):
        engine.step()
    sequences += [engine.add(prompt, GREEDY) for prompt in prompts[1:]]
    while engine.scheduler.has_work:
        engine.step()
        engine.audit()
    assert [seq.output_ids for seq in sequences] == expected
    assert [seq.num_cached_tokens for seq in sequences[1:]] == [64] * 5
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("drafter", ["none", "head"])
def test_a_full_pool_gives_blocks_up_and_stale_ones_are_never_served(make: Make, drafter: str) -> None:
    """B52: fill the pool until cached blocks are used for others, then ask the old prompt again."""
    old = text(8, 40)
    expected = solo(make(drafter, prefix_cache=False), old)
    engine = make(drafter, kv_tokens=160)
    assert engine.prefixes is not None
    run(engine, old)
    for seed in range(40, 46):
        run(engine, text(seed, 60))
    assert engine.prefixes.counts.evicted > 0
    trees = watch_trees(engine)
    seq = run(engine, old)
    assert seq.num_cached_tokens == 0
    assert (seq.output_ids, trees) == expected


@pytest.mark.parametrize("drafter", ["ngram", "ngram+head"])
@pytest.mark.parametrize("disk", [False, True], ids=["host", "disk"])
def test_blocks_come_back_from_colder_tiers_as_they_were(
    make: Make, drafter: str, disk: bool, tmp_path: Path
) -> None:
    old = text(8, 40)
    other = [*old[:32], (old[32] + 1) % 264, *text(9, 9)]
    tiers = {"disk_cache_dir": str(tmp_path)} if disk else {"host_cache_gb": 0.1}
    engine = make(drafter, kv_tokens=160, **tiers)
    assert engine.prefixes is not None
    run(engine, old)
    for prompt in (old, other, old):
        expected = solo(make(drafter, prefix_cache=False), prompt)
        for seed in range(40, 46):
            run(engine, text(seed, 60))
        fetched = engine.prefixes.counts.fetched
        trees = watch_trees(engine)
        seq = run(engine, prompt)
        assert (seq.output_ids, trees) == expected
        assert seq.num_cached_tokens == 32
        assert engine.prefixes.counts.fetched >= fetched + 2
    if disk:
        # another engine finds the files, and one with another draft finds none of a head's
        run(again := make(drafter, disk_cache_dir=str(tmp_path)), old)
        assert again.prefixes is not None
        assert again.prefixes.counts.hits == 32
        stranger = make("none" if "head" in drafter else "head", disk_cache_dir=str(tmp_path))
        assert run(stranger, old).num_cached_tokens == 0


def test_damaged_and_foreign_files_are_misses(make: Make, tmp_path: Path) -> None:
    prompt = text(8, 70)
    expected = solo(make("head", prefix_cache=False), prompt)
    run(make("head", kv_tokens=112, disk_cache_dir=str(tmp_path)), prompt)
    engine = make("head", kv_tokens=112, disk_cache_dir=str(tmp_path))
    run(engine, prompt)
    run(engine, text(41, 80))
    files = sorted(tmp_path.glob("*/*.kv"))
    assert len(files) >= 4
    for index, file in enumerate(files):
        content = bytearray(file.read_bytes())
        match index % 4:
            case 0:
                content[len(content) // 2] ^= 1
            case 1:
                content = content[: len(content) - 7]
            case 2:
                content = bytearray(files[(index + 1) % len(files)].read_bytes())
            case _:
                content = bytearray()
        file.write_bytes(content)
    warm = make("head", kv_tokens=112, disk_cache_dir=str(tmp_path))
    trees = watch_trees(warm)
    seq = run(warm, prompt)
    assert seq.num_cached_tokens == 0
    assert (seq.output_ids, trees) == expected


def test_an_end_inside_an_accepted_run_leaves_no_unwritten_token_in_the_index(make: Make) -> None:
    """Rows accepted beyond the end of the text are not part of it; later turns must not find them."""
    prompt = [5, 9] * 20
    whole = run(make("ngram", prefix_cache=False), prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    for length in range(6, 30, 3):
        engine = make("ngram", spec=SpecConfig(max_depth=8, max_nodes=8, adaptive=False, ngram_min=1))
        short = run(engine, prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        assert short.output_ids == whole.output_ids[:length]
        assert engine.prefixes is not None
        known = sum(len(entry.tokens) for entry in engine.prefixes._index.entries.values())
        assert known == len(short.token_ids) - 1
        follow = [*short.token_ids, 77, 78, 79]
        assert run(engine, follow).output_ids == solo(make("ngram", prefix_cache=False), follow)[0]


def test_rows_that_broke_a_request_are_not_cached(make: Make) -> None:
    """A NaN in the KV rows would break every later request that begins alike."""
    prompt = text(11, 40)
    engine = make("none")
    expected = run(make("none", prefix_cache=False), prompt).output_ids
    logits = engine.decoder.logits
    try:
        engine.decoder.logits = lambda hidden: logits(hidden) * float("nan")  # type: ignore[method-assign]
        assert run(engine, prompt).finish_reason == "error"
    finally:
        del engine.decoder.logits
    assert engine.prefixes is not None
    assert engine.prefixes.num_cached == 0
    assert run(engine, prompt).output_ids == expected


def test_a_drafter_reads_its_rows_from_the_shared_blocks(make: Make) -> None:
    engine = make("ngram+head")
    assert isinstance(engine.drafter, TapDrafter)
    assert len(engine.drafter.caches) == 1
    assert not isinstance(make("ngram").drafter, TapDrafter)
