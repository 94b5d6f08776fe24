"""`specdec report`: records as one page, Markdown and a picture; or what differs between two runs.

Owns the options; sections are those of :mod:`specdec.cli.reporting`, differences
:mod:`specdec.cli.reporting.diff`'s.
"""

from pathlib import Path
from typing import Annotated

import typer

FORMATS = ("html", "md", "png")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Records written with --out, metrics.jsonl of a draft, or folders of them."),
    ],
    out: Annotated[Path, typer.Option(help="File to write; its ending says the format.")] = Path(
        "report.html"
    ),
    format: Annotated[
        list[str] | None,
        typer.Option(help="html, md or png beside --out's own, under the same name; may be repeated."),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading [default: from the records].")] = None,
    diff: Annotated[
        bool,
        typer.Option(
            "--diff", help="Compare two bench records, paired by prompt: the second with the first."
        ),
    ] = False,
    allow_differences: Annotated[
        bool,
        typer.Option("--allow-differences", help="With --diff: compare unlike runs all the same, flagged."),
    ] = False,
) -> None:
    """Make a report of records: one page that needs no network, Markdown, or a picture.

    For example:

    specdec report bench.json audit/audit.json selection.json --out report.html --format md --format png

    specdec report --diff before.json after.json --out diff.html
    """
    from specdec.cli.console import emit_json
    from specdec.cli.reporting.write import ReportPlan, run_report

    emit_json(
        run_report(
            ReportPlan(
                runs=runs,
                out=out,
                formats=format or [],
                title=title,
                diff=diff,
                allow_differences=allow_differences,
            )
        )
    )
