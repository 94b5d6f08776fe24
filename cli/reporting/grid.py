"""What a report says of a grid of benches: the prompt sets of a setting together, and its cells in a table.

A cell of a grid has few prompts: the best of hundreds is luck, and so many marks in a chart are noise. What a
record pooled over its sets is spoken of in their place. Figures are the record's own. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdec.cli.paper import Table
from specdec.cli.reporting.acceptance import length_of
from specdec.cli.reporting.charts import number_with
from specdec.cli.reporting.records import BenchRow, Record, bench_rows, labelled_rows


def is_grid(record: Record) -> bool:
    """Whether it holds figures of several prompt sets together."""
    return bool(record.body.get("pooled"))


def headline_rows(records: Sequence[Record]) -> list[BenchRow]:
    """The rows to speak of: of a grid those of all its sets together, else every setting at every point."""
    rows: list[BenchRow] = []
    for record in (one for one in records if one.kind == "bench"):
        rows += [_pooled(record, one) for one in record.body["pooled"]] if is_grid(record) else []
        rows += [] if is_grid(record) else bench_rows([record])
    return labelled_rows(rows)


def _pooled(record: Record, one: dict[str, Any]) -> BenchRow:
    names = ("acceptance_length", "acceptance_length_interval", "acceptance_rate")
    return BenchRow(
        label=one["setting"],
        record=record,
        setting=one["setting"],
        data=f"{len(one['data'])} sets",
        batch_size=one["batch_size"],
        temperature=one["temperature"],
        body=one | {"acceptance": {name: one[name] for name in names}},
        answers=(),
    )


def cell_tables(rows: Sequence[BenchRow]) -> list[Table]:
    """Acceptance length and speed-up of every setting on every set, by temperature and batch.

    Args:
        rows: all cells of one record.
    """

    def speed(row: BenchRow) -> str:
        return number_with(row.body.get("speedup"), row.body.get("speedup_interval"))

    cells = [row for row in rows if row.drafts]
    intervals = "intervals: 95 % bootstrap over its prompts"
    return [
        _by_set(cells, length_of, f"Acceptance length of each cell; {intervals}."),
        _by_set(cells, speed, f"Speed-up of each cell over no speculation; below 1 is slower; {intervals}."),
    ]


def _by_set(cells: Sequence[BenchRow], said: Callable[[BenchRow], str], caption: str) -> Table:
    sets = list(dict.fromkeys(row.data for row in cells))
    lines = dict.fromkeys((row.setting, row.batch_size, row.temperature) for row in cells)
    found = {(row.setting, row.batch_size, row.temperature, row.data): said(row) for row in cells}
    return Table(
        columns=["setting", "batch", "temperature", *sets],
        rows=[[*line, *(found.get((*line, name)) for name in sets)] for line in lines],
        caption=caption,
    )
