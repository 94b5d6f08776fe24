"""What a command shows: progress on stderr, tables and one JSON object on stdout.

Owns the split between the two streams. stdout carries the result (tables, then one compact JSON object as
the last line, so that ``specdec ... | tail -n 1 | jq`` works); everything said on the way goes to stderr, as
a bar on a terminal and as plain lines a few seconds apart elsewhere. Knows nothing of what is measured.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from specdec.cli.first_words import first_words

# seconds between plain progress lines: a log stays readable, and a stuck run is still noticed
LINE_INTERVAL_S = 5.0
# columns given to tables that no terminal limits, so that redirected tables are not wrapped
_FILE_WIDTH = 200


def say(message: str) -> None:
    """Tell the user something on the way: one line on stderr."""
    first_words.said()
    print(message, file=sys.stderr, flush=True)


class Bar:
    """One running count; made by :func:`progress`."""

    def __init__(self, label: str, total: float | None) -> None:
        self.label = label
        self.total = total
        self.completed = 0.0
        self._started = time.monotonic()
        self._last_line = self._started
        first_words.said()
        self._rich: Progress | None = None
        if sys.stderr.isatty():
            self._rich = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._task = self._rich.add_task(label, total=total, note="")
            self._rich.start()

    def update(self, completed: float, note: str = "") -> None:
        """Set how much is done, with a few words beside it (a loss, a rate)."""
        self.completed = completed
        if self._rich is not None:
            self._rich.update(self._task, completed=completed, note=note)
        elif time.monotonic() - self._last_line >= LINE_INTERVAL_S:
            self._line(note)

    def advance(self, amount: float = 1.0, note: str = "") -> None:
        """Add to how much is done."""
        self.update(self.completed + amount, note)

    def close(self) -> None:
        """End the display; a plain log gets one closing line."""
        if self._rich is not None:
            self._rich.stop()
        else:
            self._line("done" if self.total is None or self.completed >= self.total else "stopped")

    def _line(self, note: str) -> None:
        self._last_line = time.monotonic()
        of_total = "" if self.total is None else f"/{self.total:g}"
        seconds = self._last_line - self._started
        say(f"{self.label}: {self.completed:g}{of_total}, {seconds:.0f} s {note}".rstrip())


@contextmanager
def progress(label: str, total: float | None = None) -> Iterator[Bar]:
    """Show a count while the block runs.

    Args:
        label: What is being done, a word or two.
        total: What the count runs to; None when it is not known.

    Yields:
        The bar, to be moved with ``update`` or ``advance``.
    """
    bar = Bar(label, total)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def resumable(where: str) -> Iterator[None]:
    """Say, when a user interrupts, that the same command goes on; `where` names what is kept."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on: {where}")
        raise


def counted(number: int, thing: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def format_cell(value: Any) -> str:
    """Write one table cell: three decimals for floats, a dash for what was not measured."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def format_interval(bounds: tuple[float, float] | None) -> str | None:
    """Write an interval as one table cell; None where there was none to be had."""
    return None if bounds is None else f"{bounds[0]:.2f}..{bounds[1]:.2f}"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table for people on stdout; numbers are set to the right.

    Args:
        title: One line above the table; say unit, n, baseline, dtype and hardware here.
        columns: Headings.
        rows: One sequence of cells for each row, as long as ``columns``.
    """
    first_words.said()
    # Text, not str: rich would read [words] in brackets as markup and drop them
    table = Table(title=Text(title), title_justify="left")
    for index, heading in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(Text(heading), justify="right" if numeric else "left")
    for row in rows:
        assert len(row) == len(columns), "a table row must have one cell for each column"
        table.add_row(*(Text(format_cell(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)


def emit_json(obj: dict[str, Any]) -> None:
    """Print the result as one compact JSON object: the last line of stdout."""
    first_words.said()
    print(json.dumps(obj, separators=(",", ":"), ensure_ascii=False, allow_nan=False), flush=True)
