"""Whatever a client sends, it gets a 4xx that names the field, at once, and nobody else notices."""

import json
import threading
import time
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TURN = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": TURN, "max_tokens": 4, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 4, **fields}


# (endpoint, body, what `param` names)
BAD: list[tuple[str, Any, str | None]] = [
    (CHAT, b"{x}", None),
    (CHAT, b"", None),
    (CHAT, [], None),
    (CHAT, b"null", None),
    (CHAT, b'"s"', None),
    (CHAT, b"\xff\xfe{}", None),
    (CHAT, b"[" * 100_000, None),
    (CHAT, b'{"messages":' * 500, None),
    (CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}', None),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": {}}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens="10"), "max_tokens"),
    (CHAT, chat(max_tokens=1.5), "max_tokens"),
    (CHAT, chat(max_tokens=True), "max_tokens"),
    (CHAT, chat(max_tokens=10**12), "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', None),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"top_p":1e999}', "top_p"),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"min_p":-Infinity}', None),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":' + b"9" * 4000 + b"}", "temperature"),
    (CHAT, b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 4000 + b"}", "seed"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=10**9), "n"),
    (CHAT, chat(n=65), "n"),
    (CHAT, chat(seed=2**70), "seed"),
    (CHAT, chat(seed=-1), "seed"),
    (CHAT, chat(stop=["x"] * 500_000), "stop"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop="x" * 5000), "stop"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (CHAT, chat(stop_token_ids=[10**9]), "stop_token_ids"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"999999": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 1000}), "logit_bias"),
    (CHAT, chat(logprobs=True, top_logprobs=10**6), "top_logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function"),
    (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="maybe"),
        "tool_choice",
    ),
    (CHAT, chat(chat_template_kwargs={"messages": "x"}), "chat_template_kwargs"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(warmth=1), "warmth"),
    (CHAT, chat(speculative={"max_depth": 99}), "speculative.max_depth"),
    (CHAT, chat(speculative={"max_depth": 0}), "speculative.max_depth"),
    (CHAT, chat(speculative={"top_k": 9}), "speculative.top_k"),
    (CHAT, chat(speculative={"max_nodes": 33}), "speculative.max_nodes"),
    (CHAT, chat(speculative={"enabled": "no"}), "speculative.enabled"),
    (CHAT, chat(speculative={"depth": 3}), "speculative.depth"),
    (CHAT, chat(speculative={"verification": "psychic"}), "speculative.verification"),
    (CHAT, chat(speculative={"verification": "lenience", "x": 1}), "speculative.verification"),
    (CHAT, chat(speculative={"verification": "lenience", "lenience": 7}), "speculative.lenience"),
    (CHAT, chat(temperature=0, speculative={"verification": "lenience"}), "speculative.verification"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (
        CHAT,
        chat(
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "cat"}}}
        ),
        "response_format",
    ),
    (CHAT, chat(guided_regex="(", guided_json={}), "guided_regex"),
    (CHAT, chat(guided_regex="("), "guided_regex"),
    (CHAT, chat(guided_choice=[]), "guided_choice"),
    (CHAT, chat(timeout=-1), "timeout"),
    (CHAT, chat(timeout=1, deadline_s=1), "timeout"),
    (CHAT, chat(kv_ttl_s=-1), "kv_ttl_s"),
    (CHAT, chat(priority=2**40), "priority"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (TEXT, {}, "prompt"),
    (TEXT, text(prompt=[]), "prompt"),
    (TEXT, text(prompt=""), "prompt"),
    (TEXT, text(prompt=3), "prompt"),
    (TEXT, text(prompt=[[]]), "prompt"),
    (TEXT, text(prompt=[[1], ["a"]]), "prompt[1][0]"),
    (TEXT, text(prompt=[10**6]), "prompt"),
    (TEXT, text(prompt=["a"] * 1000), "prompt"),
    (TEXT, text(prompt=[5] * 2048), "prompt"),
    (TEXT, text(prompt="x" * 5_000_000), "prompt"),
    (TEXT, text(best_of=3), "best_of"),
    (TEXT, text(suffix="!"), "suffix"),
    (TEXT, text(prompt_logprobs=10**6), "prompt_logprobs"),
    (TEXT, text(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (CHAT, chat(prompt_logprobs=-1), "prompt_logprobs"),
    (TEXT, text(logprobs=99), "logprobs"),
    (TEXT, text(messages=TURN), "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": TURN}, "prompt"),
    ("/detokenize", {"tokens": [10**8]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/v1/embeddings", {"input": "x"}, None),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), BAD, ids=[f"{index}-{row[2]}" for index, row in enumerate(BAD)]
)
def test_a_bad_body_is_a_400_that_names_the_field(live: Any, path: str, body: Any, param: str | None) -> None:
    started = time.monotonic()
    status, answer = live.post(path, body)
    assert time.monotonic() - started < 5, "a refusal is no work"
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    assert len(error["message"]) < 1500
    assert live.service.loop.outstanding == 0


def test_a_long_prompt_is_refused_with_both_numbers(live: Any) -> None:
    _, answer = live.post(TEXT, text(prompt=[5] * 2048))
    assert "2048 tokens" in answer["error"]["message"]
    assert "context (2048" in answer["error"]["message"]
    status, answer = live.post(TEXT, text(prompt=[5] * 2047, max_tokens=5))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")


def test_other_ways_and_other_methods_get_the_same_error_object(live: Any) -> None:
    for method, path, status in (
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/gpt-4", 404),
        ("GET", "/nothing", 404),
        ("POST", "/v1/responses", 404),
    ):
        got, _, data = live.request(method, path)
        assert got == status
        assert set(json.loads(data)["error"]) == {"message", "type", "param", "code"}
    assert live.post(CHAT, chat(model="gpt-4"))[0] == 404


def test_a_body_beyond_the_limit_is_a_413_and_costs_no_memory(live: Any) -> None:
    started = time.monotonic()
    status, answer = live.post(CHAT, b'{"messages": "' + b"x" * 50_000_000)
    assert status == 413, answer
    assert "8388608 bytes" in answer["error"]["message"]
    assert time.monotonic() - started < 10
    # chunked, so that no length is declared
    import http.client

    connection = http.client.HTTPConnection(live.host, live.port, timeout=30)
    connection.request("POST", CHAT, iter([b"x" * 1_000_000] * 20), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert live.service.bodies._reading == 0


def test_fields_without_effect_are_taken_and_named(live: Any) -> None:
    status, headers, _ = live.request(
        "POST", CHAT, chat(user="u", store=False, service_tier="auto", suffix=None, temperature=None)
    )
    assert status == 200
    assert headers["x-specdec-ignored"] == "service_tier, store, user"


def test_a_running_request_does_not_notice_bad_ones(live: Any, solo: Any) -> None:
    from specdec.sampling_params import SamplingParams

    [alone] = solo.generate(["the"], SamplingParams(max_tokens=60, ignore_eos=True))
    answers: list[Any] = []
    body = text(prompt="the", max_tokens=60, temperature=0, ignore_eos=True)
    thread = threading.Thread(target=lambda: answers.append(live.post(TEXT, body)))
    thread.start()
    for path, bad, _ in BAD[::4]:
        live.post(path, bad)
    thread.join()
    status, answer = answers[0]
    assert status == 200
    assert answer["choices"][0]["text"] == alone.text
    live.wait_until_idle()
    assert live.metric("engine_failed_steps_total") == 0
    assert live.metric("http_requests_total", code="500") == 0
