"""`--speculative-config`: vLLM's JSON, or SGLang's three numbers in JSON, as a draft and a shape.

Owns the translation of other engines' names. SGLang counts the root among `num_draft_tokens`; specdec does
not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from specdec.config import SpecConfig
from specdec.errors import SpecdecError, UsageError

_FLAG = "--speculative-config"
_SGLANG = ("num_steps", "eagle_topk", "num_draft_tokens")
_KEYS = (
    *("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    *("rejection_sample_method", "draft_tensor_parallel_size"),
    *_SGLANG,
)
# how vLLM's and SGLang's flags spell the same keys
_PREFIX = "speculative_"
_METHODS = ("eagle3", "ngram", "draft")
_RULES = {"standard": None, "strict": None, "block": "block"}


@dataclass(frozen=True)
class SpeculativeChoice:
    """What the JSON asks for: a draft as `--draft` names it, a shape, and a rule or None."""

    draft: str
    spec: SpecConfig
    rule: str | None


def parse_speculative_config(text: str) -> SpeculativeChoice:
    """Read the option.

    Raises:
        UsageError: not JSON, an unknown key, or values that do not go together.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{_FLAG} must be a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f'{_FLAG} must be a JSON object, such as {{"method":"ngram"}}')
    keys = {name.removeprefix(_PREFIX): value for name, value in given.items() if value is not None}
    for name in keys:
        if name not in _KEYS:
            raise UsageError(f"{_FLAG} ({name}) is not a key known here; known: {', '.join(_KEYS)}")
    if keys.get("draft_tensor_parallel_size", 1) != 1:
        raise UsageError(f"{_FLAG} (draft_tensor_parallel_size) must be 1")
    try:
        return SpeculativeChoice(_draft(keys), _shape(keys), _rule(keys))
    except UsageError:
        raise
    except SpecdecError as error:
        raise UsageError(f"{_FLAG}: {error}") from error


def _draft(keys: dict[str, Any]) -> str:
    method, model = keys.get("method"), keys.get("model")
    if model is not None and not isinstance(model, str):
        raise UsageError(f"{_FLAG} (model) must be a folder or a name")
    # never guessed from the model's name
    if method is None and model is None:
        raise UsageError(f"{_FLAG} needs method or model")
    if method is not None and method not in _METHODS:
        raise UsageError(f"{_FLAG} (method {method!r}) must be one of {', '.join(_METHODS)}")
    if method == "ngram":
        return "ngram" if model in (None, "ngram") else f"ngram+{model}"
    if model is None:
        raise UsageError(f"{_FLAG} (method {method}) needs model, the draft's folder or name")
    return str(model)


def _shape(keys: dict[str, Any]) -> SpecConfig:
    numbers = [name for name in _SGLANG if name in keys]
    length = keys.get("num_speculative_tokens")
    base = SpecConfig()
    lookup = {"ngram_max": keys.get("prompt_lookup_max"), "ngram_min": keys.get("prompt_lookup_min")}
    base = replace(base, **{name: value for name, value in lookup.items() if value is not None})
    if numbers and length is not None:
        raise UsageError(f"{_FLAG}: num_speculative_tokens and {numbers[0]} exclude each other")
    if numbers and len(numbers) < len(_SGLANG):
        missing = [name for name in _SGLANG if name not in keys]
        raise UsageError(f"{_FLAG}: {', '.join(_SGLANG)} go together; {', '.join(missing)} is missing")
    if numbers:
        for name in _SGLANG:
            if isinstance(keys[name], bool) or not isinstance(keys[name], int):
                raise UsageError(f"{_FLAG} ({name} {keys[name]!r}) must be a whole number")
        depth, top_k, nodes = (keys[name] for name in _SGLANG)
        if nodes < depth + 1:
            raise UsageError(
                f"{_FLAG} (num_draft_tokens {nodes}) must be at least num_steps + 1 ({depth + 1}): it counts "
                "the root"
            )
        return replace(base, max_depth=depth, top_k=top_k, max_nodes=nodes - 1)
    if length is None:
        return base
    return replace(base, max_depth=length, top_k=1, max_nodes=length)


def _rule(keys: dict[str, Any]) -> str | None:
    method = keys.get("rejection_sample_method")
    if method is None:
        return None
    if method not in _RULES:
        raise UsageError(
            f"{_FLAG} (rejection_sample_method {method!r}) must be one of {', '.join(_RULES)}; other rules "
            "are named with --rule (see specdec rules)"
        )
    return _RULES[method]
