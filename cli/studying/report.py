"""What a study says: every tap set or recipe against its reference, and which score foresaw the order.

Owns the comparison of arm records, its table and its JSON. Does not know how arms are trained.

Four figures a set: acceptance length of simulated greedy chains offline, the same served by the engine, and
the two measures with less noise, overlap (mean sum min(p, q), the acceptance probability of a sampled draft)
and divergence KL(p || q), both at depth 1 along the target's own text. Differences are paired by conversation
and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from specdec.cli.bootstrap import ArmCounts, Difference, arm_difference, arm_interval
from specdec.cli.console import print_table
from specdec.layer_select.references import DEFAULT, UNIFORM
from specdec.train.study_arms import TapSet
from specdec.train.study_recipes import BASE, Recipe

Record = Mapping[str, Any]
# name -> (which list of a record, numerator of one entry, denominator of one entry)
FIGURES: dict[str, tuple[str, Callable[[Record], float], Callable[[Record], float]]] = {
    "acceptance_length": ("offline", lambda one: one["committed"], lambda one: one["verify_steps"]),
    "served_length": ("served", lambda one: one["committed"], lambda one: one["verify_steps"]),
    "overlap": ("offline", lambda one: one["overlap"][0], lambda one: one["rows"][0]),
    "divergence": ("offline", lambda one: one["divergence"][0], lambda one: one["rows"][0]),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One tap set, or one recipe on it, measured: figures with intervals, differences from its reference."""

    taps: TapSet
    seeds: int
    reference: tuple[int, ...] | None
    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    by_seed: dict[str, list[float]]
    differences: dict[str, Difference]
    recipe: Recipe | None = None

    @property
    def label(self) -> str:
        """Its names, short."""
        return ", ".join(self.taps.names)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "names": list(self.taps.names),
            "boundaries": list(self.taps.boundaries),
            **({} if self.recipe is None else {"changes": dict(self.recipe.changes)}),
            "seeds": self.seeds,
            "reference": None if self.reference is None else list(self.reference),
            "figures": {
                name: {
                    "value": value,
                    "interval": self.intervals[name],
                    "by_seed": self.by_seed[name],
                    "difference": _difference(self.differences.get(name)),
                }
                for name, value in self.values.items()
            },
        }


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"value": found.value, "interval": found.interval, "detectable": found.detectable}


def compare(records: Sequence[Record], tap_sets: Sequence[TapSet]) -> list[Finding]:
    """Every tap set that has a record against the default triple, or the uniform set where K is not 3."""
    arms: dict[tuple[int, ...], dict[int, Record]] = {}
    for record in sorted(records, key=lambda r: r["seed"]):
        arms.setdefault(tuple(record["boundaries"]), {})[record["seed"]] = record
    findings = []
    for taps in tap_sets:
        if taps.boundaries not in arms:
            continue
        reference = _reference(taps, tap_sets, arms)
        theirs = None if reference is None else arms[reference]
        findings.append(_finding(taps, arms[taps.boundaries], reference, theirs))
    return findings


def compare_recipes(
    records: Sequence[Record], boundaries: tuple[int, ...], recipes: Sequence[Recipe]
) -> list[Finding]:
    """Every recipe that has a record against the study's own training."""
    arms: dict[str, dict[int, Record]] = {}
    for record in sorted(records, key=lambda r: r["seed"]):
        name = record["recipe"]["name"] if "recipe" in record else BASE
        arms.setdefault(name, {})[record["seed"]] = record
    base = arms.get(BASE)
    findings = []
    if base is not None:
        findings.append(_finding(TapSet(boundaries=boundaries, names=(BASE,)), base, None, None))
    for recipe in recipes:
        if recipe.name in arms:
            taps = TapSet(boundaries=boundaries, names=(recipe.name,))
            reference = None if base is None else boundaries
            findings.append(_finding(taps, arms[recipe.name], reference, base, recipe))
    return findings


def _finding(
    taps: TapSet,
    mine: Mapping[int, Record],
    reference: tuple[int, ...] | None,
    theirs: Mapping[int, Record] | None,
    recipe: Recipe | None = None,
) -> Finding:
    own = _figures(mine, mine)
    return Finding(
        taps=taps,
        seeds=len(mine),
        reference=reference,
        values={name: arm.value for name, arm in own.items()},
        intervals={name: arm_interval(arm) for name, arm in own.items()},
        by_seed={name: arm.by_seed for name, arm in own.items()},
        differences={} if theirs is None else _differences(mine, theirs),
        recipe=recipe,
    )


def _figures(seeds: Mapping[int, Record], among: Collection[int]) -> dict[str, ArmCounts]:
    """The counts of every figure that was measured, over the seeds in `among`."""
    kept = [record for seed, record in seeds.items() if seed in among]
    return {name: _arm(kept, name) for name in FIGURES if kept and kept[0][FIGURES[name][0]]}


def _differences(mine: Mapping[int, Record], theirs: Mapping[int, Record]) -> dict[str, Difference]:
    """Differences over the seeds both have: a study that several processes share may finish any of them."""
    shared = mine.keys() & theirs.keys()
    reference = _figures(theirs, shared)
    return {name: arm_difference(arm, reference[name]) for name, arm in _figures(mine, shared).items()}


def _arm(records: Sequence[Record], figure: str) -> ArmCounts:
    where, top, bottom = FIGURES[figure]
    return ArmCounts(
        np.array([[top(one) for one in record[where]] for record in records], dtype=float),
        np.array([[bottom(one) for one in record[where]] for record in records], dtype=float),
    )


def _reference(
    taps: TapSet, tap_sets: Sequence[TapSet], arms: Mapping[tuple[int, ...], Any]
) -> tuple[int, ...] | None:
    """The set `taps` is compared with; None for a reference itself, or where it was not measured."""
    for name in (DEFAULT, UNIFORM):
        for other in tap_sets:
            if name in other.names and len(other.boundaries) == len(taps.boundaries):
                found = other.boundaries if other.boundaries in arms else None
                return None if found == taps.boundaries else found
    return None


def foresight(
    findings: Sequence[Finding], scores: Mapping[str, Callable[[tuple[int, ...]], float]], count: int
) -> list[dict[str, Any]]:
    """Kendall's tau of each score with each measured figure, over the sets of `count` taps."""
    sets = [finding for finding in findings if len(finding.taps.boundaries) == count]
    rows: list[dict[str, Any]] = []
    if len(sets) < 3:
        return rows
    for name, score in scores.items():
        given = [score(finding.taps.boundaries) for finding in sets]
        row: dict[str, Any] = {"score": name, "sets": len(sets)}
        for figure in ("acceptance_length", "overlap"):
            found = kendalltau(given, [finding.values[figure] for finding in sets])
            row[figure] = None if np.isnan(found.statistic) else float(found.statistic)
            row[f"{figure}_p"] = None if np.isnan(found.pvalue) else float(found.pvalue)
        rows.append(row)
    return sorted(rows, key=lambda row: -abs(row["overlap"] or 0.0))


def print_findings(title: str, findings: Sequence[Finding], ranks: Sequence[Mapping[str, Any]]) -> None:
    """The tables for people."""
    ordered = sorted(findings, key=lambda f: (len(f.taps.boundaries), -f.values["acceptance_length"]))
    rows = [
        [
            finding.label,
            ",".join(str(boundary) for boundary in finding.taps.boundaries),
            finding.seeds,
            *(
                cell
                for name in ("acceptance_length", "overlap")
                for cell in (_number(finding, name), _versus(finding, name))
            ),
            _number(finding, "divergence"),
            _number(finding, "served_length"),
        ]
        for finding in ordered
    ]
    columns = [
        "recipe" if any(finding.recipe for finding in findings) else "tap set",
        "boundaries",
        "seeds",
        "accept length",
        "vs reference",
        "overlap",
        "vs reference",
        "KL",
        "served length",
    ]
    print_table(title, columns, rows)
    print(_sensitivity(findings))
    if ranks:
        print_table(
            f"Kendall's tau of scores with what was measured, over {ranks[0]['sets']} sets of equal size",
            ["score", "accept length", "p", "overlap", "p"],
            [
                [r["score"], r["acceptance_length"], r["acceptance_length_p"], r["overlap"], r["overlap_p"]]
                for r in ranks
            ],
        )


def _sensitivity(findings: Sequence[Finding]) -> str:
    """What the study could have seen, in words: the median and the largest over its comparisons."""
    parts = []
    for name, words in (("acceptance_length", "acceptance length"), ("overlap", "overlap")):
        seen = sorted(f.differences[name].detectable for f in findings if name in f.differences)
        if seen:
            parts.append(f"{np.median(seen):.3f} (at most {seen[-1]:.3f}) in {words}")
    if not parts:
        return "nothing was compared with a reference"
    return f"differences this study could have seen (5 % two-sided, power 80 %): {', '.join(parts)}"


def _number(finding: Finding, name: str) -> str | None:
    if name not in finding.values:
        return None
    low, high = finding.intervals[name]
    return f"{finding.values[name]:.3f} ({low:.3f}..{high:.3f})"


def _versus(finding: Finding, name: str) -> str | None:
    found = finding.differences.get(name)
    if found is None:
        return None
    return f"{found.value:+.3f} ({found.interval[0]:+.3f}..{found.interval[1]:+.3f})"
