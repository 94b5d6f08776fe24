"""`speculative.token_kinds`: how each token came, reconciled with the response's own counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from specdec.engine import Engine

PATHS = ("/v1/chat/completions", "/v1/completions")


def body(path: str, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"prompt": "the in an the in an the"}
    if path.endswith("chat/completions"):
        said = {"messages": [{"role": "user", "content": "say the in an the in an \u00e9\U0001f600"}]}
    asked = {"speculative": {"token_kinds": True}, "max_tokens": 40, "seed": 3, "ignore_eos": True}
    return {**said, **asked, "stream_options": None, **fields}


def text_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_kinds_are_the_counts_of_the_response(live: Any, path: str, temperature: float) -> None:
    status, answer = live.post(path, body(path, temperature=temperature))
    assert status == 200, answer
    choice = answer["choices"][0]
    kinds = Counter(entry["kind"] for entry in choice["token_kinds"])
    told = answer["metrics"]["speculative_decoding"]
    assert sum(kinds.values()) == answer["usage"]["completion_tokens"] == 40
    # every step but one that the limit cut ends with the target's own token; the first is the prompt's
    assert kinds["accepted"] in range(told["accepted"] - 3, told["accepted"] + 1)
    own = kinds["recovered"] + kinds["bonus"] + kinds["plain"]
    assert own in (told["verify_steps"], told["verify_steps"] + 1)
    assert choice["token_kinds"][0]["kind"] == "plain"
    assert "".join(entry["text"] for entry in choice["token_kinds"]) == text_of(choice)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_tells_the_same_as_the_whole(live: Any, path: str) -> None:
    whole = live.post(path, body(path))[1]["choices"][0]["token_kinds"]
    streamed = [
        entry
        for event in live.events(path, body(path))
        for choice in event["choices"]
        for entry in choice.get("token_kinds", ())
    ]
    assert streamed == whole
    assert {"accepted", "recovered"} & {entry["kind"] for entry in whole}


def test_nobody_gets_kinds_without_asking(live: Any) -> None:
    for speculative in (None, {"token_kinds": False}):
        request = body(PATHS[0], speculative=speculative)
        assert "token_kinds" not in live.post(PATHS[0], request)[1]["choices"][0]


def test_without_speculation_every_token_is_plain(live: Any) -> None:
    request = body(PATHS[0], speculative={"token_kinds": True, "enabled": False})
    kinds = live.post(PATHS[0], request)[1]["choices"][0]["token_kinds"]
    assert {entry["kind"] for entry in kinds} == {"plain"}


def test_a_perfect_draft_is_accepted_and_then_adds_a_bonus(
    served_target: Any, make_engine: Callable[..., Engine], solo: Engine, serving: Any
) -> None:
    """Lookup in a text that comes to repeat itself, as greedy ones of tiny models do."""
    from specdec.config import EngineConfig, SpecConfig

    settings = EngineConfig(
        block_size=4, max_num_seqs=2, kv_tokens=4096, spec=SpecConfig(max_depth=3, top_k=1, adaptive=False)
    )
    with serving(Engine(solo, draft="ngram", config=settings)) as live:
        answer = live.post(PATHS[1], body(PATHS[1], temperature=0, max_tokens=200))[1]
    kinds = [entry["kind"] for entry in answer["choices"][0]["token_kinds"]]
    assert "bonus" in kinds
    # a bonus follows a whole accepted chain
    assert all(kinds[index - 1] == "accepted" for index, kind in enumerate(kinds) if kind == "bonus")


def test_the_field_is_a_truth_value(live: Any) -> None:
    status, answer = live.post(PATHS[0], body(PATHS[0], speculative={"token_kinds": "yes"}))
    assert status == 400
    assert answer["error"]["param"] == "speculative.token_kinds"
