"""Tools: how they get into a prompt, and how calls are read out of an answer.

Owns the `<tool_call>` form that Hermes, Qwen and SmolLM2 models write: JSON objects with `name` and
`arguments`, one or a list of them, between the tags. A template that knows tools gets them; for one that does
not (SmolLM2's own) the system message says what SmolLM2's authors trained on.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.server.fields import Message, Tool
from specdec.server.problems import bad_field

OPEN, CLOSE = "<tool_call>", "</tool_call>"

# the system prompt of SmolLM2's function calling (Hugging Face, Apache-2.0)
TOOL_PROMPT = """You are an expert in composing functions.
You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is
needed, please make the tool calls an empty list '[]'.
<tool_call>[
{"name": "func_name1", "arguments": {"argument1": "value1", "argument2": "value2"}},
... (more tool calls as required)
]</tool_call>"""


@dataclass(frozen=True)
class Call:
    """One call a model wrote; `arguments` is JSON text."""

    name: str
    arguments: str

    def as_field(self, index: int) -> dict[str, Any]:
        """As a response carries it."""
        return {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "index": index,
            "function": {"name": self.name, "arguments": self.arguments},
        }


def template_messages(messages: Sequence[Message], *, knows_calls: bool) -> list[dict[str, Any]]:
    """Messages as a chat template reads them.

    Args:
        messages: the request's.
        knows_calls: whether the template writes `tool_calls` itself; else they become part of the content.

    Raises:
        Problem: a message without content, or arguments that are no JSON.
    """
    rendered = []
    for index, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        if message.content is None and not message.tool_calls:
            where = f"messages[{index}].content"
            raise bad_field(where, f"{where} is required", "missing_field")
        if isinstance(message.content, list):
            content = "\n".join(part.text for part in message.content)
        else:
            content = message.content or ""
        turn: dict[str, Any] = {"role": role, "content": content}
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        calls = [
            {"name": call.function.name, "arguments": _arguments(call.function.arguments, index)}
            for call in message.tool_calls or ()
        ]
        if calls and knows_calls:
            turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        elif calls:
            turn["content"] = f"{content}{OPEN}{json.dumps(calls, ensure_ascii=False)}{CLOSE}"
        rendered.append(turn)
    return rendered


def _arguments(text: str, message: int) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        where = f"messages[{message}].tool_calls"
        raise bad_field(where, f"{where}: arguments must be JSON text") from error


def with_tool_prompt(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages that tell a model of its tools where its template cannot, before any system message."""
    listed = json.dumps([tool.model_dump(exclude_none=True) for tool in tools], ensure_ascii=False)
    text = TOOL_PROMPT.replace("{tools}", listed)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def parse_calls(text: str) -> list[Call] | None:
    """Calls of the text between the tags, None when it is not the form."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for item in data if isinstance(data, list) else [data]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(item["name"], written))
    return calls


class CallReader:
    """Splits a growing answer into content and calls.

    What may become a tag is held back; a block that turns out to be no call is content, tags and all.
    """

    def __init__(self, *, one_call: bool = False) -> None:
        self._one_call = one_call
        self._text = ""
        self._inside = False
        self.num_calls = 0

    def read(self, text: str, *, finished: bool) -> tuple[str, list[Call]]:
        """Content and calls that the new text completes."""
        self._text += text
        content, calls = "", []
        while True:
            if not self._inside:
                before, tag, rest = self._text.partition(OPEN)
                if not tag:
                    held = 0 if finished else _prefix_at_end(self._text, OPEN)
                    keep = len(self._text) - held
                    content, self._text = content + self._text[:keep], self._text[keep:]
                    break
                content, self._text, self._inside = content + before, rest, True
            block, tag, rest = self._text.partition(CLOSE)
            if not tag and not finished:
                break
            # the closing tag may be cut off by the end of the text, or be an end token
            found = parse_calls(block)
            if found is None:
                content += OPEN + block + tag
            else:
                calls += found
            self._text, self._inside = rest, False
        if self._one_call:
            calls = calls[: max(0, 1 - self.num_calls)]
        self.num_calls += len(calls)
        # white space between calls is layout, not content
        return ("" if self.num_calls and not content.strip() else content), calls


def _prefix_at_end(text: str, tag: str) -> int:
    """Characters at the end of a text that may be the beginning of a tag."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
