"""`tool_choice` that demands a call gets one that parses, whatever the model would rather say."""

from __future__ import annotations

import json
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

CHAT = [{"role": "user", "content": "the sky"}]
COLOURS = ["red", "green", "blue"]


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


PAINT = tool(
    "paint",
    {
        # a reference has the tool's own schema for its root
        "$defs": {"colour": {"enum": COLOURS}},
        "properties": {"colour": {"$ref": "#/$defs/colour"}, "twice": {"type": "boolean"}},
        "required": ["colour", "twice"],
        "additionalProperties": False,
    },
)
STOP = tool('sto"p\n', {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = [PAINT, STOP]


@pytest.fixture(scope="module")
def client(live: Any) -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=60)


def asked(client: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": CHAT, "tools": TOOLS, "max_tokens": 900, "temperature": 1.0}
    return client.chat.completions.create(**{**body, **fields})


def check(calls: list[Any]) -> list[str]:
    """Names of calls whose arguments are inside their schemas."""
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "paint":
            assert arguments["colour"] in COLOURS
            assert isinstance(arguments["twice"], bool)
        else:
            assert arguments == {}
    return [call.function.name for call in calls]


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_is_made_of_one_of_the_tools(client: Any, seed: int) -> None:
    [choice] = asked(client, tool_choice="required", seed=seed).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert {"paint", 'sto"p\n'} >= set(check(choice.message.tool_calls))


@pytest.mark.parametrize("name", ["paint", 'sto"p\n'])
def test_a_named_function_is_called_once(client: Any, name: str) -> None:
    wanted = {"type": "function", "function": {"name": name}}
    [choice] = asked(client, tool_choice=wanted, temperature=0.0).choices
    assert check(choice.message.tool_calls) == [name]
    assert choice.finish_reason == "stop"


def test_without_parallel_calls_there_is_one(client: Any) -> None:
    choices = asked(client, tool_choice="required", parallel_tool_calls=False, n=3, seed=1).choices
    assert [len(choice.message.tool_calls) for choice in choices] == [1, 1, 1]


def test_a_stream_makes_the_same_calls_and_drafts_change_none(client: Any) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 2}
    coupled = {"verification": "coupled"}
    whole = asked(client, **fields, extra_body={"speculative": coupled}).choices[0].message.tool_calls
    streamed = [
        call
        for chunk in asked(client, **fields, stream=True, extra_body={"speculative": coupled})
        for call in (chunk.choices[0].delta.tool_calls or ())
    ]
    plain = asked(client, **fields, extra_body={"speculative": {**coupled, "enabled": False}})
    said = [
        [(call.function.name, call.function.arguments) for call in calls]
        for calls in (whole, streamed, plain.choices[0].message.tool_calls)
    ]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": [tool("f", {"type": "thing"})]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
    ],
)
def test_a_demand_that_cannot_be_met_is_a_400_that_names_it(
    live: Any, fields: dict[str, Any], param: str
) -> None:
    status, answer = live.post(
        "/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "max_tokens": 5, **fields}
    )
    assert (status, answer["error"]["param"]) == (400, param), answer
