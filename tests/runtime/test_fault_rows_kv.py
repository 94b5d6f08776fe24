"""Rows of shared/reference/faults.md about trees, KV blocks and failing steps, in the whole engine.

B47, B49, B50, B75: what is read, written, kept and given back when drafts are odd or a step breaks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.attention import SequenceAttention, block_slots
from specdec.blocks import BlockManager
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.kernels import paged_attention
from specdec.paged_kv import PagedKVCache
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree, ancestor_mask, chain_tree, path_to

GUARD = 1e9
SPEC = SpecConfig(max_depth=8, max_nodes=16, adaptive=False)
TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
Plan = Callable[[DraftRequest, list[int]], DraftTree]


class Planned:
    """Fake drafter: `plan` makes each tree from the request and the tokens that will really follow."""

    name = "planned"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, known: dict[tuple[int, ...], list[int]], plan: Plan) -> None:
        self.known, self.plan, self.trees = known, plan, 0

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        return None

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        self.trees += len(requests)
        trees = []
        for request in requests:
            seq = request.seq
            known = self.known[tuple(seq.token_ids[: seq.prompt_len])]
            trees.append(self.plan(request, known[seq.num_output :]))
        return trees


def oracle(request: DraftRequest, ahead: list[int]) -> DraftTree:
    return chain_tree(request.seq.token_ids[-1], ahead[: min(request.max_depth, request.max_nodes)])


def random_tree(rng: random.Random) -> Plan:
    """Any shape; a node on the true path gets the true child at a random place among wrong ones."""

    def plan(request: DraftRequest, ahead: list[int]) -> DraftTree:
        tokens, parents, depths, true = [request.seq.token_ids[-1]], [-1], [0], [True]
        for _ in range(rng.randrange(request.max_nodes + 1)):
            parent = rng.choice([node for node, depth in enumerate(depths) if depth < request.max_depth])
            depth = depths[parent] + 1
            right = ahead[depth - 1] if depth <= len(ahead) else 0
            # a right token under a wrong node must not count, and a right sibling may stand there twice
            token = right if rng.random() < 0.6 else right ^ rng.choice((1, 2, 3))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            true.append(true[parent] and token == right)
        return DraftTree(token_ids=tokens, parents=parents)

    return plan


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(264) for _ in range(length)] for length in [*range(1, 20), 33, 47, 48]]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))


@pytest.fixture(scope="module")
def reference(plain: Engine, prompts: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """Plain decoding, which test_engine holds against full recomputation."""
    return {tuple(p): r.token_ids for p, r in zip(prompts, plain.generate(prompts, GREEDY), strict=True)}


def planned(plain: Engine, known: dict[tuple[int, ...], list[int]], plan: Plan, **config: Any) -> Engine:
    settings = {"kv_tokens": 2048, "spec": SPEC, **config}
    return Engine(plain, draft=lambda view: Planned(known, plan), config=EngineConfig(**settings))


def assert_all_given_back(engine: Engine) -> None:
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.scheduler.has_work


B47_PARENTS = [-1, 0, 0, 1, 1, 2, 5]


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31])
@pytest.mark.parametrize("table", [[5, 1, 6], [2, 3, 4]])
@pytest.mark.parametrize("window", [None, 4])
def test_a_tree_row_attends_to_the_prefix_and_its_ancestors_only(
    prefix: int, table: list[int], window: int | None
) -> None:
    """B47: kernel against a dense loop at page borders; all other rows of the pool hold 1e9."""
    count, heads, kv_heads, dim = len(B47_PARENTS), 4, 2, 24
    cache = PagedKVCache(num_layers=1, num_blocks=8, block_size=16, num_kv_heads=kv_heads, head_dim=dim)
    cache.data.fill_(GUARD)
    slots = cache.slots(table, 0, prefix + count)
    rows = torch.randn(2, kv_heads, len(slots), dim)
    cache.data[0][:, :, slots] = rows
    query = torch.randn(count, heads, dim)
    depths = DraftTree(token_ids=[0] * count, parents=B47_PARENTS).depths
    positions = [prefix + depth for depth in depths]

    def attend() -> torch.Tensor:
        entry = SequenceAttention(
            query_start=0,
            num_queries=count,
            context_len=prefix,
            num_new=count,
            slots=block_slots(table, 16, prefix + count),
            mask=ancestor_mask(B47_PARENTS),
            query_positions=positions,
            new_positions=positions,
        )
        return paged_attention(query, *cache.layer(0), [entry], window=window).view(count, heads, dim)

    before = attend()
    for node in range(count):
        seen = [*range(prefix), *(prefix + other for other in path_to(B47_PARENTS, node))]
        where = [*range(prefix), *(positions[other] for other in path_to(B47_PARENTS, node))]
        if window is not None:
            seen = [row for row, at in zip(seen, where, strict=True) if positions[node] - at < window]
        for head in range(heads):
            keys, values = rows[:, head // 2, seen]
            weights = torch.softmax(keys @ query[node, head] / dim**0.5, dim=0)
            assert torch.allclose(before[node, head], weights @ values, atol=1e-5)
    cache.data[0][:, :, slots[prefix + 3]] += 3.0
    after = attend()
    assert [node for node in range(count) if not torch.equal(before[node], after[node])] == [3]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_trees_change_no_token(
    plain: Engine, prompts: list[list[int]], seed: int, temperature: float
) -> None:
    """B46, B47: best child anywhere among siblings, duplicates, right tokens under wrong nodes."""
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=temperature, top_p=0.95, seed=index)
        for index in range(len(prompts))
    ]
    expected = [result.token_ids for result in plain.generate(prompts, params)]
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}
    engine = planned(plain, known, random_tree(random.Random(seed)))
    results = engine.generate(prompts, params)
    assert [result.token_ids for result in results] == expected
    assert engine.drafter.trees > 200  # type: ignore[union-attr]
    assert sum(result.stats.accepted for result in results) > 100
    assert sum(result.stats.drafted - result.stats.accepted for result in results) > 100
    assert_all_given_back(engine)


def test_a_drafter_with_nothing_to_say_half_the_time_changes_no_token(
    plain: Engine, prompts: list[list[int]], reference: dict[tuple[int, ...], list[int]]
) -> None:
    """B75: the root alone leaves no orphan row, and steps with and without drafts mix in a batch."""
    rng = random.Random(0)

    def plan(request: DraftRequest, ahead: list[int]) -> DraftTree:
        return oracle(request, ahead if rng.random() < 0.5 else [])

    engine = planned(plain, reference, plan, block_size=4, kv_tokens=400)
    assert [result.token_ids for result in engine.generate(prompts, GREEDY)] == list(reference.values())
    assert engine.scheduler.num_preemptions > 0
    assert_all_given_back(engine)


@pytest.mark.parametrize("shape", ["chain", "trees"])
def test_no_block_of_others_is_read_or_written(
    plain: Engine, prompts: list[list[int]], reference: dict[tuple[int, ...], list[int]], shape: str
) -> None:
    """B50: fewer than k slots left in the last page; every block nobody owns holds 1e9, at every step."""
    engine = planned(plain, reference, oracle if shape == "chain" else random_tree(random.Random(2)))
    data = engine.runner.cache.data.view(
        *engine.runner.cache.data.shape[:3], engine.blocks.num_blocks, 16, -1
    )
    data.fill_(GUARD)
    schedule, free = engine.scheduler.schedule, []

    def guarded() -> Any:
        plan = schedule()
        owned = {block for seq in engine.scheduler.running for block in seq.block_table}
        free[:] = [block for block in range(engine.blocks.num_blocks) if block not in owned]
        data[:, :, :, free] = GUARD
        return plan

    engine.scheduler.schedule = guarded  # type: ignore[method-assign]
    chosen = [prompt for prompt in prompts if 9 <= len(prompt) <= 17]
    sequences = [engine.add(prompt, GREEDY) for prompt in chosen]
    while engine.scheduler.has_work:
        engine.step()
        assert bool((data[:, :, :, free] == GUARD).all()), "a block that no sequence owns was written"
    assert [seq.output_ids for seq in sequences] == [reference[tuple(prompt)] for prompt in chosen]
    assert_all_given_back(engine)


def test_five_hundred_requests_leave_no_block_behind(
    plain: Engine, prompts: list[list[int]], reference: dict[tuple[int, ...], list[int]]
) -> None:
    """B49: page 4, trees of 16, random acceptance, preemption, aborts: the pool is whole each wave."""
    rng = random.Random(7)
    engine = planned(plain, reference, random_tree(rng), block_size=4, kv_tokens=112, max_num_seqs=8)
    short = [prompt for prompt in prompts if len(prompt) < 20]
    for _ in range(10):
        chosen = [rng.choice(short) for _ in range(50)]
        limits = [rng.randint(1, 10) for _ in chosen]
        params = [SamplingParams(max_tokens=limit, ignore_eos=True) for limit in limits]
        stream = engine.stream(chosen[:10], params[:10])
        for _ in range(rng.randrange(12)):
            next(stream, None)
        stream.close()
        assert_all_given_back(engine)
        for result, prompt, limit in zip(engine.generate(chosen, params), chosen, limits, strict=True):
            assert result.token_ids == reference[tuple(prompt)][:limit]
        assert_all_given_back(engine)
    assert engine.scheduler.num_preemptions > 10


@pytest.mark.parametrize("end", ["finish", "abort", "fail"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_step_that_fills_a_page_counts_it_once(plain: Engine, end: str, length: int, steps: int) -> None:
    """B49: page 4; every way to end, on every step around the border."""
    engine = Engine(plain, config=EngineConfig(block_size=4, kv_tokens=64))
    prompts, limit = [[9] * length, [8] * 6], steps if end == "finish" else 20
    stream = engine.stream(prompts, SamplingParams(max_tokens=limit, ignore_eos=True))
    if end == "fail":
        bad = torch.full((2, engine.model_config.vocab_size), float("nan"))
        verify = engine._verify
        calls: list[int] = []

        def poisoned(plan: Any, trees: Any, output: Any) -> Any:
            calls.append(1)
            if len(calls) == steps:
                output.logits[:] = bad[: len(output.logits)]
            return verify(plan, trees, output)

        engine._verify = poisoned  # type: ignore[method-assign]
    pieces = [next(stream) for _ in range(2 * steps)]
    engine.audit()
    stream.close()
    if end != "abort":
        assert {piece.result.finish_reason for piece in pieces[-2:] if piece.result} == {
            "length" if end == "finish" else "error"
        }
    assert_all_given_back(engine)


def test_a_block_given_back_twice_is_a_bug() -> None:
    blocks = BlockManager(4, 16)
    table: list[int] = []
    blocks.extend(table, 20)
    twin = list(table)
    blocks.release(table)
    with pytest.raises(AssertionError, match="released twice"):
        blocks.release(twin)


class Broken(RuntimeError):
    """What a test throws into a step."""


def break_at(step: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            raise Broken(f"call {step}")
        return function(*args, **kwargs)

    return broken


@pytest.mark.parametrize("where", ["propose", "forward", "logits", "commit", "bookkeeping"])
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_exception_in_a_step_frees_the_call_and_harms_no_other(
    plain: Engine,
    prompts: list[list[int]],
    reference: dict[tuple[int, ...], list[int]],
    where: str,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B75: the call that stepped ends with the error; others and later ones are as if it never was."""
    engine = planned(plain, reference, random_tree(random.Random(1)))
    other = engine.add(prompts[-1], GREEDY)
    target: dict[str, tuple[Any, str, int]] = {
        "propose": (engine.drafter, "propose", 3),
        "forward": (engine.decoder, "forward", 5),
        "logits": (engine.decoder, "logits", 5),
        "commit": (engine.runner, "commit", 5),
        "bookkeeping": (engine, "_commit", 13),
    }
    owner, name, step = target[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, break_at(step, getattr(owner, name)))
        with pytest.raises(Broken):
            list(getattr(engine, call)(prompts[3:7], GREEDY))
    engine.audit()
    assert [*engine.scheduler.running, *engine.scheduler.waiting] == [other]
    while not other.is_finished:
        engine.step()
    assert other.output_ids == reference[tuple(prompts[-1])]
    assert_all_given_back(engine)
    again = engine.generate(prompts, GREEDY)
    assert [result.token_ids for result in again] == list(reference.values())


@pytest.mark.parametrize("mine", [True, False])
def test_what_ended_in_a_step_that_breaks_keeps_no_block(
    plain: Engine, prompts: list[list[int]], reference: dict[tuple[int, ...], list[int]], mine: bool
) -> None:
    """B49, B75: a request ended, its own or another reader's, and the bookkeeping behind it raised."""
    engine = planned(plain, reference, oracle)
    commit = engine._commit

    def broken(share: Any, *rest: Any) -> None:
        commit(share, *rest)
        if share.seq.is_finished:
            raise Broken

    short, long = (SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 20))
    if not mine:
        engine.add(prompts[0], short)
    engine._commit = broken  # type: ignore[method-assign]
    with pytest.raises(Broken):
        engine.generate(prompts[1:3], [short if mine else long, long])
    engine._commit = commit  # type: ignore[method-assign]
    assert_all_given_back(engine)
    assert engine.generate(prompts[:1], GREEDY)[0].token_ids == reference[tuple(prompts[0])]


def test_two_streams_and_a_call_share_an_engine(
    plain: Engine, prompts: list[list[int]], reference: dict[tuple[int, ...], list[int]]
) -> None:
    """B75's kind: a step taken for one reader may finish what another reader waits for."""
    engine = planned(plain, reference, oracle)
    first, second = (engine.stream([prompt], GREEDY) for prompt in prompts[5:7])
    pieces = [[next(first)], [next(second)]]
    assert engine.generate([prompts[8]], GREEDY)[0].token_ids == reference[tuple(prompts[8])]
    pieces[0] += list(first)
    pieces[1] += list(second)
    for got, prompt in zip(pieces, prompts[5:7], strict=True):
        assert [token for piece in got for token in piece.token_ids] == reference[tuple(prompt)]
        assert got[-1].result is not None
    assert_all_given_back(engine)
