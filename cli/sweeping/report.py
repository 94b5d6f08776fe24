"""What a sweep says: the columns of its table, and its report.

Owns both; knows the figures of a point by name, and does not know how they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.cli.paper import Notes, Paper, Picture, Section, Table
from specdec.cli.sweeping.measure import PRICED_POSITIONS
from specdec.cli.sweeping.points import AXES, parse_rule

COLUMNS = {
    "setting": "label",
    "accept length": "acceptance_length",
    "interval": "acceptance_length_interval",
    "GFLOP/token": "verify_gflops_per_token",
    "target cpu ms/token": "verify_cpu_ms_per_token",
    "target ms/token": "verify_ms_per_token",
    "draft ms/token": "draft_ms_per_token",
    "TV/token": "total_variation",
    "KL/token": "kl",
    "largest pi/p": "largest_overshoot",
    "right": "right",
    "against plain p": "parity_p_value",
    "draft trained on tokens": "training_target_tokens",
    "draft MB": "draft_megabytes",
    "dominated": "dominated",
}
# those a terminal has room for; the report has them all
PRINTED = (
    "setting",
    "accept length",
    "interval",
    "GFLOP/token",
    "target cpu ms/token",
    "TV/token",
    "largest pi/p",
    "right",
    "dominated",
)


def row_of(record: dict[str, Any], columns: Sequence[str] = tuple(COLUMNS)) -> list[Any]:
    """A point's cells, in the order of the columns."""
    row = []
    for name in (COLUMNS[column] for column in columns):
        value = record[name]
        if name == "acceptance_length_interval" and value is not None:
            value = f"{value[0]:.2f}..{value[1]:.2f}"
        if name == "right":
            value = f"{value}/{record['tasks']}"
        row.append(value)
    return row


def sweep_paper(
    title: str, measured: list[dict[str, Any]], refused: list[dict[str, Any]], picture: Path
) -> Paper:
    """The report of a sweep.

    Args:
        title: what was swept.
        measured: the points, with what `run_sweep` added to them.
        refused: points whose rule does not go with their draft or shape.
        picture: file of the picture.
    """
    front = [record["label"] for record in measured if not record["dominated"]]
    categories = list(measured[0]["scores"])
    sections = [
        Section(
            title="Cost, acceptance, fidelity",
            blocks=[
                Picture(path=picture, caption="filled: on the front; hollow: dominated"),
                Table(columns=list(COLUMNS), rows=[row_of(record) for record in measured]),
                Notes(
                    lines=[
                        "a point is dominated when another of the same batch size is no worse on every axis "
                        f"and better on one; axes: {', '.join(AXES)}",
                        "TV, KL and pi/p are of the rule's declared law along its own text, over at most "
                        f"{PRICED_POSITIONS} positions of tasks of all difficulties; a rule without a "
                        "declared law has none, dominates nothing and is dominated by nothing",
                        "against plain p: McNemar's exact test of the right answers, paired by task",
                    ]
                ),
            ],
        ),
        Section(
            title="Right answers by difficulty",
            blocks=[
                Table(
                    columns=["setting", *categories],
                    rows=[
                        [
                            record["label"],
                            *(f"{one['right']}/{one['tasks']}" for one in record["scores"].values()),
                        ]
                        for record in measured
                    ],
                )
            ],
        ),
    ]
    rules = {record["rule"]: parse_rule(record["rule"]) for record in measured}
    sections.append(
        Section(
            title="What the rules mean",
            blocks=[
                Notes(
                    lines=[
                        f"{text}: {bound.rule.kind}. {bound.rule.sentence}"
                        for text, bound in rules.items()
                        if bound is not None
                    ]
                    or ["only exact verification was run"]
                )
            ],
        )
    )
    if refused:
        lines = [f"{record['label']}: {record['refused']}" for record in refused]
        sections.append(Section(title="Left out", blocks=[Notes(lines=lines)]))
    lead = f"{len(measured)} points, {len(front)} of them not dominated."
    return Paper(title=f"Sweep of {title}", lead=lead, sections=sections)
