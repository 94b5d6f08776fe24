"""The several ways in which a request asks for an answer inside a grammar.

Owns OpenAI's `response_format`, a `tool_choice` that demands a call, vLLM's `structured_outputs` and its
older `guided_*` fields, all of which become one `GrammarSpec`.
"""

from __future__ import annotations

import re
from typing import Any

from specdec.sampling_params import GrammarSpec
from specdec.server.fields import ChatFields, GeneratingFields, ResponseFormat, StructuredOutputs
from specdec.server.problems import about_fields, bad_field
from specdec.server.tool_grammar import MAX_CALLS, calls_grammar, demanded_tools, takes_one_call

MAX_CHOICES_IN_GRAMMAR = 1024


def grammar_of(fields: GeneratingFields) -> tuple[GrammarSpec | None, str | None]:
    """The grammar an answer must obey, and the field that asks for it.

    Raises:
        Problem: a 400 that names the field.
    """
    found: dict[str, GrammarSpec] = {}

    def add(field: str, **kind: Any) -> None:
        with about_fields({}, field):
            found[field] = GrammarSpec(**kind)

    if fields.response_format is not None:
        _add_format(fields.response_format, add)
    if fields.structured_outputs is not None:
        _add_structured(fields.structured_outputs, add)
    if fields.guided_json is not None:
        add("guided_json", json_schema=fields.guided_json)
    if fields.guided_regex is not None:
        add("guided_regex", regex=fields.guided_regex)
    if fields.guided_choice is not None:
        add("guided_choice", regex=_one_of("guided_choice", fields.guided_choice))
    if fields.guided_grammar is not None:
        add("guided_grammar", ebnf=fields.guided_grammar)
    if isinstance(fields, ChatFields) and (tools := demanded_tools(fields)):
        add("tool_choice", ebnf=calls_grammar(tools, most=1 if takes_one_call(fields) else MAX_CALLS))
    if len(found) > 1:
        raise bad_field(list(found)[1], f"{' and '.join(found)} exclude each other; give one of them")
    for field, grammar in found.items():
        return grammar, field
    return None, None


def _add_format(wanted: ResponseFormat, add: Any) -> None:
    if wanted.type == "json_object":
        add("response_format", json_schema={"type": "object"})
    elif wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise bad_field("response_format.json_schema", "response_format.json_schema.schema is required")
        add("response_format", json_schema=wanted.json_schema.schema_)


def _add_structured(wanted: StructuredOutputs, add: Any) -> None:
    if wanted.json_ is not None:
        add("structured_outputs.json", json_schema=wanted.json_)
    if wanted.regex is not None:
        add("structured_outputs.regex", regex=wanted.regex)
    if wanted.choice is not None:
        add("structured_outputs.choice", regex=_one_of("structured_outputs.choice", wanted.choice))
    if wanted.grammar is not None:
        add("structured_outputs.grammar", ebnf=wanted.grammar)
    if wanted.json_object:
        add("structured_outputs.json_object", json_schema={"type": "object"})


def _one_of(field: str, choices: list[str]) -> str:
    """An expression that matches exactly these texts (Rust's syntax)."""
    if not 1 <= len(choices) <= MAX_CHOICES_IN_GRAMMAR or not all(choices):
        raise bad_field(field, f"{field} must hold 1..{MAX_CHOICES_IN_GRAMMAR} texts, none empty")
    return "|".join(re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", choice) for choice in choices)
