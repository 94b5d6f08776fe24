"""From record files to report files: the work behind `specdec report`.

Owns the formats and their files. A page is one file; Markdown has its charts as PNG files beside it; a PNG is
one sheet of all charts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.cli.console import say
from specdec.cli.outputs import require_not_input, require_own_beside, require_writable
from specdec.cli.paper import to_markdown
from specdec.cli.paper_page import to_html
from specdec.cli.report import FORMATS
from specdec.cli.reporting.build import Report, build_report
from specdec.cli.reporting.chart_render import sheet_png
from specdec.cli.reporting.records import printable, read_records
from specdec.errors import UsageError
from specdec.provenance import write_bytes_atomic, write_text_atomic

SCHEMA = "specdec.report/1"


@dataclass(frozen=True, kw_only=True)
class ReportPlan:
    """The options of `specdec report`."""

    runs: list[Path]
    out: Path
    formats: list[str]
    title: str | None
    diff: bool
    allow_differences: bool


def run_report(plan: ReportPlan) -> dict[str, Any]:
    """Read, build, write; returns the summary for the JSON line.

    Raises:
        UsageError: a format or place that cannot be, records that are none, or two runs that differ too much.
    """
    files = _files(plan)
    if plan.diff and len(plan.runs) != 2:
        raise UsageError(
            f"--diff compares two records, not {len(plan.runs)}; name the old one, then the new one"
        )
    if plan.allow_differences and not plan.diff:
        raise UsageError("--allow-differences needs --diff")
    for path in files.values():
        require_writable("--out", path)
        require_not_input("--out", path, {f"RUN {number}": run for number, run in enumerate(plan.runs, 1)})
        require_own_beside("--out", plan.out, path)
    records = read_records(plan.runs)
    summary: dict[str, Any] = {"schema": SCHEMA, "records": [[one.name, one.kind] for one in records]}
    if plan.diff:
        from specdec.cli.reporting.diff import compare_records, diff_report

        found = compare_records(*records, allow_differences=plan.allow_differences)
        report = diff_report(found, plan.title and printable(plan.title))
        summary |= found.to_dict()
        for line in found.verdicts:
            say(line)
    else:
        report = build_report(records, plan.title and printable(plan.title))
        summary["summary"] = report.lead
    _write(report, files)
    for path in files.values():
        say(f"written: {path}")
    return {**summary, "files": [str(path) for path in files.values()]}


def _files(plan: ReportPlan) -> dict[str, Path]:
    """The file of every format asked for."""
    own = plan.out.suffix.removeprefix(".")
    if own not in FORMATS:
        raise UsageError(f"--out ({plan.out}) must end in .{', .'.join(FORMATS)}: its ending says the format")
    for name in plan.formats:
        if name not in FORMATS:
            raise UsageError(f"--format ({name}) must be one of {', '.join(FORMATS)}")
    return {name: plan.out.with_suffix(f".{name}") for name in dict.fromkeys([own, *plan.formats])}


def _write(report: Report, files: dict[str, Path]) -> None:
    drawings = [drawing for section in report.sections for drawing in section.drawings]
    out = next(iter(files.values()))
    stem = out.stem
    if "png" in files and not drawings:
        raise UsageError("--format (png) needs a chart, and these records have none; write html or md")
    # every place is looked at before the first file is written
    linked = drawings if "md" in files else []
    beside = {drawing.key: out.with_name(f"{stem}-{drawing.key}.png") for drawing in linked}
    for path in beside.values():
        require_own_beside("--out", out, path)
    paper = report.paper(stem) if {"html", "md"} & set(files) else None
    for name, path in files.items():
        if name == "png":
            write_bytes_atomic(path, sheet_png(drawings, title=report.title))
        elif name == "html":
            assert paper is not None, "a page is made of the drawn report"
            write_text_atomic(path, to_html(paper))
        else:
            assert paper is not None, "Markdown is made of the drawn report"
            for drawing in drawings:
                write_bytes_atomic(beside[drawing.key], drawing.png())
            write_text_atomic(path, to_markdown(paper))
