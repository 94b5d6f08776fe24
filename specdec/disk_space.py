"""Can blocks be kept in this folder? Asked before anything slow, answered within two seconds.

Imports nothing heavy.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from specdec.errors import SpecdecError

ANSWER_S = 2.0
_PROBE_BYTES = 1 << 20


def check_disk_cache(folder: Path, limit_bytes: int) -> None:
    """Refuse a folder that cannot hold blocks.

    Args:
        folder: made if missing.
        limit_bytes: what it is to hold, with the blocks that are there already.

    Raises:
        SpecdecError: it cannot be written to, is too small, or does not answer in time.
    """
    said: list[str | None] = []
    # a file system that hangs keeps its thread
    asking = threading.Thread(target=lambda: said.append(_what_is_wrong(folder, limit_bytes)), daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    wrong = said[0] if said else f"does not answer within {ANSWER_S:g} s; choose one on a disk that does"
    if wrong is not None:
        raise SpecdecError(f"disk_cache_dir ({folder}) {wrong}")


def _what_is_wrong(folder: Path, limit_bytes: int) -> str | None:
    probe = folder / ".probe.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        held = sum(path.stat().st_size for path in folder.glob("*/*.kv"))
        try:
            probe.write_bytes(bytes(min(_PROBE_BYTES, limit_bytes)))
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"cannot be written to: {error.strerror}; choose a folder that is yours, with room"
    if held + free < limit_bytes:
        return (
            f"has {(held + free) / 1e9:.2f} GB for blocks, less than disk_cache_gb ({limit_bytes / 1e9:g}); "
            "lower that, or free some"
        )
    return None
