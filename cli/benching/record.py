"""The record of a bench: rows and answers of every point, kept after each, so that a killed run can go on.

Owns the file's layout (`schemas/bench.schema.json`) and what may be gone on with. Does not measure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.cli.benching.paired import paired_lengths
from specdec.cli.benching.points import BenchPoint
from specdec.cli.benching.pooled import pooled_rows
from specdec.errors import SpecdecError, UsageError
from specdec.provenance import read_json, write_text_atomic

SCHEMA = "specdec.bench/1"


@dataclass(kw_only=True)
class BenchRecord:
    """What is measured so far.

    Attributes:
        key: hash of what all points have in common.
        planned: how many points there are to be.
        rows: figures of every setting at every finished point.
        answers: one record an answer, by setting.
        left_out: turns that were not asked for, and why.
        earlier: the runs that measured the points found in the file.
    """

    key: str
    planned: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    earlier: list[dict[str, Any]] = field(default_factory=list)

    def has(self, point: BenchPoint) -> bool:
        """Whether a point is finished."""
        return any(_at(row, point) for row in self.rows)

    @property
    def finished(self) -> int:
        """How many points are."""
        return len({(row["data"], row["batch_size"], row["temperature"]) for row in self.rows})

    def add(
        self, point: BenchPoint, rows: list[dict[str, Any]], answers: Mapping[str, list[dict[str, Any]]]
    ) -> None:
        """Take a finished point's figures, those of each setting, and its answers."""
        self.rows += rows
        for name, records in answers.items():
            self.answers.setdefault(name, []).extend({**one, **point.coordinates} for one in records)

    def pooled(self) -> list[dict[str, Any]]:
        """Rows over all prompt sets."""
        return pooled_rows(self.rows, self.answers)

    def paired_lengths(self) -> list[dict[str, Any]]:
        """Drafters against each other, paired by prompt."""
        return paired_lengths(self.rows, self.answers)

    def state(self) -> dict[str, Any]:
        """How far it is."""
        return {
            "complete": self.finished >= self.planned,
            "points": {"planned": self.planned, "finished": self.finished, "key": self.key},
        }

    def write(self, path: Path, head: Mapping[str, Any], tail: Mapping[str, Any]) -> None:
        """Write the whole file, or leave the old one whole.

        Args:
            path: where.
            head: comes first: schema, target, data.
            tail: what explains it: run, definitions.
        """
        fields = {
            **head,
            **self.state(),
            "settings": self.rows,
            "pooled": self.pooled(),
            "paired_lengths": self.paired_lengths(),
            "left_out": self.left_out,
            **tail,
            "per_prompt": self.answers,
        }
        lines = (f"{_json(name)}: {_lines(value)}" for name, value in fields.items())
        write_text_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")


def open_record(path: Path | None, key: str, planned: int, *, resume: bool) -> BenchRecord:
    """An empty record, or what the file at `path` holds when a run goes on.

    Raises:
        UsageError: an unfinished record is there and nobody said to go on with it, or it is of another run.
    """
    record = BenchRecord(key=key, planned=planned)
    if path is None or not path.exists():
        return record
    try:
        found = read_json(path)
    except SpecdecError:
        found = {}
    if not resume:
        if found.get("schema") == SCHEMA and found.get("complete") is False:
            done = found["points"]
            raise UsageError(
                f"--out ({path}) holds {done['finished']} finished points of {done['planned']}: go on with "
                "--resume, or name another file"
            )
        return record
    if found.get("schema") != SCHEMA or "points" not in found:
        raise UsageError(
            f"--resume: --out ({path}) is no record of points of specdec bench; name another file"
        )
    if found["points"]["key"] != key:
        raise UsageError(
            f"--resume: the points of --out ({path}) were measured with other settings, prompts or weights; "
            "name another file"
        )
    record.rows = found["settings"]
    record.answers = found["per_prompt"]
    record.left_out = found["left_out"]
    run = found["run"]
    record.earlier = [
        *run["extra"].get("earlier", []),
        {"started_at": run["started_at"], "git": run["git"], "points": found["points"]["finished"]},
    ]
    return record


def _lines(value: Any) -> str:
    """JSON with a line for each row and answer: half of what indenting takes, and a diff still shows one."""
    if isinstance(value, dict) and value and all(isinstance(one, list) for one in value.values()):
        return "{\n" + ",\n".join(f"{_json(name)}: {_lines(one)}" for name, one in value.items()) + "\n}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(_json(one) for one in value) + "\n]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _at(row: Mapping[str, Any], point: BenchPoint) -> bool:
    return all(row[name] == value for name, value in point.coordinates.items())
