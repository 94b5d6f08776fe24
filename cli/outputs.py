"""Where a command may write: asked before the minutes of work, not after.

Owns the refusals: no place for a file, an input that would be overwritten, a file that this command did not
write; and how a record of specdec is told from other files. Knows nothing of what is written.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import UsageError

_PROC = Path("/proc")
_SCHEMA = re.compile(r"specdec\.([a-z_-]+)/\d+")


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


def record_kind(body: Any) -> str | None:
    """What kind of record of specdec a parsed file is ("bench", "run", ...); None for anything else."""
    found = _SCHEMA.fullmatch(str(body.get("schema"))) if isinstance(body, dict) else None
    return found[1] if found else None


def kind_of_file(path: Path) -> str | None:
    """What kind of record of specdec a file holds; None for anything else, and where there is none."""
    try:
        return record_kind(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def is_run_record(path: Path) -> bool:
    """Whether a file is a run record of specdec."""
    return kind_of_file(path) == "run"


def require_own_result(option: str, path: Path, *kinds: str) -> None:
    """Refuse an output that would replace something else than an earlier result of the same kind.

    A file without content may be written: some make it first to have the name.

    Args:
        option: the one that names the output.
        path: the output.
        kinds: kinds of records that the command writes there.

    Raises:
        UsageError: naming the option and what is there.
    """
    if not path.exists() or not path.stat().st_size:
        return
    found = kind_of_file(path)
    if found not in kinds:
        what = "no record of specdec" if found is None else f"a {found} record"
        raise UsageError(
            f"{option} ({path}) exists and is {what}, which a {kinds[0]} record must not replace; "
            "name another file"
        )


def require_own_beside(option: str, result: Path, beside: Path) -> None:
    """Refuse a file written beside a result where there is one that no earlier result explains.

    Args:
        option: the one that names the result.
        result: the file or folder that the user named.
        beside: what the command writes as well, under a name of its own making.

    Raises:
        UsageError: naming both.
    """
    require_writable(option, beside)
    if beside.exists() and not result.exists():
        raise UsageError(
            f"{option} ({result}) would also replace {beside}, which no earlier run wrote; name another"
        )


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
