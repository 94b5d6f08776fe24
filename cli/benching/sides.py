"""The two sides of `specdec bench`: an engine of its own, or a server by URL.

Owns which options belong to which side, and the refusal of one that the other side would ignore.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from math import inf
from typing import TypeVar

import typer

from specdec.errors import SpecdecError, UsageError

# options of both sides
_SHARED = frozenset(
    {"data", "limit", "max_tokens", "temperature", "seed", "warm_up", "out", "turns"} | {"ignore_eos"}
)
_LOAD = frozenset(
    {"url", "model", "endpoint", "concurrency", "request_rate", "shared_prefix", "prefix_groups"}
    | {"think_time", "cold", "goodput", "extra_body", "request_timeout", "duration", "server_pid"}
)
# what the measurements of a machine, which decode no prompts, go by
_ALONE = {
    "micro": frozenset({"target", "device", "dtype", "deterministic", "repeats", "trace", "out"}),
    "verify_cost": frozenset({"target", "dtype", "weights"}),
}
_HTTP = "httpx2"
Number = TypeVar("Number", int, float)
Value = TypeVar("Value")


def parse_numbers(option: str, text: str, kind: Callable[[str], Number], least: Number) -> list[Number]:
    """`1,4,8` as numbers.

    Args:
        option: names the list.
        text: what was given.
        kind: int or float.
        least: the smallest that is allowed.

    Raises:
        UsageError: no number, one that is too small, or the same twice.
    """
    try:
        numbers = [kind(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number < inf for number in numbers):
        words = "whole numbers" if kind is int else "numbers"
        raise UsageError(
            f"{option} ({text}) must be {words} of at least {least:g}, one or several as in 1,4,8"
        )
    if len(set(numbers)) != len(numbers):
        raise UsageError(f"{option} ({text}) must not name the same number twice")
    return numbers


def only(option: str, values: Sequence[Value]) -> Value:
    """The one value of an option that a load takes once.

    Raises:
        UsageError: several.
    """
    if len(values) != 1:
        raise UsageError(f"{option} with --url takes one value, not {len(values)}")
    return values[0]


def check_sides(context: typer.Context) -> None:
    """Refuse options of the other side, and a side without what it needs.

    Raises:
        UsageError: naming the option.
        SpecdecError: the HTTP client is not installed.
    """
    given = [name for name in context.params if _was_given(context, name)]
    if "url" not in given:
        if "target" not in given:
            raise UsageError("TARGET is missing: name a target, or a server with --url")
        for name in given:
            if name in _LOAD:
                raise UsageError(f"{_flag(name)} needs --url: it is about load on a running server")
        _check_alone(given)
        return
    for name in given:
        if name not in _LOAD | _SHARED:
            raise UsageError(f"{_flag(name)} and --url exclude each other: the server has its own settings")
    if find_spec(_HTTP) is None:
        raise SpecdecError(f'--url needs {_HTTP}; install it with pip install "specdec[load]"')


def _check_alone(given: list[str]) -> None:
    """Refuse what --micro and --verify-cost would ignore."""
    for alone, taken in _ALONE.items():
        for name in given if alone in given else ():
            if name != alone and name not in taken:
                raise UsageError(f"{_flag(name)} and {_flag(alone)} exclude each other; give one of them")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _flag(name: str) -> str:
    return "TARGET" if name == "target" else "--" + name.replace("_", "-")
