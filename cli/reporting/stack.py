"""Everything a run ran on, told: hardware, versions, precision, seeds, settings, commands, revision.

Owns how run records become tables: what all have alike once, what differs under each record's name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.cli.paper import Table
from specdec.cli.reporting.parts import Part, SectionParts
from specdec.cli.reporting.records import Record


def stack_section(records: Sequence[Record]) -> SectionParts:
    """The disclosure of all records that carry a run record."""
    known = {record.name: run_fields(record.run) for record in records if record.run}
    silent = [record.name for record in records if not record.run]
    fields = list(dict.fromkeys(name for one in known.values() for name in one))
    alike = [name for name in fields if len({one.get(name) for one in known.values()}) == 1]
    blocks: list[Part] = []
    if len(known) > 1 and alike:
        first = next(iter(known.values()))
        blocks.append(
            Table(
                columns=["field", "value"],
                rows=[[name, first[name]] for name in alike],
                caption=f"The same in all {len(known)} records",
            )
        )
    for name, one in known.items():
        own = [field for field in one if len(known) == 1 or field not in alike]
        blocks.append(
            Table(columns=["field", "value"], rows=[[field, one[field]] for field in own], caption=name)
        )
    if silent:
        blocks.append(f"Without a run record, so that nothing is known of their stack: {', '.join(silent)}.")
    return SectionParts(title="What it ran on", blocks=blocks)


def run_fields(run: Mapping[str, Any]) -> dict[str, str]:
    """A run record as names and texts, nested names with dots."""
    fields = {"command": shlex.join(str(word) for word in run.get("command", ()))}
    revision = run.get("git") or {}
    if revision.get("revision"):
        changed = " (changed since)" if revision.get("dirty") else ""
        fields["revision"] = f"{revision['revision']}{changed}"
    for name, value in run.items():
        if name not in ("schema", "command", "git"):
            fields |= dict(_flat(name, value))
    return fields


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for inner, one in value.items():
            yield from _flat(f"{name}.{inner}", one)
    elif isinstance(value, list):
        yield name, ", ".join(str(one) for one in value) or "none"
    elif isinstance(value, bool):
        yield name, "yes" if value else "no"
    else:
        yield name, "-" if value is None else str(value)
