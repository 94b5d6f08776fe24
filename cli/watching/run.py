"""A watch from files to an exit code: the work behind `specdec watch`.

Owns reading, the three outputs (table, JUnit XML, GitHub's job summary) and their places.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from specdec.cli.console import print_table, say
from specdec.cli.outputs import require_not_input, require_writable
from specdec.cli.paper import Paper, Section, Table, to_markdown
from specdec.cli.reporting.pairs import pair_records
from specdec.cli.reporting.records import BenchRow, Record, bench_rows, printable, read_records
from specdec.cli.watching.checks import Check, Thresholds, checks_of
from specdec.errors import UsageError, writing
from specdec.provenance import write_bytes_atomic, write_text_atomic

SCHEMA = "specdec.watch/1"
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


@dataclass(frozen=True, kw_only=True)
class WatchPlan:
    """The options of `specdec watch`."""

    run: Path
    baseline: Path | None
    settings: list[str]
    min_acceptance_length: float | None
    max_drop: float | None
    min_speedup: float | None
    max_speedup_drop: float | None
    exact: bool
    junit: Path | None
    github_summary: bool
    summary_file: Path | None

    def thresholds(self) -> Thresholds:
        """What is to be checked.

        Raises:
            UsageError: nothing is, or a drop without a baseline to drop from.
        """
        if self.baseline is None:
            for flag, value in (("--max-drop", self.max_drop), ("--max-speedup-drop", self.max_speedup_drop)):
                if value is not None:
                    raise UsageError(f"{flag} ({value:g}) needs --baseline, the record to compare with")
            if self.min_acceptance_length is None and self.min_speedup is None and not self.exact:
                raise UsageError(
                    "nothing to check; give --baseline, --min-acceptance-length, --min-speedup or --exact"
                )
        return Thresholds(
            min_acceptance_length=self.min_acceptance_length,
            max_drop=self.max_drop,
            min_speedup=self.min_speedup,
            max_speedup_drop=self.max_speedup_drop,
            exact=self.exact,
        )


def run_watch(plan: WatchPlan) -> dict[str, Any]:
    """Check, print, write; returns the summary for the JSON line, whose `passed` decides the exit code.

    Raises:
        UsageError: wrong options, or files that are no bench records.
    """
    wanted = plan.thresholds()
    summaries = _places(plan)
    record = _bench(plan.run)
    rows = [row for row in bench_rows([record]) if row.drafts]
    unknown = [name for name in plan.settings if name not in {row.setting for row in rows}]
    if unknown:
        known = ", ".join(dict.fromkeys(row.setting for row in rows))
        raise UsageError(f"--setting ({unknown[0]}) does not draft in {plan.run}; it has {known or 'none'}")
    rows = [row for row in rows if not plan.settings or row.setting in plan.settings]
    if not rows:
        raise UsageError(f"RUN ({plan.run}) has no setting that drafts: there is nothing to watch")
    pairing = (
        pair_records(_bench(plan.baseline, "--baseline"), record, settings=plan.settings)
        if plan.baseline
        else None
    )
    checks = checks_of(rows, wanted, pairing)
    passed = all(check.passed for check in checks)
    _print(plan, checks, passed)
    if plan.junit is not None:
        write_bytes_atomic(plan.junit, junit_xml(checks, plan.run.name))
        say(f"written: {plan.junit}")
    text = summary_markdown(checks, rows, passed)
    for path, append in summaries:
        if append:
            # the file is the whole job's, earlier steps have written to it
            with writing(f"summary ({path})"), path.open("a", encoding="utf-8") as handle:
                handle.write(text)
        else:
            write_text_atomic(path, text)
        say(f"written: {path}")
    return {
        "schema": SCHEMA,
        "passed": passed,
        "failed": sum(not check.passed for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def _places(plan: WatchPlan) -> list[tuple[Path, bool]]:
    """Where summaries go, and whether they are added to what is there."""
    inputs = {"RUN": plan.run, "--baseline": plan.baseline}
    places: list[tuple[Path, bool]] = []
    for option, path in (("--junit", plan.junit), ("--summary-file", plan.summary_file)):
        if path is not None:
            require_writable(option, path)
            require_not_input(option, path, inputs)
    if plan.junit and plan.summary_file and plan.junit.resolve() == plan.summary_file.resolve():
        raise UsageError(
            f"--summary-file ({plan.summary_file}) is the file that --junit writes; name another"
        )
    if plan.summary_file is not None:
        places.append((plan.summary_file, False))
    if plan.github_summary:
        given = os.environ.get(SUMMARY_VARIABLE)
        if not given:
            raise UsageError(f"--github-summary needs ${SUMMARY_VARIABLE}; elsewhere use --summary-file FILE")
        places.append((Path(given), True))
    return places


def _bench(path: Path, option: str = "RUN") -> Record:
    if path.is_dir():
        raise UsageError(f"{option} ({path}) is a folder; name the file that specdec bench --out wrote")
    try:
        [record] = read_records([path])
    except UsageError as error:
        raise UsageError(str(error).replace("RUN (", f"{option} (", 1)) from error
    if record.kind != "bench":
        raise UsageError(
            f"{option} ({path}) is a {record.kind} record; watch reads what specdec bench --out writes"
        )
    return record


def _print(plan: WatchPlan, checks: Sequence[Check], passed: bool) -> None:
    against = f" against {plan.baseline.name}" if plan.baseline else ""
    print_table(
        f"{'passed' if passed else 'FAILED'}: {plan.run.name}{against}; 95 % intervals over prompts",
        ["", "check", "setting", "found", "wanted"],
        [["ok" if one.passed else "FAIL", one.name, one.setting, one.found, one.wanted] for one in checks],
    )


def junit_xml(checks: Sequence[Check], name: str) -> bytes:
    """The checks as one JUnit test suite, a test case each."""
    failed = sum(not check.passed for check in checks)
    counts = {"tests": str(len(checks)), "failures": str(failed), "errors": "0", "skipped": "0"}
    suites = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        suites, "testsuite", {"name": f"specdec watch {printable(name)}", **counts}
    )
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"specdec.watch.{check.name}", "name": check.setting}
        )
        if not check.passed:
            message = f"{check.found}; wanted {check.wanted}"
            failure = ElementTree.SubElement(case, "failure", {"message": message, "type": check.name})
            failure.text = message
        else:
            ElementTree.SubElement(case, "system-out").text = check.found
    ElementTree.indent(suites)
    found: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return found + b"\n"


def summary_markdown(checks: Sequence[Check], rows: Sequence[BenchRow], passed: bool) -> str:
    """The checks as a table for people, the verdict first."""
    failed = [check for check in checks if not check.passed]
    lead = f"All {len(checks)} checks passed." if passed else f"{len(failed)} of {len(checks)} checks FAILED."
    table = Table(
        columns=["", "check", "setting", "found", "wanted"],
        rows=[
            ["ok" if one.passed else "FAIL", one.name, one.setting, one.found, one.wanted] for one in checks
        ],
    )
    measured = f"{rows[0].record.body['target']}, n = {rows[0].body['prompts']} prompts of {rows[0].data}"
    return to_markdown(
        Paper(title="specdec watch", lead=lead, sections=[Section(title=measured, blocks=[table])])
    )
