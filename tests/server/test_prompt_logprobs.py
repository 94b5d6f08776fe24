"""Log-probabilities of prompts: the target's own, however the prompt is cut, cached, preempted or echoed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec.hf import load_hf_model
from specdec.sampling_params import SamplingParams

TEXT = "/v1/completions"
PROMPT = "the in and of the sky is " * 6
BODY = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def expected(live: Any, served_target: Any) -> list[float]:
    """Of each prompt token but the first, by transformers in one pass."""
    ids = live.engine.encoder.encode(PROMPT)
    model = load_hf_model(served_target)
    with torch.inference_mode():
        laws = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
    return [float(laws[place, token]) for place, token in enumerate(ids[1:])]


def test_an_echoed_prompt_has_the_targets_own_log_probabilities(live: Any, expected: list[float]) -> None:
    status, answer = live.post(TEXT, {**BODY, "echo": True, "logprobs": 2})
    assert status == 200, answer
    [choice] = answer["choices"]
    shown = choice["logprobs"]
    lengths = {name: len(values) for name, values in shown.items()}
    assert set(lengths.values()) == {len(expected) + 1 + 3}
    assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
    assert shown["token_logprobs"][1 : len(expected) + 1] == pytest.approx(expected, abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in shown["top_logprobs"][1:])
    assert choice["text"].startswith(PROMPT)
    # the first is the token that begins a text, and does not show in it
    for offset, token in list(zip(shown["text_offset"], shown["tokens"], strict=True))[1:-3]:
        assert choice["text"][offset:].startswith(token), (offset, token)
    plain = live.post(TEXT, {**BODY, "logprobs": 2})[1]["choices"][0]["logprobs"]
    assert shown["token_logprobs"][-3:] == pytest.approx(plain["token_logprobs"], abs=1e-4)


def test_a_stream_echoes_the_same(live: Any) -> None:
    body = {**BODY, "echo": True, "logprobs": 1}
    whole = live.post(TEXT, body)[1]["choices"][0]
    pieces = [event["choices"][0] for event in live.events(TEXT, body)]
    for name, values in whole["logprobs"].items():
        assert [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]] == values
    assert "".join(piece["text"] for piece in pieces) == whole["text"]


@pytest.mark.parametrize("budget", [16, 17, 256])
def test_chunks_caches_and_preemption_change_none(
    make_engine: Callable[..., Any], solo: Any, expected: list[float], budget: int
) -> None:
    engine = make_engine(solo, max_batch_tokens=budget, kv_tokens=256, max_num_seqs=2)
    # the prompt lies in the prefix cache, and must be computed all the same
    engine.generate([PROMPT], SamplingParams(max_tokens=2))
    params = SamplingParams(max_tokens=60, ignore_eos=True, prompt_logprobs=0)
    results = engine.generate([PROMPT, PROMPT, PROMPT], params)
    for result in results:
        assert result.prompt_logprobs is not None
        assert [entry.logprob for entry in result.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
        assert [entry.token_id for entry in result.prompt_logprobs] == result.prompt_token_ids[1:]
    assert engine.scheduler.num_preemptions > 0, "the pool was to be too small for two"
    engine.audit()


def test_vllms_field_lists_ids_ranks_and_texts(live: Any, expected: list[float]) -> None:
    [choice] = live.post(TEXT, {**BODY, "prompt_logprobs": 1})[1]["choices"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "prompt_logprobs": 0}
    ids = live.engine.encoder.encode(PROMPT)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, value, entry in zip(ids[1:], expected, others, strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(value, abs=1e-4)
        assert 1 <= len(entry) <= 2
        assert min(one["rank"] for one in entry.values()) == 1
        assert isinstance(entry[str(token)]["decoded_token"], str)
    assert choice["logprobs"] is None
    status, answer = live.post("/v1/chat/completions", chat)
    assert status == 200
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
