"""Sets of the `datasets` library, streamed once into a local JSONL.

Owns their spelling, `hf:NAME[,config=C][,split=S][,limit=N]`, and the copy: training reads its data again for
every run and every resume, hashes it, and must not depend on a network. NAME is a hub id, a folder or a
.parquet, .jsonl or .csv file. Only fields that training knows are kept. Knows nothing of chats.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError, writing
from specdec.provenance import cache_home

PREFIX = "hf:"
SPELLING = "hf:NAME[,config=CONFIG][,split=SPLIT][,limit=ROWS]"
KEPT = (
    "id",
    "category",
    "messages",
    "conversations",
    "prompt",
    "response",
    "completion",
    "answer",
    "text",
    "prompt_token_ids",
    "response_token_ids",
)
_FILE_KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class StreamedSet:
    """One set as spelled."""

    name: str
    config: str | None
    split: str
    limit: int | None


def is_streamed(spelling: str) -> bool:
    """Whether a spelling names such a set."""
    return spelling.startswith(PREFIX)


def parse_streamed(spelling: str) -> StreamedSet:
    """Read a spelling.

    Raises:
        SpecdecError: no name, an unknown option, or a limit that is no number.
    """
    name, *words = spelling.removeprefix(PREFIX).split(",")
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in ("config", "split", "limit") or key in options:
            raise SpecdecError(f"--data ({spelling}): ({word}) must be config=, split= or limit=, each once")
        options[key] = value
    if not name:
        raise SpecdecError(f"--data ({spelling}) must be {SPELLING}")
    limit = options.get("limit")
    if limit is not None and not (limit.isdecimal() and int(limit) > 0):
        raise SpecdecError(f"--data ({spelling}): limit ({limit}) must be a positive whole number")
    return StreamedSet(
        name=name,
        config=options.get("config"),
        split=options.get("split", "train"),
        limit=None if limit is None else int(limit),
    )


def local_copy(spelling: str) -> Path:
    """The JSONL of a set under `$SPECDEC_HOME/datasets`, written on first use.

    Raises:
        SpecdecError: the library is not installed, the set cannot be loaded, or it has no known field.
    """
    wanted = parse_streamed(spelling)
    key = hashlib.sha256(json.dumps([*vars(wanted).values(), _local_state(wanted.name)]).encode()).hexdigest()
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", wanted.name).strip("-")[-40:]
    path = cache_home() / "datasets" / f"{slug}-{key[:16]}.jsonl"
    if path.is_file():
        return path
    with writing(f"local copy of --data ({spelling})"):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with scratch.open("w", encoding="utf-8") as file:
                rows = 0
                for row in _kept_rows(_stream(wanted, spelling), wanted, spelling):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    rows += 1
            if not rows:
                raise SpecdecError(f"--data ({spelling}) has no rows")
            # a killed run leaves no copy, or a whole one
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    return path


def _local_state(name: str) -> list[Any]:
    """What tells a set on this disk from what it was before; nothing for one of the hub."""
    path = Path(name)
    files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def _stream(wanted: StreamedSet, spelling: str) -> Iterable[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SpecdecError(
            f'--data ({spelling}) needs the datasets library: pip install "specdec[data]"'
        ) from error
    path = Path(wanted.name)
    try:
        if path.is_file():
            if path.suffix not in _FILE_KINDS:
                raise SpecdecError(
                    f"--data ({spelling}): {path.name} must end in {', '.join(_FILE_KINDS)}; other files are "
                    "read without hf:"
                )
            kind = _FILE_KINDS[path.suffix]
            found = load_dataset(kind, data_files=str(path), split=wanted.split, streaming=True)
        else:
            found = load_dataset(wanted.name, wanted.config, split=wanted.split, streaming=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecdecError(f"--data ({spelling}) cannot be loaded: {reason}") from error
    rows: Iterable[Mapping[str, Any]] = found
    return rows


def _kept_rows(
    rows: Iterable[Mapping[str, Any]], wanted: StreamedSet, spelling: str
) -> Iterator[dict[str, Any]]:
    """Rows with the fields that training knows; an unknown kind of set is refused at its first row."""
    from logging import getLogger

    last = time.monotonic()
    for number, row in enumerate(rows):
        if number == wanted.limit:
            return
        kept = {key: row[key] for key in KEPT if row.get(key) is not None}
        if not kept.keys() - {"id", "category"} and number == 0:
            raise SpecdecError(
                f"--data ({spelling}) has the fields {', '.join(row)}, and none of "
                f"{', '.join(key for key in KEPT if key not in ('id', 'category'))}"
            )
        kept["id"] = str(kept.get("id", f"row-{number}"))
        yield kept
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            getLogger(__name__).info("%s: %d rows", spelling, number + 1)
