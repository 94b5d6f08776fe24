"""The whole way from logits to what is chosen from, at every node of a tree: order, history, user's code."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import BadLogitsError, SpecdecError
from specdec.penalties import TokenCounts, penalise
from specdec.processors import NodeLogits, RequestProcessor
from specdec.sampling import LazyChoices, LazyProbs, process_logits
from specdec.sampling_params import MAX_LISTED_IDS, SamplingParams
from specdec.tree import DraftTree, path_to

VOCAB = 30
STOP = frozenset({28, 29})
INF = float("inf")


def double_last(token_ids: list[int], logits: Tensor) -> Tensor:
    """A processor that looks at the history, and writes to what it is given."""
    logits[token_ids[-1]] *= 2.0
    logits[len(token_ids) % VOCAB] += 1.0
    return logits


GIVEN: dict[str, Any] = {
    "allowed_token_ids": tuple(range(1, VOCAB)),
    "bad_words": ((4,), (5, 6), (6, 5, 7)),
    "min_tokens": 4,
    "logit_bias": {3: 1.5, 8: -2.0},
    "logits_processors": (double_last,),
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
}


def one_after_the_other(
    logits: Tensor, prompt: list[int], output: list[int], given: dict[str, Any]
) -> Tensor:
    """The documented order in plain steps on one place; nothing is kept from place to place."""
    row = logits.clone()
    if "allowed_token_ids" in given:
        row[[token for token in range(VOCAB) if token not in given["allowed_token_ids"]]] = -INF
    for word in given.get("bad_words", ()):
        before = list(word[:-1])
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            row[word[-1]] = -INF
    if len(output) < given.get("min_tokens", 0):
        row[list(STOP)] = -INF
    for token, bias in given.get("logit_bias", {}).items():
        row[token] += bias
    for processor in given.get("logits_processors", ()):
        row = processor(prompt + output, row)
    params = SamplingParams(**given)
    return penalise(row, params, *TokenCounts(VOCAB, len(prompt), row.device).at(prompt + output, []))


def random_tree(rng: random.Random, root: int, nodes: int) -> DraftTree:
    parents = [-1, *(rng.randrange(node) for node in range(1, nodes))]
    return DraftTree(
        token_ids=[root, *(rng.choice((4, 5, 6, 7, 11, 29)) for _ in parents[1:])], parents=parents
    )


@pytest.mark.parametrize("names", [[name] for name in GIVEN] + [list(GIVEN)])
def test_every_node_is_processed_with_its_own_path(names: list[str]) -> None:
    """Trees of many shapes, nodes asked in any order, texts that grow between the steps."""
    given = {name: GIVEN[name] for name in names}
    rng = random.Random(len(names) + len(names[0]))
    prompt = [5, 6, 11]
    text = [*prompt, 6]
    processor = RequestProcessor(
        SamplingParams(**given), prompt_len=3, stop_ids=STOP, bad_words=given.get("bad_words", ())
    )
    for _ in range(12):
        tree = random_tree(rng, text[-1], rng.randint(1, 12))
        logits = torch.randn(tree.num_nodes, VOCAB)
        rows = NodeLogits(logits, tree, text, processor)
        before = logits.clone()
        for node in rng.sample(range(tree.num_nodes), tree.num_nodes):
            path = tree.tokens_of(path_to(tree.parents, node)[1:])
            if STOP.isdisjoint(path):
                wanted = one_after_the_other(logits[node], prompt, text[3:] + path, given)
            else:
                wanted = logits[node]  # behind an end nothing is ever written
            assert torch.equal(rows[node], wanted)
            assert rows[node] is rows[node]
        assert torch.equal(logits, before)
        text = text + [rng.choice((5, 6, 7, 11)) for _ in range(rng.randint(0, 3))]


def test_greedy_choices_and_laws_read_the_processed_rows() -> None:
    tree = random_tree(random.Random(3), 6, 6)
    logits = torch.randn(6, VOCAB)
    params = SamplingParams(temperature=0.8, top_k=9, logit_bias={3: 5.0})
    rows = NodeLogits(logits, tree, [5, 6], RequestProcessor(params, prompt_len=1, stop_ids=STOP))
    laws, choices = LazyProbs(rows, params), LazyChoices(rows, 6)
    assert len(choices) == 6
    assert list(choices) == choices[0:6] == [int(rows[node].argmax()) for node in range(6)]
    for node in range(6):
        assert torch.equal(laws[node], process_logits(rows[node][None], params)[0])


def forbid_all(token_ids: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -INF)


def broken(token_ids: list[int], logits: Tensor) -> Tensor:
    raise KeyError("no such word")


class Wrapped:
    """A processor that is an object, and answers in double precision."""

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.double() * 0.5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"logits_processors": (forbid_all,)}, "leave none"),
        ({"logits_processors": (lambda ids, row: row * float("nan"),)}, "leave none"),
        ({"logits_processors": (broken,)}, r"broken\) failed: KeyError"),
        ({"logits_processors": (lambda ids, row: row[:3],)}, r"returned \[3\]"),
        ({"logits_processors": (lambda ids, row: row.tolist(),)}, "returned list"),
        ({"allowed_token_ids": (3,), "logit_bias": {4: 100.0}, "bad_words": ((3,),)}, "output token 2"),
    ],
)
def test_a_row_without_a_choice_says_whose_fault_it_is(given: dict[str, Any], words: str) -> None:
    processor = RequestProcessor(
        SamplingParams(**given), prompt_len=2, stop_ids=STOP, bad_words=given.get("bad_words", ())
    )
    with pytest.raises(BadLogitsError, match=words):
        processor.process(torch.randn(VOCAB), [1, 2, 3], [])


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_bad_logits_of_the_target_are_not_masked_away(value: float) -> None:
    """B44: allowed ids that leave out the NaN would hide it."""
    processor = RequestProcessor(SamplingParams(allowed_token_ids=(3, 4)), prompt_len=1, stop_ids=STOP)
    row = torch.zeros(VOCAB)
    row[9] = value
    with pytest.raises(BadLogitsError, match="target"):
        processor.process(row, [1], [])


def test_a_processor_cannot_bring_back_what_is_forbidden() -> None:
    params = SamplingParams(
        allowed_token_ids=(3, 4), logits_processors=(Wrapped(), lambda ids, row: torch.ones_like(row))
    )
    row = RequestProcessor(params, prompt_len=1, stop_ids=STOP).process(torch.randn(VOCAB), [1], [])
    assert row.dtype == torch.float32
    assert (row > -INF).nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.0), ("repetition_penalty", float("nan")), ("presence_penalty", 2.5),
        ("frequency_penalty", -2.01), ("frequency_penalty", "1"), ("typical_p", 0.0), ("typical_p", 1.5),
        ("logit_bias", {3: 101.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: INF}),
        ("bad_words", ("",)), ("bad_words", ((),)), ("bad_words", ((-1,),)), ("bad_words", ((1,) * 65,)),
        ("bad_words", ("x",) * 1025), ("allowed_token_ids", ()), ("allowed_token_ids", (1.5,)),
        ("allowed_token_ids", range(MAX_LISTED_IDS + 1)), ("min_tokens", -1), ("min_tokens", 257),
        ("min_tokens", True), ("logprobs", -1), ("logprobs", 21), ("logprobs", 10**6), ("logprobs", 1.0),
        ("logits_processors", (3,)), ("grammar", "a+"), ("stop_token_ids", range(MAX_LISTED_IDS + 1)),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(field: str, value: Any) -> None:
    """B43, B63: bounds before work, NaN included; a bool is no number."""
    with pytest.raises(SpecdecError, match=field):
        SamplingParams(**{field: value})
