"""Pictures as files: what they are called, and how they are written.

Owns both; needs neither torch nor matplotlib, so that a command can check the places before its work.
"""

from __future__ import annotations

import os
from pathlib import Path

from specdec.errors import SpecdecError

# the evidence has the name that was asked for.
KINDS = ("", "-landscape", "-stability")
PRINT_SUFFIX = "-print"


def picture_paths(path: str | Path, *, print_too: bool) -> list[Path]:
    """The files of a selection's pictures: those for a screen, then those for paper.

    Args:
        path: of the evidence; the others are named after it.
        print_too: whether there are variants for paper.
    """
    path = Path(path)
    if path.suffix not in ("", ".png"):
        raise SpecdecError(f"picture ({path}) must end in .png; pictures are PNG files")
    variants = ("", PRINT_SUFFIX) if print_too else ("",)
    return [
        path.with_name(f"{path.stem}{kind}{variant}{path.suffix or '.png'}")
        for variant in variants
        for kind in KINDS
    ]


def write_pictures(drawn: dict[Path, bytes]) -> None:
    """Write each picture whole or not at all."""
    for path, content in drawn.items():
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except OSError as error:
            raise SpecdecError(f"picture ({path}) cannot be written: {error}") from error
