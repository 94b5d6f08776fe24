"""The two sides of `specdec bench`: an engine of its own, or a server by URL.

Owns which options belong to which side, and the refusal of one that the other side would ignore.
"""

from importlib.util import find_spec

import typer

from specdec.errors import SpecdecError, UsageError

# options of both sides
_SHARED = frozenset({"data", "limit", "max_tokens", "temperature", "seed", "warm_up", "out"})
_LOAD = frozenset(
    {"url", "model", "endpoint", "concurrency", "request_rate", "shared_prefix", "prefix_groups", "turns"}
    | {"think_time", "cold", "ignore_eos", "goodput", "extra_body", "request_timeout"}
)
# what the measurements of a machine, which decode no prompts, go by
_ALONE = {
    "micro": frozenset({"target", "device", "dtype", "deterministic", "repeats", "trace", "out"}),
    "verify_cost": frozenset({"target"}),
}
_HTTP = "httpx2"


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
