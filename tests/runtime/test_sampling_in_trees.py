"""Sampling parameters in the whole engine: with drafts, right or wrong, the text is that of plain decoding.

Plain decoding itself is held against transformers, one token at a time. At temperature 1 the coupled rule
makes the very string equal, which implies equality in law.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.requests import GenerationResult
from specdec.sampling_params import SamplingParams
from specdec.tree import DraftTree, chain_tree, tree_from_paths

TOKENS = 20
SPEC = SpecConfig(max_depth=6, max_nodes=14, adaptive=False)
PROMPTS = [[7, 3, 9, 20, 5], [40, 41], list(range(2, 50)), [100, 3, 100, 3, 100, 3]]
EOS, EOT = 265, 266


def no_recent(token_ids: list[int], logits: Tensor) -> Tensor:
    """A user's processor that depends on the last three tokens."""
    return logits.index_fill(0, torch.tensor(token_ids[-3:]), -50.0)


# one by one and together; the biases make drafted runs repeat tokens, so that counts matter
GIVEN: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.3, "logit_bias": {5: 4.0, 6: 4.0}},
    "presence": {"presence_penalty": 0.7, "logit_bias": {5: 5.0, 6: 4.5}},
    "frequency": {"frequency_penalty": 0.7, "logit_bias": {5: 6.0, 6: 5.5, 7: 5.0}},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.7,
        "logit_bias": {5: 9.0, 6: 8.5, 7: 8.0},
    },
    "bias": {"logit_bias": {5: 100.0}},
    "bad words": {"bad_words": ((5, 5), (6, 5, 6), (8,)), "logit_bias": {5: 7.0, 6: 6.5, 8: 50.0}},
    "allowed": {"allowed_token_ids": (3, 4, 5, 9, 200), "frequency_penalty": 0.4},
    "min tokens": {"min_tokens": 6, "logit_bias": {EOS: 60.0}},
    "processor": {"logits_processors": (no_recent,)},
    "filters": {"min_p": 0.02, "typical_p": 0.9, "top_k": 60, "top_p": 0.95, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 2, "repetition_penalty": 1.2},
}


def params_of(name: str, temperature: float, **more: Any) -> SamplingParams:
    settings = {"max_tokens": TOKENS, "seed": 11, "ignore_eos": name != "min tokens", **GIVEN[name], **more}
    return SamplingParams(temperature=temperature, **settings)


class Forger:
    """Drafter that knows the text of every request by its number and distorts it."""

    name = "forger"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, texts: list[list[int]], shape: str) -> None:
        self.texts, self.shape, self.rng = texts, shape, random.Random(shape)

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        return None

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> DraftTree:
        seq, rng = request.seq, self.rng
        root, depth = seq.token_ids[-1], request.max_depth
        ahead = self.texts[seq.seq_id % len(self.texts)][seq.num_output :][:depth]
        if self.shape == "oracle":
            return chain_tree(root, ahead[: request.max_nodes])
        if self.shape == "anti":
            # the same wrong token again and again: what a penalty of rejected drafts would change
            return chain_tree(root, [(ahead[0] ^ 1) if ahead else 5] * min(depth, request.max_nodes))
        paths = []
        for _ in range(request.max_nodes // 3):
            right = rng.randint(0, len(ahead))
            paths.append(
                [*ahead[:right], *(rng.choice((5, 6, 7, EOS, 30)) for _ in range(rng.randint(0, 2)))]
            )
        tree = tree_from_paths(root, [path[:depth] for path in paths])
        keep = min(tree.num_nodes, request.max_nodes + 1)
        return DraftTree(token_ids=tree.token_ids[:keep], parents=tree.parents[:keep])


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=8192))


@pytest.fixture(scope="module")
def requests() -> list[tuple[str, list[int]]]:
    """Every setting with every prompt, settings side by side in the batch."""
    return [(name, prompt) for prompt in PROMPTS for name in GIVEN]


@pytest.fixture(scope="module")
def expected(plain: Engine, requests: list[tuple[str, list[int]]]) -> dict[float, list[GenerationResult]]:
    prompts = [prompt for _, prompt in requests]
    return {
        temperature: plain.generate(prompts, [params_of(name, temperature) for name, _ in requests])
        for temperature in (0.0, 1.0)
    }


def reference(model: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy text under a request's parameters by full recomputation; penalties from transformers."""
    output: list[int] = []
    while len(output) < TOKENS:
        ids = torch.tensor([prompt + output])
        row = model(input_ids=ids).logits[:, -1]
        if params.allowed_token_ids is not None:
            keep = torch.tensor(params.allowed_token_ids)
            row = torch.full_like(row, float("-inf")).index_copy(1, keep, row[:, keep])
        if params.bad_words:
            words = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words], eos_token_id=None)
            # an empty output has no bad beginning; transformers wants at least one token
            row = words(torch.tensor([output or [0]]), row)
        if len(output) < params.min_tokens:
            row[:, [EOS, EOT]] = float("-inf")
        for token, bias in params.logit_bias.items():
            row[0, token] += bias
        for processor in params.logits_processors:
            row = processor(prompt + output, row[0])[None]
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, row)
        for token in set(output):
            row[0, token] -= params.frequency_penalty * output.count(token)
            row[0, token] -= params.presence_penalty
        output.append(int(row.argmax()))
        if not params.ignore_eos and output[-1] in (EOS, EOT):
            break
    return output


def test_plain_greedy_text_is_the_reference(
    tiny_llama: Path, requests: list[tuple[str, list[int]]], expected: dict[float, list[GenerationResult]]
) -> None:
    model = load_hf_model(tiny_llama)
    differing: set[str] = set()
    for index, ((name, prompt), result) in enumerate(zip(requests, expected[0.0], strict=True)):
        if prompt not in PROMPTS[:2]:
            continue
        assert result.token_ids == reference(model, prompt, params_of(name, 0.0)), (name, index)
        if result.token_ids != expected[0.0][index - index % len(GIVEN)].token_ids:
            differing.add(name)
    # the settings do something, or equality would say nothing
    assert differing >= set(GIVEN) - {"nothing", "filters", "logprobs"}


@pytest.mark.parametrize("shape", ["oracle", "anti", "random"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token_whatever_the_parameters(
    plain: Engine,
    requests: list[tuple[str, list[int]]],
    expected: dict[float, list[GenerationResult]],
    temperature: float,
    shape: str,
) -> None:
    """B58, B59: penalties ignored, counted twice, or kept from rejected drafts; bias on bonus tokens only."""
    wanted = expected[temperature]
    texts = [result.token_ids for result in wanted]
    config = EngineConfig(kv_tokens=8192, spec=SPEC)
    engine = Engine(plain, draft=lambda view: Forger(texts, shape), config=config)
    prompts = [prompt for _, prompt in requests]
    results = engine.generate(prompts, [params_of(name, temperature) for name, _ in requests])
    for (name, _), result, single in zip(requests, results, wanted, strict=True):
        assert result.token_ids == single.token_ids, name
        assert (result.finish_reason, result.error) == (single.finish_reason, None), name
        if shape == "oracle":
            assert result.stats.acceptance_length is not None
            assert result.stats.acceptance_length > 2, name
    if shape == "anti":
        assert sum(result.stats.accepted for result in results) < 0.2 * sum(r.stats.drafted for r in results)
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 1},
        {"max_batch_tokens": 16, "max_num_seqs": 5},
        {"kv_tokens": 160, "block_size": 4},
        {"spec": SpecConfig(max_depth=3, max_nodes=3)},
    ],
)
@pytest.mark.parametrize("drafter", ["ngram", "random"])
def test_sampled_text_under_penalties_depends_on_the_seed_alone(
    plain: Engine,
    requests: list[tuple[str, list[int]]],
    expected: dict[float, list[GenerationResult]],
    config: dict[str, Any],
    drafter: str,
) -> None:
    """B56 with penalties: batch, chunks, preemption, drafter and the adaptive policy change nothing."""
    kinds = ("penalties", "nothing", "filters")
    chosen = [index for index, (name, _) in enumerate(requests) if name in kinds]
    texts = [expected[1.0][index].token_ids for index in chosen]
    draft: Any = "ngram" if drafter == "ngram" else lambda view: Forger(texts, "random")
    settings = {"kv_tokens": 4096, "spec": SPEC, **config}
    engine = Engine(plain, draft=draft, config=EngineConfig(**settings))
    results = engine.generate(
        [requests[index][1] for index in chosen],
        [params_of(requests[index][0], 1.0) for index in chosen],
    )
    assert [result.token_ids for result in results] == texts
    if "kv_tokens" in config:
        assert engine.scheduler.num_preemptions > 0


def test_an_end_is_first_possible_behind_min_tokens_and_taken_there(plain: Engine) -> None:
    """B59: the end token is the argmax everywhere; with min_tokens n it is token n + 1."""
    text = plain.generate([PROMPTS[0]], SamplingParams(max_tokens=6, ignore_eos=True, seed=0))[0].token_ids
    told = [text + [EOS] * 9]
    engine = Engine(plain, draft=lambda view: Forger(told, "oracle"), config=EngineConfig(spec=SPEC))
    for least in range(7):
        params = SamplingParams(max_tokens=TOKENS, min_tokens=least, logit_bias={EOS: 60.0})
        for each in (plain, engine):
            result = each.generate([PROMPTS[0]], params)[0]
            assert result.token_ids == [*text[:least], EOS]
            assert result.finish_reason == "stop"


def test_a_stop_string_counts_only_behind_min_tokens(plain: Engine) -> None:
    """As in vLLM: a stop string may begin before, but must end behind the first min_tokens tokens."""
    letters = [plain.encoder.tokenizer.convert_tokens_to_ids(letter) for letter in "abcabcabc"]

    def spell(token_ids: list[int], logits: Tensor) -> Tensor:
        written = len(token_ids) - len(PROMPTS[0])
        return logits.index_fill(0, torch.tensor(letters[written : written + 1], dtype=torch.int64), 1000.0)

    engine = Engine(plain, draft=lambda view: Forger([letters], "oracle"), config=EngineConfig(spec=SPEC))
    for least, text in ((0, "ab"), (2, "ab"), (3, "abcab"), (5, "abcab"), (6, "abcabcab")):
        params = SamplingParams(max_tokens=9, min_tokens=least, stop=("c",), logits_processors=(spell,))
        for each in (plain, engine):
            result = each.generate([PROMPTS[0]], params)[0]
            assert (result.text, result.finish_reason) == (text, "stop")


def test_a_bad_word_given_as_text_is_not_written(plain: Engine) -> None:
    """Both spellings: at the beginning of a line and behind a space."""
    bias = {plain.encoder.tokenizer.convert_tokens_to_ids(token): 50.0 for token in ("the", "\u0120the")}
    params: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logit_bias": bias}
    assert "the" in plain.generate(["in a"], SamplingParams(**params))[0].text
    assert "the" not in plain.generate(["in a"], SamplingParams(bad_words="the", **params))[0].text


def test_a_request_whose_processor_fails_ends_alone(plain: Engine) -> None:
    """The others of its batch are unharmed, and its tokens up to there are those of plain decoding."""

    def failing(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) < len(PROMPTS[0]) + 5:
            return logits
        raise KeyError(token_ids[-1])

    base = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    texts = [result.token_ids for result in plain.generate(PROMPTS[:2], base)]
    mine = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logits_processors=(failing,))
    told = Engine(plain, draft=lambda view: Forger(texts, "oracle"), config=EngineConfig(spec=SPEC))
    for each in (plain, told):
        failed, other = each.generate(PROMPTS[:2], [mine, base])
        assert failed.finish_reason == "error"
        assert "failing) failed: KeyError" in (failed.error or "")
        assert failed.token_ids == texts[0][:5]
        assert other.token_ids == texts[1]
        each.audit()


def test_a_text_that_ends_before_a_row_without_choice_ends_well(plain: Engine) -> None:
    """A drafted run past a stop meets a place where nothing can be chosen; plain decoding never does."""
    text = plain.generate([PROMPTS[0]], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids

    def cliff(token_ids: list[int], logits: Tensor) -> Tensor:
        over = len(token_ids) >= len(PROMPTS[0]) + 4
        return torch.full_like(logits, float("-inf")) if over else logits.index_fill(0, letters[:1], 1000.0)

    letters = torch.tensor([plain.encoder.tokenizer.convert_tokens_to_ids("a")])
    told = [letters.tolist() * 6]
    assert text != told[0]
    engine = Engine(plain, draft=lambda view: Forger(told, "oracle"), config=EngineConfig(spec=SPEC))
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_tokens=6, temperature=temperature, seed=1, stop=("aaaa",), logits_processors=(cliff,)
        )
        for each in (plain, engine):
            result = each.generate([PROMPTS[0]], params)[0]
            assert (result.token_ids, result.finish_reason) == (told[0][:4], "stop")


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused_by_field(plain: Engine, field: str) -> None:
    """B63: [10**9] must not reach a tensor index."""
    vocab = plain.model_config.vocab_size
    value: Any = {"logit_bias": {vocab: 1.0}, "bad_words": ((3, vocab),)}.get(field, (vocab,))
    with pytest.raises(SpecdecError, match=field):
        plain.generate([[5]], SamplingParams(**{field: value}))
    assert not plain.scheduler.has_work
