"""What a report is made from: records that specdec wrote, found, read and told apart.

Owns which files are records, their names in a report, and rows of a bench with the coordinates that older
records keep elsewhere. Checks what a report needs of each, not the whole schema (`cli/schemas`). Knows
nothing of figures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.cli.outputs import record_kind
from specdec.errors import UsageError

PLAIN = "plain"
TRAINING, RUN = "training", "run"
# kind of record -> what a report cannot do without
_NEEDED: dict[str, tuple[str, ...]] = {
    "bench": ("target", "data", "settings"),
    "compare": ("target", "data", "engines"),
    "load": ("model", "points"),
    "load_sweep": ("target", "draft", "points"),
    "micro": ("target", "steps", "verify_cost"),
    "verify-cost": ("target", "passes"),
    "sweep": ("target", "points"),
    "study": ("target", "findings"),
    "audit": ("target", "levels", "results"),
    "selection": ("target", "boundaries", "scores", "cka"),
    RUN: ("command", "versions", "hardware"),
}
_METRICS = "metrics.jsonl"
# a file that says what is done, not what was measured
_RUN_SUFFIX = "run.json"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record.

    Attributes:
        kind: as in its schema's name; `training` for the metrics of a draft.
        name: what it is called in a report.
        path: where it was read.
        body: its content.
        lines: of metrics, the evaluations, in order.
    """

    kind: str
    name: str
    path: Path
    body: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]] = ()

    @property
    def run(self) -> Mapping[str, Any] | None:
        """Its run record."""
        return self.body if self.kind in (RUN, TRAINING) else self.body.get("run")


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One setting of a bench at one point; `answers` is one record an answer, empty where none were kept."""

    label: str
    record: Record
    setting: str
    data: str
    batch_size: int
    temperature: float
    body: Mapping[str, Any]
    answers: Sequence[Mapping[str, Any]]

    @property
    def point(self) -> tuple[str, int, float]:
        """Coordinates: data, batch size, temperature."""
        return self.data, self.batch_size, self.temperature

    @property
    def drafts(self) -> bool:
        """Whether it is a setting of our engine with speculation, even if a policy never let it draft."""
        # other engines have no verify steps that we could count
        ours = "relative" not in self.body and self.acceptance.get("verify_steps", 1) > 0
        return ours and self.setting != PLAIN

    @property
    def acceptance(self) -> Mapping[str, Any]:
        """Its counts and rates."""
        found: Mapping[str, Any] = self.body["acceptance"]
        return found

    @property
    def lossless(self) -> bool:
        """Whether the text has the target's law and the counts are real."""
        return bool(self.body.get("lossless", True)) and "simulated" not in self.body


def read_records(places: Sequence[Path]) -> list[Record]:
    """Read record files, and those of folders, in the order given.

    Raises:
        UsageError: no such file, one that is no record, or a folder without any.
    """
    records: list[Record] = []
    for place in places:
        if place.is_dir():
            found = [record for path in _files(place) if (record := _read(path, strict=False)) is not None]
            if not found:
                raise UsageError(f"RUN ({place}) holds no record of specdec; name a file written with --out")
            records += found
        else:
            record = _read(place, strict=True)
            assert record is not None, "a strict reading gives a record or an error"
            records.append(record)
    return _named(records)


def _files(folder: Path) -> Iterator[Path]:
    # a draft's own config.json and its like hold no schema and are passed over
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json" or path.name == _METRICS:
            yield path


def _read(path: Path, *, strict: bool) -> Record | None:
    if path.name == _METRICS:
        return _read_metrics(path)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"RUN ({path}) cannot be read: {error.strerror}") from error
    except ValueError as error:
        if strict:
            raise UsageError(f"RUN ({path}) is not valid JSON: {error}") from error
        return None
    kind = record_kind(body)
    if kind is None or kind not in _NEEDED:
        if strict:
            kinds = ", ".join(_NEEDED)
            raise UsageError(f"RUN ({path}) is no record that a report can show; known: {kinds}, {_METRICS}")
        return None
    if kind == RUN and not strict and _goes_with_another(path):
        return None
    missing = [name for name in _NEEDED[kind] if name not in body]
    if missing:
        raise UsageError(f"RUN ({path}) lacks {', '.join(missing)}; a {kind} record has them")
    return Record(kind=kind, name="", path=path, body=printable(body))


def _goes_with_another(path: Path) -> bool:
    """Whether a run record stands beside what it records, which is read itself."""
    if path.name == _RUN_SUFFIX:
        return (path.parent / _METRICS).is_file()
    return path.with_name(path.name.removesuffix(f".{_RUN_SUFFIX}") + ".json").is_file()


def _read_metrics(path: Path) -> Record:
    """Evaluations of a training, with the run record beside them."""
    lines = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if isinstance(one, dict) and "eval" in one:
                lines.append(printable(one))
    except OSError as error:
        raise UsageError(f"RUN ({path}) cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"RUN ({path}) has a line that is not valid JSON: {error}") from error
    beside = path.with_name(_RUN_SUFFIX)
    run = _read(beside, strict=True) if beside.is_file() else None
    return Record(kind=TRAINING, name="", path=path, body=run.body if run else {}, lines=lines)


def printable(value: Any) -> Any:
    """The same without characters that no page can hold: halves of pairs, controls."""
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode("utf-8")
        return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)
    if isinstance(value, dict):
        return {printable(name): printable(one) for name, one in value.items()}
    return [printable(one) for one in value] if isinstance(value, list) else value


def _named(records: list[Record]) -> list[Record]:
    """Short names that differ: of the file, with as many folders as that takes."""

    def name(path: Path, folders: int) -> str:
        own = path.parent.name if path.name in (_METRICS, _RUN_SUFFIX) else path.stem.removesuffix(".run")
        above = path.parent.parent if path.name in (_METRICS, _RUN_SUFFIX) else path.parent
        parts = [part for part in above.parts if part != above.anchor]
        return "/".join([*parts[len(parts) - folders :], own]) if folders else own

    depths = [0] * len(records)
    for _ in range(4):
        names = [name(record.path, depth) for record, depth in zip(records, depths, strict=True)]
        often = Counter(names)
        depths = [depth + (often[one] > 1) for one, depth in zip(names, depths, strict=True)]
    often = Counter(names)
    named = []
    for number, (record, one) in enumerate(zip(records, names, strict=True), start=1):
        named.append(replace(record, name=printable(f"{one} ({number})" if often[one] > 1 else one)))
    return named


def bench_rows(records: Sequence[Record]) -> list[BenchRow]:
    """Every setting of the bench records at every point; labels say what differs among the rows."""
    return labelled_rows([row for record in records if record.kind == "bench" for row in _rows(record)])


def labelled_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows, each label with what differs among them."""
    many = len({row.record.name for row in rows}) > 1
    told = {
        "data": len({row.data for row in rows}) > 1,
        "batch": len({row.batch_size for row in rows}) > 1,
        "temperature": len({row.temperature for row in rows}) > 1,
    }
    labelled = []
    for row in rows:
        words = [row.setting]
        words += [row.data] if told["data"] else []
        words += [f"batch {row.batch_size}"] if told["batch"] else []
        words += [f"temperature {row.temperature:g}"] if told["temperature"] else []
        label = ", ".join(words) + (f" [{row.record.name}]" if many else "")
        labelled.append(replace(row, label=label))
    return labelled


def _rows(record: Record) -> Iterator[BenchRow]:
    body = record.body
    defaults = (body.get("run") or {}).get("defaults", {})
    kept: Mapping[str, Sequence[Mapping[str, Any]]] = body.get("per_prompt") or {}
    for one in body["settings"]:
        data, batch, temperature = (
            one.get("data", body["data"]),
            one.get("batch_size", defaults.get("batch_size", 1)),
            one.get("temperature", defaults.get("temperature", 0.0)),
        )
        answers = [
            answer
            for answer in kept.get(one["setting"], ())
            if answer.get("data", data) == data
            and answer.get("batch_size", batch) == batch
            and answer.get("temperature", temperature) == temperature
        ]
        yield BenchRow(
            label=one["setting"],
            record=record,
            setting=one["setting"],
            data=str(data),
            batch_size=batch,
            temperature=temperature,
            body=one,
            answers=answers,
        )
