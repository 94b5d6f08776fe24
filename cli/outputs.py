"""Where a command may write: asked before the minutes of work, not after."""

import os
from pathlib import Path

from specdec.errors import UsageError


def require_writable(option: str, path: Path) -> None:
    """Make the folder of an output file and refuse a place that cannot be written.

    Raises:
        UsageError: naming the option, the path and why.
    """
    if path.is_dir():
        raise UsageError(f"{option} ({path}) is a folder; name a file")
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option} ({path}) cannot be written: {folder} is not a folder you may write to")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} ({path}) cannot be written: {error.strerror}") from error
