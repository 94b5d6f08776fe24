"""Options of a command from a TOML file: `--config FILE`.

Owns the reading and the refusal of keys that are no option. What stands on the command line counts before
the file. Knows nothing of what options mean.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import typer

from specdec.errors import UsageError


def take_options(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the command's defaults; for an eager option's callback.

    Raises:
        UsageError: the file cannot be read, or has a key that is no option of the command.
    """
    if path is None:
        return None
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config ({path}) cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config ({path}) is not valid TOML: {error}") from error
    names = {
        flag.lstrip("-"): parameter.name
        for parameter in context.command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
        if parameter.name not in ("config", "help") and flag not in parameter.secondary_opts
    }
    defaults: dict[str, object] = {}
    for key, value in found.items():
        name = names.get(key.replace("_", "-"))
        if name is None:
            raise UsageError(f"--config ({path}): {key} is no option; options are {', '.join(sorted(names))}")
        if isinstance(value, dict | list):
            raise UsageError(f"--config ({path}): {key} must be one value, not {type(value).__name__}")
        defaults[name] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path
