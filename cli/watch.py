"""`specdec watch`: does a run keep its thresholds and its baseline? For pipelines.

Owns the options; the checks are :mod:`specdec.cli.watching.checks`'s.
"""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(help="Record of specdec bench --out.")],
    baseline: Annotated[
        Path | None, typer.Option(help="Stored record of the same bench to compare with.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Setting to check, such as 'my-draft chain:3'; may be repeated [default: all]."),
    ] = None,
    min_acceptance_length: Annotated[
        float | None, typer.Option(min=1.0, help="Least acceptance length.")
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Most that the acceptance length may lose against --baseline [default: no loss whose "
            "interval excludes 0].",
        ),
    ] = None,
    min_speedup: Annotated[
        float | None, typer.Option(min=0.0, help="Least speed-up over no speculation.")
    ] = None,
    max_speedup_drop: Annotated[
        float | None, typer.Option(min=0.0, help="Most that the speed-up may lose against --baseline.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Every text must be the one without speculation, token by token.")
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Write the checks as JUnit XML.")] = None,
    github_summary: Annotated[
        bool,
        typer.Option("--github-summary", help="Append a table to the file in $GITHUB_STEP_SUMMARY."),
    ] = False,
    summary_file: Annotated[
        Path | None, typer.Option(help="Write the same table (Markdown) to a file.")
    ] = None,
) -> None:
    """Check a run of bench against thresholds and a stored baseline; exit code 1 when a check fails.

    For example:

    specdec watch bench.json --baseline baseline.json --max-drop 0.05 --min-speedup 1.1 --exact --junit w.xml
    """
    from specdec.cli.console import emit_json
    from specdec.cli.watching.run import WatchPlan, run_watch

    summary = run_watch(
        WatchPlan(
            run=run,
            baseline=baseline,
            settings=setting or [],
            min_acceptance_length=min_acceptance_length,
            max_drop=max_drop,
            min_speedup=min_speedup,
            max_speedup_drop=max_speedup_drop,
            exact=exact,
            junit=junit,
            github_summary=github_summary,
            summary_file=summary_file,
        )
    )
    emit_json(summary)
    if not summary["passed"]:
        raise typer.Exit(1)
