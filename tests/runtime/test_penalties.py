"""Penalties and list constraints at one place of a text, against definitions written out in plain Python."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from specdec.constraints import TokenConstraints
from specdec.penalties import TokenCounts, has_penalties, penalise
from specdec.sampling_params import SamplingParams

VOCAB = 40
# products with a count are rounded once more in one of the two
ROUNDING = 1e-5
INF = float("inf")


def penalised(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """The definitions, one id at a time (vLLM's; OpenAI's for the last two)."""
    values = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(
        torch.tensor([prompt + output]), logits[None]
    )[0]
    for token, count in Counter(output).items():
        values[token] = values[token] - params.frequency_penalty * count
        values[token] = values[token] - params.presence_penalty
    return values.tolist()


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -1.5, "presence_penalty": 2.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.7},
    ],
)
def test_penalties_are_their_definitions(given: dict[str, float]) -> None:
    """Signs, repeated tokens, tokens of the prompt alone (which only repetition counts)."""
    params = SamplingParams(**given)
    rng = random.Random(0)
    for _ in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))]
        logits = torch.randn(VOCAB) * 3
        logits[rng.randrange(VOCAB)] = -INF
        counts = TokenCounts(VOCAB, len(prompt), logits.device)
        ours = penalise(logits, params, *counts.at(prompt + output, []))
        theirs = torch.tensor(penalised(logits.clone(), params, prompt, output))
        assert torch.allclose(ours, theirs, rtol=0.0, atol=ROUNDING)


def test_a_drafted_path_counts_at_its_place_and_nowhere_else() -> None:
    """B58: counts that rejected drafts have touched, or that count the last token twice."""
    rng = random.Random(1)
    prompt, text = [3, 3, 5], [3, 3, 5]
    counts = TokenCounts(VOCAB, len(prompt), torch.device("cpu"))
    for _ in range(30):
        for _ in range(3):
            path = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
            seen, output = counts.at(text, path)
            assert set(seen.nonzero().flatten().tolist()) == set(text + path)
            wanted = Counter(text[len(prompt) :] + path)
            assert {token: int(output[token]) for token in output.nonzero().flatten().tolist()} == wanted
        # some steps commit nothing that was asked about, some commit several tokens
        text = text + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))]


def test_a_prompt_that_arrives_in_chunks_is_still_prompt() -> None:
    counts = TokenCounts(VOCAB, 4, torch.device("cpu"))
    counts.at([1, 2], [])
    seen, output = counts.at([1, 2, 3, 4, 5, 5], [])
    assert seen.nonzero().flatten().tolist() == [1, 2, 3, 4, 5]
    assert output.nonzero().flatten().tolist() == [5]
    assert output[5] == 2.0


def test_neutral_penalties_are_none() -> None:
    assert not has_penalties(SamplingParams())
    assert not SamplingParams(min_p=0.1, top_k=3, typical_p=0.5, logprobs=2).changes_logits
    for given in ({"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.1}):
        assert has_penalties(SamplingParams(**given))
        assert SamplingParams(**given).changes_logits


def constrained(
    given: dict[str, Any], output: list[int], bad: tuple[tuple[int, ...], ...] = ()
) -> list[float]:
    constraints = TokenConstraints(SamplingParams(**given), bad, stop_ids={7, 9})
    tail = output[max(0, len(output) - constraints.context_len) :]
    return constraints.apply(torch.arange(12, dtype=torch.float32), tail, len(output)).tolist()


def test_only_allowed_ids_stay() -> None:
    values = constrained({"allowed_token_ids": [2, 5, 2]}, [])
    assert [token for token, value in enumerate(values) if value > -INF] == [2, 5]
    assert values[5] == 5.0


def test_a_bias_is_added_and_forbidden_ids_stay_forbidden() -> None:
    values = constrained({"logit_bias": {2: 1.5, 4: 100.0}, "allowed_token_ids": (2, 3)}, [])
    assert (values[2], values[3], values[4]) == (3.5, 3.0, -INF)


def test_end_tokens_are_forbidden_until_min_tokens_are_written() -> None:
    """B59: one row too few or too many; with n tokens written, token n + 1 may be the end."""
    for written in range(6):
        values = constrained({"min_tokens": 3}, [1] * written)
        assert (values[7] == -INF) is (written < 3)
        assert (values[9] == -INF) is (written < 3)


def test_an_end_that_is_the_only_choice_is_taken_before_min_tokens() -> None:
    values = constrained({"min_tokens": 3, "allowed_token_ids": (7, 9)}, [])
    assert [token for token, value in enumerate(values) if value > -INF] == [7, 9]


def test_the_last_token_of_a_bad_word_is_forbidden_behind_the_others() -> None:
    """Against Hugging Face's processor, whose history is everything; ours is the output alone (vLLM's)."""
    bad = ((4,), (1, 2), (1, 3), (2, 1, 2), (5, 5, 5, 6))
    # the list is Hugging Face's to write to
    theirs = NoBadWordsLogitsProcessor([list(word) for word in bad], eos_token_id=None)
    rng = random.Random(2)
    for _ in range(200):
        output = [rng.choice((1, 2, 5, 5)) for _ in range(rng.randint(1, 6))]
        wanted = theirs(torch.tensor([output]), torch.arange(12, dtype=torch.float32)[None])[0].tolist()
        assert constrained({}, output, bad) == wanted
    assert [token for token, value in enumerate(constrained({}, [], bad)) if value == -INF] == [4]
