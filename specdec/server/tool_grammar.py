"""The language of answers that must call a tool: `tool_choice` "required", or one that names a function.

Owns which tools are demanded and their grammar in Lark's notation (llguidance's dialect). It is the form that
`tool_calls` reads back, an object a block or one block with a list, each call's arguments inside the tool's
own schema: a demanded call always parses, unless the answer is cut off before its end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from specdec.server.fields import ChatFields, NamedTool, Tool
from specdec.server.problems import bad_field
from specdec.server.tool_calls import CLOSE, OPEN

# calls of one answer: a small model would otherwise go on calling to the end of its tokens
MAX_CALLS = 16
# spaces as Python's `json` writes them, so that white space cannot go on for ever
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def demanded_tools(fields: ChatFields) -> list[Tool]:
    """Tools of which the answer must call one; none when it need not call any.

    Raises:
        Problem: a demand without tools, or for one that is not there.
    """
    choice = fields.tool_choice
    if choice is None or choice in ("none", "auto"):
        return []
    tools = list(fields.tools or ())
    if not tools:
        raise bad_field("tool_choice", "tool_choice needs tools to choose from", "missing_field")
    if not isinstance(choice, NamedTool):
        return tools
    wanted = [tool for tool in tools if tool.function.name == choice.function.name]
    if not wanted:
        names = ", ".join(tool.function.name for tool in tools)
        where = "tool_choice.function.name"
        raise bad_field(where, f"{where} ({choice.function.name:.100}) must be one of the tools: {names}")
    return wanted[:1]


def takes_one_call(fields: ChatFields) -> bool:
    """Whether an answer has one call at most: when told so, and for a function that is named."""
    return fields.parallel_tool_calls is False or isinstance(fields.tool_choice, NamedTool)


def calls_grammar(tools: Sequence[Tool], *, most: int) -> str:
    """Lark grammar of answers that are 1..`most` calls of these tools and nothing else."""
    blocks, calls = "", ""
    if most > 1:
        blocks, calls = f" (NEWLINE block){{0,{most - 1}}}", f' (", " call){{0,{most - 1}}}'
    rules = [
        f"start: block{blocks} | {_text(OPEN)} list {_text(CLOSE)}",
        f"block: {_text(OPEN)} NEWLINE? call NEWLINE? {_text(CLOSE)}",
        f'list: "[" call{calls} "]"',
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
        'NEWLINE: "\\n"',
    ]
    for number, tool in enumerate(tools):
        name = json.dumps(tool.function.name, ensure_ascii=False)
        opening = _text(f'{{"name": {name}, "arguments": ')
        # a schema of its own, so that references into it keep their root
        schema = {"type": "object", **(tool.function.parameters or {}), "x-guidance": _SPACING}
        rules.append(f'call_{number}: {opening} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join(rules)


def _text(text: str) -> str:
    """A text as the notation quotes it."""
    return json.dumps(text, ensure_ascii=False)
