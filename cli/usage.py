"""Errors of settings in the words of the command line.

Owns how a field of a config becomes the flag that sets it. Knows nothing of what the settings mean; ranges
are checked where the configs are made, and their messages name fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from specdec.errors import SpecdecError, UsageError
from specdec.exactness import ROUNDING_SETTINGS

# a field with an underscore is no English word; another one is a field where its value follows
_FIELD = re.compile(r"(?<![\w-])([a-z]+(?:_[a-z]+)+(?![\w.])|[a-z]+(?= \())")


def with_flags(message: str, fields: Mapping[str, str]) -> str:
    """The message with every field named by its flag."""
    return _FIELD.sub(lambda found: fields.get(found[0], found[0]), message)


def flags_of(names: Mapping[str, object], renamed: Mapping[str, str]) -> dict[str, str]:
    """Flags of the fields in `names`: `--a-field` for a_field, or what `renamed` says."""
    return {name: "--" + name.replace("_", "-") for name in names} | dict(renamed)


def check_exact(exact: bool, options: Mapping[str, str]) -> None:
    """Refuse options that make another model of the target beside a promise that nothing lossy runs.

    Raises:
        UsageError: naming the option.
    """
    for flag, value in options.items():
        if exact and value in ROUNDING_SETTINGS:
            raise UsageError(f"--exact promises the named target's text; drop it, or {flag} {value}")


def check_rule(rule: str | None, knobs: Mapping[str, float | str], option: str = "--rule") -> None:
    """Refuse an unknown rule or knob before a target is read for it.

    Raises:
        SpecdecError: naming what there is.
    """
    if rule is None:
        return
    from specdec.verification.registry import rule_named

    try:
        rule_named(rule, knobs)
    except SpecdecError as error:
        raise SpecdecError(f"{option} ({rule}): {error}") from error


@contextmanager
def usage_errors(fields: Mapping[str, str]) -> Iterator[None]:
    """Building configs from the command line alone: what they refuse is wrong usage, by flag.

    Raises:
        UsageError: for any SpecdecError of the block.
    """
    try:
        yield
    except UsageError:
        raise
    except SpecdecError as error:
        raise UsageError(with_flags(str(error), fields)) from error


@contextmanager
def named_flags(fields: Mapping[str, str], kind: type[SpecdecError] = SpecdecError) -> Iterator[None]:
    """Errors of `kind` with flags in place of fields; how they end the program stays as it is.

    Raises:
        SpecdecError: of the same type.
    """
    try:
        yield
    except kind as error:
        raise type(error)(with_flags(str(error), fields)) from error
