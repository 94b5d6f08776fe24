"""What a report says of audits and sweeps: is the text unchanged, and what does giving that up buy.

Owns the sections of both. Figures are the records' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.cli.paper import Notes, Table
from specdec.cli.reporting.acceptance import pair
from specdec.cli.reporting.charts import Dot, Mark, forest, plane
from specdec.cli.reporting.exactness import exactness_lines
from specdec.cli.reporting.parts import Part, SectionParts
from specdec.cli.reporting.records import Record

VERDICTS = {True: "pass", False: "FAIL", None: "not decided"}
MAX_FINDINGS_SHOWN = 10
# a level of more figures shows those that do not pass
MAX_FIGURES_SHOWN = 14
_COST = "processor ms of the target per token"


def audit_sentence(record: Record) -> str:
    """The verdict with its criterion, precision and batch."""
    body = record.body
    verdict = "passed" if body["passed"] else "FAILED"
    levels = ", ".join(f"{level} {VERDICTS[passed]}" for level, passed in body["levels"].items())
    lossy = " (LOSSY rule)" if body.get("lossy") else ""
    said = (
        f"Audit {verdict}: {body['target']} with draft {body['draft']}, verification "
        f"{body['verification']}{lossy}, {body['dtype']}, batch {body['batch_size']}, {body['shape']}: "
        f"{levels}."
    )
    return " ".join([said, *exactness_lines(body)])


def audit_section(record: Record, key: str, title: str) -> SectionParts:
    """Every level with its claim, verdict and figures."""
    results = record.body["results"]
    blocks: list[Part] = [
        audit_sentence(record),
        Table(
            columns=["level", "claim", "verdict"],
            rows=[[one["level"], one["claim"], VERDICTS[one["passed"]]] for one in results],
        ),
    ]
    for one in results:
        blocks += _figures(one)
        if one["notes"]:
            blocks.append(Notes(lines=one["notes"]))
        if one["findings"]:
            blocks.append(_findings(one))
    if record.body.get("baselines"):
        blocks.append(_baselines(record.body["baselines"]))
    return SectionParts(title=title, blocks=blocks)


def _figures(level: Mapping[str, Any]) -> list[Part]:
    figures = level["figures"]
    caption = f"{level['level']}: {level['claim']}"
    if len(figures) > MAX_FIGURES_SHOWN:
        failed = [one for one in figures if one["passed"] is not True]
        caption += f"; {len(figures)} figures, of which {len(failed)} do not pass"
        if not failed:
            return [f"{caption}. The record has them all."]
        figures = failed
    names = list(dict.fromkeys(name for one in figures for name in one if name not in ("name", "passed")))
    rows = [[one["name"], *(one.get(name) for name in names), VERDICTS[one["passed"]]] for one in figures]
    return [
        Table(
            columns=["", *(name.replace("_", " ") for name in names), "verdict"], rows=rows, caption=caption
        )
    ]


def _findings(level: Mapping[str, Any]) -> Table:
    shown = level["findings"][:MAX_FINDINGS_SHOWN]
    names = list(dict.fromkeys(name for one in shown for name in one))
    return Table(
        columns=[name.replace("_", " ") for name in names],
        rows=[[one.get(name) for name in names] for one in shown],
        caption=f"{level['level']}: {len(shown)} of {len(level['findings'])} findings",
    )


def _baselines(baselines: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        columns=[
            *("baseline", "what it is", "TV per token", "KL per token", "largest pi/p"),
            *("acceptance length", "right answers"),
        ],
        rows=[
            [
                one["baseline"],
                one["sentence"],
                one["total_variation"],
                one["kl"],
                one["largest_overshoot"],
                one["acceptance_length"],
                f"{one['right']}/{one['tasks']}",
            ]
            for one in baselines
        ],
        caption="The four baselines of a lossy rule",
    )


def sweep_sentence(record: Record) -> str:
    """How many points survive, and the cheapest exact one."""
    points = measured_points(record)
    front = [point for point in points if not point["dominated"]]
    exact = [p for p in points if p["exact"] and p["acceptance_length"] is not None]
    said = f"{len(points)} points, {len(front)} of them not dominated"
    if exact:
        best = max(exact, key=lambda point: point["acceptance_length"])
        said += (
            f"; of the exact ones {best['label']} accepts most, {best['acceptance_length']:.2f} tokens a step"
        )
    lossy = [p for p in points if not p["exact"] and p["acceptance_length"] is not None]
    if lossy:
        most = max(lossy, key=lambda point: point["acceptance_length"])
        variation = most["total_variation"]
        price = "no declared law" if variation is None else f"total variation {variation:.2f} a token"
        said += f"; of the LOSSY ones {most['label']}, {most['acceptance_length']:.2f}, at {price}"
    return said + "."


def measured_points(record: Record) -> list[Mapping[str, Any]]:
    """Points of a sweep that were measured, numbered."""
    measured = [point for point in record.body["points"] if "refused" not in point]
    return [{**point, "number": number} for number, point in enumerate(measured, start=1)]


def sweep_section(record: Record, key: str, title: str) -> SectionParts:
    """Cost of verifying, acceptance and fidelity, and which points no other beats."""
    points = measured_points(record)
    blocks: list[Part] = [sweep_sentence(record)]
    priced = [p for p in points if p["total_variation"] is not None]
    if priced:
        blocks.append(
            plane(
                f"{key}-cost-fidelity",
                "Cost and fidelity",
                [_dot(point, point["verify_cpu_ms_per_token"], point["total_variation"]) for point in priced],
                x=_COST,
                y="total variation per token",
                caption="Lower left is better. Hollow: dominated, another of the same batch size is no worse "
                f"on every axis and better on one; axes: {', '.join(record.body['axes'])}. Total variation "
                "of the rule's law from the target's, along its own text; 0 is exact.",
            )
        )
    known = [p for p in points if p["acceptance_length"] is not None]
    if known:
        blocks.append(
            plane(
                f"{key}-cost-acceptance",
                "Cost and acceptance",
                [
                    _dot(point, point["verify_cpu_ms_per_token"], point["acceptance_length"])
                    for point in known
                ],
                x=_COST,
                y="acceptance length",
                caption="Upper left is better: more tokens a verify step at less of the target's work a "
                "token. Hollow: dominated.",
            )
        )
    if priced:
        blocks.append(
            plane(
                f"{key}-fidelity-acceptance",
                "What giving up fidelity buys",
                [
                    _dot(point, point["total_variation"], point["acceptance_length"])
                    for point in priced
                    if point["acceptance_length"] is not None
                ],
                x="total variation per token",
                y="acceptance length",
                caption="Left is the target's own law. Hollow: dominated.",
            )
        )
        blocks.append(
            forest(
                f"{key}-length",
                "Acceptance length of the points",
                [
                    Mark(
                        label=point["label"],
                        value=point["acceptance_length"],
                        interval=pair(point["acceptance_length_interval"]),
                    )
                    for point in known
                ],
                unit="tokens per verify step",
                reference=1.0,
                caption="Committed tokens / verify steps. Lines: 95 % bootstrap intervals over tasks.",
            )
        )
    blocks.append(_points(points))
    left = record.body.get("left_out") or ()
    if left:
        blocks.append(Notes(lines=[f"left out: {one['label']}: {one['refused']}" for one in left]))
    return SectionParts(title=title, blocks=blocks)


def _dot(point: Mapping[str, Any], x: float, y: float) -> Dot:
    return Dot(
        number=point["number"],
        label=point["label"],
        x=x,
        y=y,
        group=point["draft"],
        hollow=point["dominated"],
    )


def _points(points: Sequence[Mapping[str, Any]]) -> Table:
    names = {
        "number": "number",
        "point": "label",
        "acceptance length": "acceptance_length",
        "interval": "acceptance_length_interval",
        "GFLOP/token": "verify_gflops_per_token",
        _COST: "verify_cpu_ms_per_token",
        "TV per token": "total_variation",
        "KL per token": "kl",
        "largest pi/p": "largest_overshoot",
        "exact": "exact",
        "dominated": "dominated",
    }
    rows = [[point[name] for name in names.values()] for point in points]
    for row, point in zip(rows, points, strict=True):
        row.append(f"{point['right']}/{point['tasks']}")
    return Table(columns=[*names, "right answers"], rows=rows, caption="All points measured")
