"""The sampling options of `specdec generate` as the parameters of a request.

Owns what only a command line has: files, `ID=VALUE` pairs, and which options exclude each other. Ranges are
checked where the parameters are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec.errors import UsageError
from specdec.sampling_params import GrammarSpec


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """Biases of repeated `--logit-bias ID=VALUE`.

    Raises:
        UsageError: not of that form, or an id twice.
    """
    bias: dict[int, float] = {}
    for pair in pairs:
        left, _, right = pair.partition("=")
        try:
            token_id, value = int(left), float(right)
        except ValueError as error:
            raise UsageError(f"--logit-bias ({pair}) must be ID=VALUE, such as 42=-5") from error
        if token_id in bias:
            raise UsageError(f"--logit-bias ({pair}) is given twice for id {token_id}")
        bias[token_id] = value
    return bias


def parse_knobs(pairs: Sequence[str]) -> dict[str, float | str]:
    """Knobs of repeated `--knob NAME=VALUE`; a value that is no number stays a word.

    Raises:
        UsageError: not of that form, or a name twice.
    """
    knobs: dict[str, float | str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals or not value:
            raise UsageError(f"--knob ({pair}) must be NAME=VALUE")
        if name in knobs:
            raise UsageError(f"--knob ({pair}) is given twice for {name}")
        try:
            knobs[name] = float(value)
        except ValueError:
            knobs[name] = value
    return knobs


def read_grammar(json_schema: Path | None, regex: str | None, ebnf: Path | None) -> GrammarSpec | None:
    """The grammar of `--json-schema FILE`, `--regex PATTERN` or `--ebnf FILE`; None without any.

    Raises:
        UsageError: more than one of them, or a file that cannot be read.
    """
    given = {"--json-schema": json_schema, "--regex": regex, "--ebnf": ebnf}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} exclude each other; give one of them")
    if not names:
        return None
    return GrammarSpec(
        json_schema=None if json_schema is None else _read(names[0], json_schema),
        regex=regex,
        ebnf=None if ebnf is None else _read(names[0], ebnf),
    )


def _read(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} ({path}) cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} ({path}) must be a text in UTF-8") from error
