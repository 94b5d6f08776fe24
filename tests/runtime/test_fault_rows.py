"""Rows of shared/reference/faults.md about ends, parameters and exactness, in the whole engine.

B26, B35, B36, B43, B44, B45, B56, B73: the same claims hold for the pure functions in their own tests; here
the values go through prompt, scheduler, drafts and commit.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.hf import load_hf_model
from specdec.random_streams import RandomStream
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree, tree_from_paths

SPEC = SpecConfig(max_depth=8, max_nodes=16, adaptive=False)
# logits of our decoder and of transformers differ by this much on a tiny fp32 model
LOGIT_TOLERANCE = 1e-4
# the least and the greatest exponential number a race can meet
BORDERS_OF_RACES = (-np.log(1 - 2.0**-53), -np.log(2.0**-53))


class Told:
    """Fake drafter (ORACLE with a wrong sibling at every depth) that is told what follows each prompt."""

    name = "told"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, known: dict[tuple[int, ...], list[int]]) -> None:
        self.known = known

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        return None

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        trees = []
        for request in requests:
            seq = request.seq
            ahead = self.known[tuple(seq.token_ids[: seq.prompt_len])][seq.num_output :]
            ahead = ahead[: min(request.max_depth, request.max_nodes // 2)]
            wrong = [[*ahead[:depth], token ^ 1] for depth, token in enumerate(ahead)]
            trees.append(tree_from_paths(seq.token_ids[-1], [*wrong, ahead]))
        return trees


def told(plain: Engine, prompts: list[list[int]], texts: list[list[int]], **config: Any) -> Engine:
    known = {tuple(prompt): tokens for prompt, tokens in zip(prompts, texts, strict=True)}
    settings = {"kv_tokens": 2048, "spec": SPEC, **config}
    return Engine(plain, draft=lambda view: Told(known), config=EngineConfig(**settings))


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    made = {tuple(rng.randrange(264) for _ in range(rng.randint(1, 24))) for _ in range(200)}
    return [list(prompt) for prompt in sorted(made)]


@pytest.fixture(scope="module")
def reference(plain: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    return [result.token_ids for result in plain.generate(prompts, params)]


def test_two_hundred_greedy_texts_are_those_of_transformers(
    tiny_llama: Path, plain: Engine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """B73: fp32 on the CPU is a hard gate, plain and speculative; every token is the argmax of its prefix."""
    model = load_hf_model(tiny_llama)
    assert len(prompts) > 190
    for prompt, tokens in zip(prompts, reference, strict=True):
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
    engine = told(plain, prompts, reference)
    results = engine.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
    assert [result.token_ids for result in results] == reference
    assert all(result.stats.acceptance_length > 3 for result in results)


def test_a_raw_prompt_has_one_bos_whether_or_not_its_text_brings_one(plain: Engine) -> None:
    """B26: raw completion, raw completion that already starts with the BOS text, and chat."""
    bos = plain.model_config.bos_token_id
    chat = [{"role": "user", "content": "hi"}]
    for prompt in ("hi", "<|bos|>hi", chat):
        ids = plain.generate([prompt], SamplingParams(max_tokens=1))[0].prompt_token_ids
        assert ids.count(bos) == 1
        assert ids[0] == bos
    assert plain.encoder.encode("hi") == plain.encoder.encode("<|bos|>hi")
    # ids are taken as they are
    assert plain.encoder.encode([bos, bos, 5]) == [bos, bos, 5]


def with_end_tokens(folder: Path, out: Path, end: int | list[int], file: str) -> Path:
    """A copy of a target whose config or generation config names other end tokens."""
    shutil.copytree(folder, out)
    if file == "config.json":
        (out / "generation_config.json").unlink()
    raw = json.loads((out / file).read_text())
    (out / file).write_text(json.dumps({**raw, "eos_token_id": end}))
    return out


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_earliest_of_the_models_end_tokens_ends_an_accepted_run(
    tiny_llama: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    reference: list[list[int]],
    file: str,
) -> None:
    """B35: one end token or a list, each of the first tokens in turn; ignore_eos runs to max_tokens."""
    number = next(n for n, tokens in enumerate(reference) if len(set(tokens[:9])) == 9)
    prompt, tokens = prompts[number], reference[number]
    for place in range(9):
        later = tokens[min(place + 2, 8)]
        end = tokens[place] if place % 2 else [later, tokens[place]]
        folder = with_end_tokens(tiny_llama, tmp_path / str(place), end, file)
        engine = told(Engine(folder, config=EngineConfig(kv_tokens=256)), [prompt], [tokens])
        result, whole = engine.generate(
            [prompt, prompt],
            [SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, ignore_eos=True)],
        )
        assert (result.token_ids, result.finish_reason) == (tokens[: place + 1], "stop")
        assert (whole.token_ids, whole.finish_reason) == (tokens, "length")


def printable_run(plain: Engine, reference: list[list[int]]) -> tuple[int, list[str]]:
    """A text whose tokens 3 and 6 each show as one string that occurs nowhere before."""
    for number, tokens in enumerate(reference):
        pieces = [plain.encoder.tokenizer.decode([token]) for token in tokens]
        whole = plain.encoder.tokenizer.decode(tokens[:7], skip_special_tokens=True)
        if all(
            pieces[at].isascii() and pieces[at].isprintable() and whole.count(pieces[at]) == 1
            and tokens.index(tokens[at]) == at
            for at in (3, 6)
        ):  # fmt: skip
            return number, pieces
    raise AssertionError("no text with two printable tokens; use another seed")


@pytest.mark.parametrize("by", ["stop_token_ids", "stop"])
def test_stop_and_cap_inside_one_accepted_run(
    plain: Engine, prompts: list[list[int]], reference: list[list[int]], by: str
) -> None:
    """B36: token 0 comes with the prompt's pass, tokens 1 to 6 are one run."""
    number, pieces = printable_run(plain, reference)
    prompt, tokens = prompts[number], reference[number]
    engine = told(plain, [prompt], [tokens], spec=SpecConfig(max_depth=6, max_nodes=12, adaptive=False))
    for stop, cap, reason, length in (
        (3, 6, "stop", 4),  # the stop comes before the cap
        (6, 4, "length", 4),  # the cap comes before the stop
        (3, 4, "stop", 4),  # both on one token
        (6, 7, "stop", 7),  # both on the bonus token of the run
    ):
        ends: dict[str, Any] = {by: (tokens[stop] if by == "stop_token_ids" else pieces[stop],)}
        params = SamplingParams(max_tokens=cap, ignore_eos=True, **ends)
        result = engine.generate([prompt], params)[0]
        assert (result.finish_reason, result.token_ids) == (reason, tokens[:length])
        if by == "stop" and reason == "stop":
            assert pieces[stop] not in result.text
        last = list(engine.stream([prompt], params))[-1].result
        assert last is not None
        assert (last.text, last.finish_reason) == (result.text, reason)


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 1e-5])
def test_tiny_temperatures_are_the_greedy_path(
    plain: Engine, prompts: list[list[int]], reference: list[list[int]], temperature: float
) -> None:
    """B43: whatever the seed and the filters; drafts are accepted as at zero."""
    engine = told(plain, prompts, reference)
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, top_p=0.5, seed=seed)
        for seed in range(20)
    ]
    results = engine.generate(prompts[:20], params)
    assert [result.token_ids for result in results] == reference[:20]
    assert all(0 < result.stats.accepted <= result.stats.drafted for result in results)


def test_a_temperature_just_above_greedy_stays_finite(
    plain: Engine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """B43: at 1e-3 the law is all but one-hot, and no division blows up."""
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1e-3, seed=3)
    results = told(plain, prompts, reference).generate(prompts[:20], params)
    assert [result.token_ids for result in results] == [
        r.token_ids for r in plain.generate(prompts[:20], params)
    ]
    same = sum(result.token_ids == tokens for result, tokens in zip(results, reference, strict=False))
    assert same >= 18  # a near tie of 1e-3 may fall the other way


@pytest.mark.parametrize("first_arrives", [0, 1, 2])
def test_numbers_at_the_border_never_choose_an_excluded_token(
    tiny_llama: Path,
    plain: Engine,
    prompts: list[list[int]],
    first_arrives: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B42, B45: every random number of the engine is the smallest or the largest there is."""

    def stuck(self: RandomStream, position: int, count: int) -> np.ndarray:
        soon = (np.arange(count) + position) % 3 == first_arrives
        return np.where(soon, *BORDERS_OF_RACES)

    monkeypatch.setattr(RandomStream, "exponentials", stuck)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.3, top_k=5, seed=0)
    expected = [result.token_ids for result in plain.generate(prompts[:12], params)]
    results = told(plain, prompts[:12], expected).generate(prompts[:12], params)
    assert [result.token_ids for result in results] == expected
    assert all(result.stats.accepted > 0 for result in results)
    model = load_hf_model(tiny_llama)
    for prompt, tokens in zip(prompts, expected, strict=False):
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        fifth = logits.topk(5, dim=-1).values[:, -1]
        chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert bool((chosen >= fifth - LOGIT_TOLERANCE).all())


def test_seeds_of_a_batch_are_kept_apart_and_recorded(
    plain: Engine, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    """B56: [1, None, 2, 1] in one batch; a seed that was drawn is told and repeats its text."""
    base = {"max_tokens": 16, "ignore_eos": True}
    engine = told(plain, prompts, reference)
    params = [SamplingParams(temperature=1.0, seed=seed, **base) for seed in (1, None, 2, 1)]
    first, drawn, second, again = engine.generate([prompts[7]] * 4, params)
    alone = engine.generate([prompts[7]], params[0])[0]
    assert first.token_ids == again.token_ids == alone.token_ids
    assert len({tuple(result.token_ids) for result in (first, drawn, second)}) == 3
    replay = SamplingParams(temperature=1.0, seed=drawn.seed, **base)
    assert plain.generate([prompts[7]], replay)[0].token_ids == drawn.token_ids
    greedy = engine.generate([prompts[7]] * 3, [SamplingParams(seed=seed, **base) for seed in (1, None, 9)])
    assert {tuple(result.token_ids) for result in greedy} == {tuple(reference[7])}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_under_speculation_end_one_request(
    plain: Engine, prompts: list[list[int]], temperature: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B44: the tree of one request is poisoned in the third step; the other three are unharmed."""
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=seed)
        for seed in range(4)
    ]
    chosen = prompts[40:44]
    expected = [result.token_ids for result in plain.generate(chosen, params)]
    engine = told(plain, chosen, expected, spec=SpecConfig(max_depth=3, max_nodes=6, adaptive=False))
    verify: Callable[..., Any] = engine._verify
    steps: list[int] = []

    def poisoned(plan: Any, trees: Any, output: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            start = output.logits_start[1]
            output.logits[start : start + trees[1].num_nodes] = value
        return verify(plan, trees, output)

    monkeypatch.setattr(engine, "_verify", poisoned)
    results = engine.generate(chosen, params)
    assert results[1].finish_reason == "error"
    assert results[1].error
    assert results[1].token_ids == expected[1][: len(results[1].token_ids)]
    assert [results[n].token_ids for n in (0, 2, 3)] == [expected[n] for n in (0, 2, 3)]
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks
