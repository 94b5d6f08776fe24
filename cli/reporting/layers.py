"""What a report says of taps and training: which layers were chosen, do they matter, how drafts grew.

Owns the sections of selections, studies and trainings. Figures are the records' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.cli.paper import Notes, Table
from specdec.cli.reporting.acceptance import pair
from specdec.cli.reporting.charts import Interval, Mark, forest, lines, number_with
from specdec.cli.reporting.layer_charts import matrix, profile
from specdec.cli.reporting.parts import Part, SectionParts
from specdec.cli.reporting.records import Record

_LENGTH = "acceptance_length"


def spelled(boundaries: Sequence[int]) -> str:
    """A set of boundaries in few characters."""
    return ", ".join(str(boundary) for boundary in boundaries)


def selection_sentence(record: Record) -> str:
    """What was chosen, and how steadily."""
    body = record.body
    stability = body.get("stability") or {}
    steady = stability.get("bootstrap", stability) or {}
    said = (
        f"Boundaries {spelled(body['boundaries'])} of 0..{body['target']['num_layers']} of "
        f"{body['target']['name']} were chosen"
    )
    if steady.get("subset_frequency") is not None:
        said += f"; {steady['subset_frequency']:.0%} of {steady['resamples']} resamples choose the same set"
    return said + "."


def selection_section(record: Record, key: str, title: str) -> SectionParts:
    """Informativeness of every boundary, their similarity, and the sets that came next."""
    body = record.body
    score = body["scores"][body["estimator"]]
    direction = "higher is richer" if score["sign"] > 0 else "lower is richer"
    rows = [
        ["chosen", spelled(body["boundaries"]), *_objective(body["objective"])],
        *(
            [f"next {n}", spelled(o["boundaries"]), *_objective(o)]
            for n, o in enumerate(body["runners_up"], 1)
        ),
        *([name, spelled(o["boundaries"]), *_objective(o)] for name, o in body.get("references", {}).items()),
    ]
    blocks: list[Part] = [
        selection_sentence(record),
        profile(
            f"{key}-profile",
            "What each boundary says",
            score["values"],
            body["boundaries"],
            y=f"{body['estimator']} / {score['normalization']}".replace("_", " "),
            caption=f"Boundary b: the residual stream after b decoder layers. {direction.capitalize()}. "
            "Diamonds: chosen.",
        ),
        matrix(
            f"{key}-cka",
            "How alike boundaries are",
            body["cka"],
            body["boundaries"],
            unit="debiased linear CKA",
            caption="1: the same up to rotation and scale. Frames: pairs of chosen boundaries.",
        ),
        Table(
            columns=["set", "boundaries", "objective", "mean informativeness (z)", "mean pairwise CKA"],
            rows=rows,
            caption=f"Objective: informativeness - lambda ({body['lambda']:g}) x similarity, or what "
            "`settings.choose` names.",
        ),
    ]
    if body.get("warnings"):
        blocks.append(Notes(lines=body["warnings"]))
    return SectionParts(title=title, blocks=blocks)


def _objective(one: Mapping[str, Any]) -> list[float | None]:
    return [one.get(name) for name in ("value", "mean_informativeness_z", "mean_pairwise_cka")]


def study_sentence(record: Record) -> str:
    """The best set against the default, and whether it is certain."""
    compared = [one for one in record.body["findings"] if _difference(one) is not None]
    if not compared:
        return f"{record.body['heads']} heads; nothing was compared with a reference."
    # sets of one seed are the least certain ones, and would often lead
    seeds = max(one["seeds"] for one in compared)
    most = [one for one in compared if one["seeds"] == seeds]
    best = max(most, key=lambda one: _difference(one)["value"])
    found = _difference(best)
    low, high = found["interval"]
    certain = (
        "the interval excludes 0" if low > 0 or high < 0 else "the interval holds 0: no difference shown"
    )
    if _of_recipes(record):
        pair_of, kind = f"recipe {best['names'][0]} differs from the study's own training", "recipes"
    else:
        pair_of = f"taps {spelled(best['boundaries'])} differ from {spelled(best['reference'])}"
        kind = "sets"
    return (
        f"{record.body['heads']} heads of equal budgets: {pair_of} by "
        f"{signed(found['value'], found['interval'], 3)} in acceptance "
        f"length ({certain}), the most of {len(most)} {kind} of {seeds} seeds; "
        f"{len(compared)} comparisons were made, not corrected for that."
    )


def _of_recipes(record: Record) -> bool:
    return any("changes" in one for one in record.body["findings"])


def _difference(finding: Mapping[str, Any]) -> Any:
    return finding["figures"].get(_LENGTH, {}).get("difference")


def signed(value: float, interval: Sequence[float], digits: int = 2) -> str:
    """A difference with its sign and interval."""
    low, high = interval
    return f"{value:+.{digits}f} ({low:+.{digits}f}..{high:+.{digits}f})"


def study_section(record: Record, key: str, title: str) -> SectionParts:
    """Tap sets by acceptance after training, and what foretold the order."""
    findings = record.body["findings"]
    ordered = sorted(findings, key=lambda one: (len(one["boundaries"]), -one["figures"][_LENGTH]["value"]))
    compared = [one for one in ordered if _difference(one) is not None]
    blocks: list[Part] = [
        study_sentence(record),
        forest(
            f"{key}-differences",
            "Acceptance length against the reference set",
            [
                Mark(
                    label=_label(one),
                    value=_difference(one)["value"],
                    interval=pair(_difference(one)["interval"]),
                )
                for one in compared
            ],
            unit="difference in tokens per verify step, paired",
            reference=0.0,
            digits=3,
            caption="Paired by conversation and seed; lines: 95 % bootstrap intervals. The reference is the "
            + (
                "study's own training."
                if _of_recipes(record)
                else "default triple, or the uniform set where the number of taps is not 3."
            ),
        ),
        Table(
            columns=[
                *("taps", "names", "seeds", "acceptance length", "interval", "difference", "interval"),
                *("overlap", "detectable"),
            ],
            rows=[_row(one) for one in ordered],
            caption="detectable: the difference that would have been seen (two-sided 5 %, power 80 %)",
        ),
    ]
    foresight = record.body.get("foresight") or []
    if foresight:
        blocks.append(
            Table(
                columns=["score", "sets", "tau with acceptance length", "p", "tau with overlap", "p"],
                rows=[
                    [
                        *(one[name] for name in ("score", "sets", _LENGTH, f"{_LENGTH}_p")),
                        *(one[name] for name in ("overlap", "overlap_p")),
                    ]
                    for one in foresight
                ],
                caption="Kendall's tau of each score, taken before training, with the outcome after it",
            )
        )
    return SectionParts(title=title, blocks=blocks)


def _label(finding: Mapping[str, Any]) -> str:
    if "changes" in finding:
        changed = ", ".join(f"{option} {value}" for option, value in finding["changes"].items())
        return f"{finding['names'][0]}  [{changed}]"
    return f"{spelled(finding['boundaries'])}  [{', '.join(finding['names'])}]"


def _row(finding: Mapping[str, Any]) -> list[Any]:
    length, overlap = finding["figures"][_LENGTH], finding["figures"].get("overlap", {})
    found = _difference(finding) or {}
    return [
        spelled(finding["boundaries"]),
        ", ".join(finding["names"]),
        finding["seeds"],
        length["value"],
        length["interval"],
        found.get("value"),
        found.get("interval"),
        overlap.get("value"),
        found.get("detectable"),
    ]


def training_sentence(records: Sequence[Record]) -> str:
    """How far each draft came."""
    told = []
    for record in records:
        curve = _curve(record)
        if curve:
            told.append(
                f"{record.name} {number_with(curve[-1][1], None)} after {1e3 * curve[-1][0]:,.0f} tokens"
            )
    return f"Offline acceptance length of drafts: {'; '.join(told) or 'none was evaluated'}."


def training_section(records: Sequence[Record], key: str, title: str) -> SectionParts:
    """Acceptance length against training tokens, of one draft or several."""
    curves = {record.name: curve for record in records if (curve := _curve(record))}
    blocks: list[Part] = [training_sentence(records)]
    if curves:
        blocks.append(
            lines(
                f"{key}-tau",
                "Acceptance length against training tokens",
                curves,
                x="thousand answer tokens trained on",
                y="tokens per verify step, offline",
                bottom=None,
                caption="Held-out conversations, greedy chain, at evaluations of the training; tokens: "
                "share of the steps done times the answer tokens of its epochs.",
            )
        )
    return SectionParts(title=title, blocks=blocks)


def _curve(record: Record) -> list[tuple[float, float, Interval]]:
    """Tokens seen and acceptance length at every evaluation."""
    extra = record.body.get("extra", {})
    steps = extra.get("steps") or max((line["step"] for line in record.lines), default=0)
    curve: list[tuple[float, float, Interval]] = []
    for line in record.lines:
        found = line["eval"].get("offline_acceptance") or {}
        total = extra.get("answer_tokens") or line["eval"].get("answer_tokens")
        if found.get(_LENGTH) is None or not total or not steps:
            continue
        tokens = total * float(extra.get("epochs") or 1.0) * line["step"] / steps
        curve.append((tokens / 1e3, found[_LENGTH], None))
    return curve
