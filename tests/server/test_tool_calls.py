"""Tool calls read out of growing text, and tools written into prompts of templates that know none."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
LISTED = '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>'
TEXTS = {
    "no call at <all>": ("no call at <all>", []),
    f"first {CALL}": ("first ", [("f", {"a": 1})]),
    LISTED: ("", [("f", {"a": 1}), ("g", {})]),
    f"{CALL}\n{CALL}\n": ("", [("f", {"a": 1}), ("f", {"a": 1})]),
    '<tool_call>{"name": "f", "arguments": "{}"}': ("", [("f", {})]),
    "<tool_call>broken</tool_call> text": ("<tool_call>broken</tool_call> text", []),
    "ends in <tool_": ("ends in <tool_", []),
    "<tool_call>[]</tool_call>": ("", []),
}


def read(text: str, cuts: list[int], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that comes in pieces."""
    from specdec.server.tool_calls import CallReader

    reader = CallReader(**options)
    content, calls = "", []
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for index in range(len(bounds) - 1):
        piece = text[bounds[index] : bounds[index + 1]]
        more, found = reader.read(piece, finished=index == len(bounds) - 2)
        content += more
        calls += [(call.name, json.loads(call.arguments)) for call in found]
    return content, calls


@settings(deadline=None)
@given(st.sampled_from(sorted(TEXTS)), st.lists(st.integers(0, 120), max_size=12))
def test_however_a_text_is_cut_its_calls_are_the_same(text: str, cuts: list[int]) -> None:
    content, calls = read(text, cuts)
    expected, expected_calls = TEXTS[text]
    assert calls == expected_calls
    assert content.strip() == expected.strip()


def test_without_parallel_calls_the_first_one_counts() -> None:
    assert read(LISTED, [], one_call=True) == ("", [("f", {"a": 1})])
    assert read(f"{CALL}{CALL}", [5, 70], one_call=True)[1] == [("f", {"a": 1})]


def test_a_template_that_knows_no_tools_is_told_in_the_system_message() -> None:
    from specdec.server.fields import Message, Tool
    from specdec.server.tool_calls import template_messages, with_tool_prompt

    tool = Tool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": {"a": {"b": {}}}}}
    )
    messages = [
        Message(role="developer", content="Be kind."),
        Message.model_validate(
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]}
        ),
    ]
    turns = with_tool_prompt(template_messages(messages, knows_calls=False), [tool])
    assert [turn["role"] for turn in turns] == ["system", "assistant"]
    assert (
        '<tools>[{"type": "function", "function": {"name": "f", "parameters": {"a": {"b": {}}}}}]</tools>'
        in (turns[0]["content"])
    )
    assert turns[0]["content"].endswith("Be kind.")
    assert turns[1]["content"] == '<tool_call>[{"name": "f", "arguments": {"x": 1}}]</tool_call>'
    kept = template_messages(messages, knows_calls=True)[1]
    assert kept["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert kept["content"] == ""


def test_arguments_that_are_no_json_are_refused_by_field() -> None:
    from specdec.server.fields import Message
    from specdec.server.problems import Problem
    from specdec.server.tool_calls import template_messages

    broken = Message.model_validate(
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    )
    with pytest.raises(Problem) as caught:
        template_messages([broken], knows_calls=True)
    assert caught.value.param == "messages[0].tool_calls"
