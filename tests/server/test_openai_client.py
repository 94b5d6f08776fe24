"""OpenAI's own client against the server: what it sends is understood, what it reads is right."""

from collections.abc import Callable
from typing import Any

import pytest

from specdec.engine import Engine
from specdec.sampling_params import SamplingParams

openai = pytest.importorskip("openai")

MODEL = "tiny"

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "the sky"}]


@pytest.fixture(scope="module")
def client(live: Any) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_greedy_chat_is_the_engines_own_text(client: Any, solo: Engine) -> None:
    [alone] = solo.generate([CHAT], SamplingParams(max_tokens=20))
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=20)
    [choice] = answer.choices
    assert choice.message.content == alone.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == alone.finish_reason
    assert answer.usage.completion_tokens == len(alone.token_ids)
    assert answer.usage.prompt_tokens == len(alone.prompt_token_ids)
    speculation = answer.model_extra["metrics"]["speculative_decoding"]
    assert speculation["committed"] == alone.stats.committed
    assert speculation["acceptance_length"] == alone.stats.acceptance_length
    assert speculation["verification"] == "exact"
    assert speculation["exact_against"] == "the target"
    assert speculation["lossy"] is False
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"] > 0


def test_chunks_of_a_stream_add_up_to_the_whole(client: Any, solo: Engine) -> None:
    [alone] = solo.generate([CHAT], SamplingParams(max_tokens=24))
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == alone.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == alone.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(alone.token_ids)
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["committed"] == alone.stats.committed
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_choices_of_a_seed_are_the_runs_of_counted_up_seeds(client: Any, solo: Engine) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="the in", n=3, seed=7, temperature=1.0, max_tokens=10
    )
    texts = [
        solo.generate(["the in"], SamplingParams(temperature=1.0, seed=7 + index, max_tokens=10))[0].text
        for index in range(3)
    ]
    assert [choice.text for choice in answer.choices] == texts
    assert len(set(texts)) > 1
    assert answer.usage.prompt_tokens == len(solo.encoder.encode("the in"))


def test_log_probabilities_have_an_entry_a_token_in_both_shapes(client: Any, solo: Engine) -> None:
    [alone] = solo.generate([CHAT], SamplingParams(max_tokens=12, logprobs=3))
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(
        [e.logprob for e in alone.logprobs], abs=1e-4
    )
    assert all(len(entry.top_logprobs) == 3 and entry.logprob < 0 for entry in content)
    written = b"".join(bytes(entry.bytes) for entry in content)
    kept = [token for token in alone.token_ids if token not in solo.encoder.tokenizer.all_special_ids]
    if len(kept) == len(alone.token_ids):
        assert written.decode("utf-8", "replace") == alone.text

    prompt = solo.encoder.encode(CHAT)
    older = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12, logprobs=3)
    shown = older.choices[0].logprobs
    assert shown.token_logprobs == pytest.approx([entry.logprob for entry in content])
    assert len(shown.tokens) == len(shown.top_logprobs) == len(shown.text_offset) == 12
    assert all(token in top for token, top in zip(shown.tokens, shown.top_logprobs, strict=True))


def test_streamed_log_probabilities_are_the_whole_ones(client: Any) -> None:
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs.content
    stream = client.chat.completions.create(**asked, top_logprobs=2, stream=True)
    pieces = [
        entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in pieces] == [entry.token for entry in whole]
    assert [entry.logprob for entry in pieces] == pytest.approx([entry.logprob for entry in whole])


def test_several_prompts_and_several_choices_come_in_order(client: Any, solo: Engine) -> None:
    prompts = ["the a", "on the", "in"]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, n=2, temperature=0, max_tokens=6, echo=True
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, choice in enumerate(answer.choices):
        prompt = prompts[index // 2]
        [alone] = solo.generate([prompt], SamplingParams(max_tokens=6))
        assert choice.text == prompt + alone.text
    ids = [solo.encoder.encode(prompt) for prompt in prompts]
    again = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=6)
    assert [choice.text for choice in again.choices] == [
        choice.text.removeprefix(prompts[index]) for index, choice in enumerate(answer.choices[::2])
    ]


def test_vllms_fields_go_through_the_client(client: Any, solo: Engine) -> None:
    params = SamplingParams(max_tokens=16, min_tokens=16, repetition_penalty=1.3, ignore_eos=True)
    [alone] = solo.generate([CHAT], params)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        temperature=0,
        max_completion_tokens=16,
        user="somebody",
        metadata={"run": "1"},
        extra_body={
            "min_tokens": 16,
            "repetition_penalty": 1.3,
            "ignore_eos": True,
            "top_k": -1,
            "speculative": {"max_depth": 2, "verification": "exact"},
        },
    )
    assert answer.choices[0].message.content == alone.text
    assert answer.usage.completion_tokens == 16


def test_speculation_can_be_switched_off_and_does_not_change_the_text(client: Any) -> None:
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 16}
    on = client.chat.completions.create(**asked)
    off = client.chat.completions.create(**asked, extra_body={"speculative": {"enabled": False}})
    assert on.choices[0].message.content == off.choices[0].message.content
    assert on.model_extra["metrics"]["speculative_decoding"]["drafted"] > 0
    assert off.model_extra["metrics"]["speculative_decoding"]["drafted"] == 0
    assert off.model_extra["metrics"]["speculative_decoding"]["acceptance_rate"] is None


def test_a_lossy_rule_is_said_in_body_and_header(live: Any) -> None:
    body = {
        "model": MODEL,
        "messages": CHAT,
        "max_tokens": 8,
        "seed": 1,
        "speculative": {"verification": "lenience", "lenience": 0.5},
    }
    status, headers, data = live.request("POST", "/v1/chat/completions", body)
    assert status == 200, data
    assert headers["x-specdec-verification"].startswith("lenience(")
    assert b'"lossy":true' in data


def test_a_lossy_default_rule_holds_for_sampled_requests_that_name_none(
    make_engine: Callable[..., Engine], solo: Engine, serving: Any
) -> None:
    body = {"prompt": "the", "max_tokens": 3}
    said = {}
    with serving(make_engine(solo), default_rule="lenience") as server:
        for name, extra in {
            "sampled": {},
            "greedy": {"temperature": 0},
            "exact": {"speculative": {"verification": "exact"}},
        }.items():
            said[name] = server.request("POST", "/v1/completions", {**body, **extra})[1]
    against = [said[name].get("x-specdec-exact-against") for name in ("sampled", "exact")]
    assert against == [None, "the target"]
    rules = {name: headers["x-specdec-verification"] for name, headers in said.items()}
    assert rules["sampled"].startswith("lenience(")
    assert rules["greedy"] == rules["exact"] == "exact"


def test_the_answer_obeys_a_json_schema(client: Any) -> None:
    pytest.importorskip("llguidance")
    import json

    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=60,
        seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
    chosen = client.completions.create(
        model=MODEL, prompt="x", max_tokens=20, extra_body={"guided_choice": ["a+b", "c (d)"]}
    )
    assert chosen.choices[0].text in ("a+b", "c (d)")


def test_tools_reach_the_template_and_calls_come_back(client: Any, live: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 4}
    with_tools = client.chat.completions.create(**asked, tools=[tool], tool_choice="auto")
    without = client.chat.completions.create(**asked, tools=[tool], tool_choice="none")
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens
    # a grammar makes the tiny model write a call
    pytest.importorskip("llguidance")
    call = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    pattern = call.replace("{", r"\{").replace("}", r"\}")
    answer = client.chat.completions.create(
        **{**asked, "max_tokens": 120}, tools=[tool], extra_body={"guided_regex": pattern}
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "look"
    assert choice.message.tool_calls[0].function.arguments == '{"at": 1}'
    stream = client.chat.completions.create(
        **{**asked, "max_tokens": 120}, tools=[tool], stream=True, extra_body={"guided_regex": pattern}
    )
    chunks = list(stream)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.arguments for call in calls] == ['{"at": 1}']
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # the call goes back into the conversation as the client keeps it
    turns = [*CHAT, choice.message, {"role": "tool", "tool_call_id": "call_1", "content": "blue"}]
    again = client.chat.completions.create(**{**asked, "messages": turns})
    assert again.choices[0].finish_reason in ("stop", "length")


def test_errors_become_the_clients_own_exceptions(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="embeddings are not supported"):
        client.embeddings.create(model=MODEL, input="x")
    assert [model.id for model in client.models.list()] == [MODEL, "alias/tiny"]
    assert client.models.retrieve("alias/tiny").id == "alias/tiny"
