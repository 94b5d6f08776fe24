"""`selection.json` as a file: its schema, reading and writing.

Owns the version and what must be in a file of it; the fields are documented in `layer_select/README.md`.
Does not compute anything and needs no torch. The number in the schema's name is its major version: a reader
takes the majors it knows, whatever minor follows a dot, and refuses others. Version 1 (the first release)
has a subset of version 2's fields, with the same meaning.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.provenance import write_json_atomic

SCHEMA = "specdec.selection/2"
READABLE = (1, 2)
_VERSION = re.compile(r"specdec\.selection/(\d+)(?:\.\d+)?")
_FIELDS_1 = (
    "target",
    "boundaries",
    "objective",
    "lambda",
    "estimator",
    "search",
    "scores",
    "cka",
    "runners_up",
)
# every field a file of this version has, in order.
FIELDS = (
    "schema", "target", "boundaries", "objective", "lambda", "lambda_sweep", "estimator", "search",
    "searches", "constraints", "scores", "evidence", "cka", "agreement", "runners_up", "references",
    "landscape", "stability", "cost", "settings", "warnings", "hashes",
)  # fmt: skip


def write_selection(path: str | Path, document: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    assert tuple(document) == FIELDS, "a selection document has the fields of its schema, in order"
    write_json_atomic(Path(path), document)


def read_selection(path: str | Path) -> dict[str, Any]:
    """Read a selection file, checking its schema, its fields and that its boundaries fit its target.

    Args:
        path: a file of `specdec select-layers`, of this version or an earlier one.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecdecError(f"selection file ({path}) cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecdecError(f"selection file ({path}) cannot be read: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    version = _VERSION.fullmatch(schema) if isinstance(schema, str) else None
    if version is None or int(version[1]) not in READABLE:
        raise SpecdecError(
            f"selection file ({path}) has schema ({schema}); this version reads "
            f"{', '.join(f'specdec.selection/{major}' for major in READABLE)}; select again"
        )
    missing = [name for name in (_FIELDS_1 if version[1] == "1" else FIELDS) if name not in document]
    if missing:
        raise SpecdecError(f"selection file ({path}) lacks {', '.join(missing)}; it is cut off or was edited")
    _require_boundaries(path, document)
    return document


def _require_boundaries(path: Path, document: dict[str, Any]) -> None:
    target, boundaries = document["target"], document["boundaries"]
    num_layers = target.get("num_layers") if isinstance(target, dict) else None
    if not isinstance(num_layers, int):
        raise SpecdecError(
            f"selection file ({path}) does not say how many layers its target has; select again"
        )
    whole = isinstance(boundaries, list) and bool(boundaries) and all(type(b) is int for b in boundaries)
    if (
        not whole
        or boundaries != sorted(set(boundaries))
        or not 0 <= boundaries[0] <= boundaries[-1] <= num_layers
    ):
        raise SpecdecError(
            f"selection file ({path}) has boundaries {boundaries}; they must be whole numbers, distinct, "
            f"ascending and in 0..{num_layers}"
        )
