"""Where a command may write: asked before the minutes of work, not after.

Owns the refusals: no place for a file, an input that would be overwritten, a record that is not specdec's.
Knows nothing of what is written.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from specdec.errors import UsageError
from specdec.provenance import RUN_SCHEMA

_PROC = Path("/proc")


def require_writable(option: str, path: Path) -> None:
    """Make the folder of an output file and refuse a place that cannot be written.

    Raises:
        UsageError: naming the option, the path and why.
    """
    if path.is_dir():
        raise UsageError(f"{option} ({path}) is a folder; name a file")
    if _is_stream(path):
        raise UsageError(f"{option} ({path}) is a device, a pipe or a stream; name a regular file")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} ({path}) cannot be written: {folder} is not a folder you may write to")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} ({path}) cannot be written: {error.strerror}") from error


def _is_stream(path: Path) -> bool:
    """Whether a path is something else than a file, or a link to an open stream, which may be a file."""
    if path.exists() and not path.is_file():
        return True
    if _PROC in path.absolute().parent.resolve().parents:
        return True
    return path.is_symlink() and _PROC in (path.parent.resolve() / path.readlink()).parents


def require_not_input(option: str, path: Path, inputs: Mapping[str, Path | None]) -> None:
    """Refuse an output that is one of the files the command reads.

    Args:
        option: the one that names the output.
        path: the output, which need not exist.
        inputs: the option or argument of each input, with its file; None where it was not given.

    Raises:
        UsageError: naming both.
    """
    for name, file in inputs.items():
        if file is not None and _same_file(path, file):
            raise UsageError(f"{option} ({path}) is the file that {name} is read from; name another file")


def _same_file(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return os.path.samefile(one, other)
    return one.resolve() == other.resolve()


def is_run_record(path: Path) -> bool:
    """Whether a file is a run record of specdec."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("schema") == RUN_SCHEMA


def require_own_record(option: str, out: Path, record: Path) -> None:
    """Refuse an output whose run record would replace a file that is none.

    Args:
        option: the one that names the output.
        out: the output.
        record: where its run record goes.

    Raises:
        UsageError: naming both.
    """
    require_writable(option, record)
    if record.exists() and not is_run_record(record):
        raise UsageError(
            f"{option} ({out}) would replace {record}, which is no run record of specdec; name another file"
        )
