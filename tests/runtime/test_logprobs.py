"""Log-probabilities of output tokens: the target's own, one for each token, whatever was drafted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.hf import load_hf_model
from specdec.logprobs import TokenLogprobs, token_logprobs
from specdec.sampling_params import SamplingParams
from specdec.tree import DraftTree, tree_from_paths

# two fp32 implementations of one model
REFERENCE_TOLERANCE = 1e-4
# one implementation, its sums over a tree's rows in another order; relative to the value where that is above
# one (measured: up to 1.1e-5 at 4.0, as much as either run differs from fp64)
PLAIN_TOLERANCE = 1e-5
PROMPTS = [[7, 3, 9, 20, 5], [40, 41], list(range(2, 50)), [8] * 21, [6]]


class Told:
    """Drafter that knows the text of each request by its number, with a wrong sibling at every depth."""

    name = "told"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

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
            ahead = self.texts[seq.seq_id % len(self.texts)][seq.num_output :]
            ahead = ahead[: min(request.max_depth, request.max_nodes // 2)]
            wrong = [[*ahead[:depth], token ^ 1] for depth, token in enumerate(ahead)]
            trees.append(tree_from_paths(seq.token_ids[-1], [*wrong, ahead]))
        return trees


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))


def told(plain: Engine, texts: list[list[int]]) -> Engine:
    spec = SpecConfig(max_depth=6, max_nodes=12, adaptive=False)
    return Engine(plain, draft=lambda view: Told(texts), config=EngineConfig(kv_tokens=2048, spec=spec))


def near(one: float, two: float, tolerance: float) -> bool:
    return abs(one - two) < tolerance * max(1.0, abs(two))


def assert_close(
    ours: list[TokenLogprobs] | None, theirs: list[TokenLogprobs] | None, tolerance: float
) -> None:
    assert ours is not None
    assert theirs is not None
    assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert near(one.logprob, two.logprob, tolerance)
        assert one.rank == two.rank
        assert [token for token, _ in one.top] == [token for token, _ in two.top]
        assert all(near(a, b, tolerance) for (_, a), (_, b) in zip(one.top, two.top, strict=True))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "top_k": 30},
        # the values are the target's, before penalties and masks
        {
            "temperature": 0.7,
            "seed": 5,
            "repetition_penalty": 1.5,
            "logit_bias": {3: 8.0},
            "bad_words": ((5,),),
        },
    ],
)
def test_one_entry_for_each_token_equal_to_the_reference(
    tiny_llama: Path, plain: Engine, sampling: dict
) -> None:
    """B60: none 0.0, none missing, accepted and bonus tokens alike, streamed or not."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=3, **sampling)
    results = plain.generate(PROMPTS, params)
    model = load_hf_model(tiny_llama)
    for result in results:
        ids = result.prompt_token_ids + result.token_ids
        logits = model(input_ids=torch.tensor([ids])).logits[0, len(result.prompt_token_ids) - 1 : -1]
        assert_close(result.logprobs, token_logprobs(logits, result.token_ids, 3), REFERENCE_TOLERANCE)
        assert result.logprobs is not None
        for entry in result.logprobs:
            assert entry.logprob < 0.0
            assert sum(math.exp(value) for _, value in entry.top) <= 1.0
            assert (entry.token_id in [token for token, _ in entry.top]) is (entry.rank <= 3)
    engine = told(plain, [result.token_ids for result in results])
    spoken = engine.generate(PROMPTS, params)
    assert sum(result.stats.accepted for result in spoken) > 60
    for result, wanted in zip(spoken, results, strict=True):
        assert_close(result.logprobs, wanted.logprobs, PLAIN_TOLERANCE)
    streamed: list[list[TokenLogprobs]] = [[] for _ in PROMPTS]
    for piece in told(plain, [result.token_ids for result in results]).stream(PROMPTS, params):
        assert piece.logprobs is not None
        assert [entry.token_id for entry in piece.logprobs] == piece.token_ids
        streamed[piece.index] += piece.logprobs
    assert streamed == [result.logprobs for result in spoken]


def test_requests_of_a_batch_each_get_what_they_asked_for(plain: Engine) -> None:
    """B60: rows handed to the wrong request; B38: a run that ends inside a step has an entry per token."""
    wanted = [None, 0, 5, None, 20]
    params = [
        SamplingParams(max_tokens=7, ignore_eos=True, logprobs=count, temperature=row % 2, seed=row)
        for row, count in enumerate(wanted)
    ]
    alone = [plain.generate([prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    engine = told(plain, [[*result.token_ids, 0, 0, 0] for result in alone])
    for result, single, count in zip(engine.generate(PROMPTS, params), alone, wanted, strict=True):
        assert result.token_ids == single.token_ids
        if count is None:
            assert result.logprobs is None
        else:
            assert_close(result.logprobs, single.logprobs, PLAIN_TOLERANCE)
            assert [len(entry.top) for entry in result.logprobs or ()] == [count] * 7


def test_a_stop_inside_an_accepted_run_ends_the_entries_too(plain: Engine) -> None:
    text = plain.generate(PROMPTS[:1], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    place = next(index for index in range(2, 12) if text[index] not in text[:index])
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, stop_token_ids=(text[place],))
    result = told(plain, [text]).generate(PROMPTS[:1], params)[0]
    assert len(result.logprobs or ()) == len(result.token_ids) == place + 1


def test_rank_counts_the_more_probable_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(4, 1)
    entries = token_logprobs(logits, [0, 1, 2, 3], 2)
    assert [entry.rank for entry in entries] == [4, 1, 2, 3]
    assert all([token for token, _ in entry.top] == [1, 2] for entry in entries)
    assert len(token_logprobs(logits, [0] * 4, 20)[0].top) == 4
