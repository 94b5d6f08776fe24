"""What differs between two runs: the verdict first, then what it rests on.

Owns the report of a pairing and its refusal. Pairs and fairness are :mod:`specdec.cli.reporting.pairs`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.cli.paper import Notes, Table, Terms
from specdec.cli.reporting.acceptance import by_category
from specdec.cli.reporting.bench import settings_table
from specdec.cli.reporting.build import Report
from specdec.cli.reporting.charts import Mark, forest, lines
from specdec.cli.reporting.pairs import Pairing, RowPair, pair_records
from specdec.cli.reporting.parts import Part, SectionParts
from specdec.cli.reporting.records import Record, bench_rows
from specdec.cli.reporting.stack import stack_section
from specdec.errors import SpecdecError
from specdec.stats import DEFINITIONS

_FLAG = "NOT A FAIR COMPARISON"
# by the sign of a change where more is better
_WORDS = {-1: "regression", 0: "no change", 1: "improvement"}


@dataclass(frozen=True, kw_only=True)
class Diff:
    """A pairing that may be shown; `flagged` where it is unfair and was asked for all the same."""

    pairing: Pairing
    flagged: bool

    @property
    def verdicts(self) -> list[str]:
        """One line a pair and figure."""
        prefix = f"{_FLAG}: " if self.flagged else ""
        return [f"{prefix}{line}" for pair in self.pairing.pairs for line in verdict_lines(pair)]

    def to_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "fair": not self.flagged,
            "verdicts": self.verdicts,
            "pairs": [
                {
                    "setting": pair.label,
                    "prompts": len(pair.prompts),
                    "acceptance_length": _figures(pair.length),
                    "speedup": _figures(pair.speedup),
                }
                for pair in self.pairing.pairs
            ],
            "differing": [str(one) for one in self.pairing.differing],
            "unpaired": list(self.pairing.unpaired),
        }


def _figures(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "old": found.old,
        "new": found.new,
        "difference": found.value,
        "interval": found.interval,
        "detectable": found.detectable,
        "verdict": found.verdict,
    }


def verdict_lines(pair: RowPair) -> list[str]:
    """What became of acceptance, speed and exactness, in a sentence each."""
    if not pair.prompts:
        return [f"{pair.label}: no prompt in common, nothing is compared"]
    basis = f"n = {len(pair.prompts)} prompts, paired"
    said = []
    for name, found in (("acceptance length", pair.length), ("speed-up", pair.speedup)):
        if found is not None:
            said.append(f"{pair.label}: {name} {found}; {basis}")
    same = [row.body.get("identical") for row in (pair.old, pair.new)]
    if None not in same and pair.old.lossless and pair.new.lossless:
        counts = [row.body.get("answers", row.body["prompts"]) for row in (pair.old, pair.new)]
        shares = [number / count for number, count in zip(same, counts, strict=True) if number is not None]
        word = _WORDS[(shares[1] > shares[0]) - (shares[1] < shares[0])]
        said.append(
            f"{pair.label}: identical texts {same[1]} of {counts[1]}, before {same[0]} of {counts[0]}: {word}"
        )
    return said


def compare_records(old: Record, new: Record, *, allow_differences: bool) -> Diff:
    """Pair two records, unless they are unlike.

    Raises:
        SpecdecError: they differ in what makes every comparison unfair, or have nothing in common.
    """
    pairing = pair_records(old, new)
    forbidding = pairing.forbidding
    if not pairing.pairs:
        raise SpecdecError(
            f"{new.path} and {old.path} have no drafting setting in common at the same point (data, batch, "
            f"temperature); only in the first: {'; '.join(pairing.unpaired) or 'nothing, none drafts'}"
        )
    if forbidding and not allow_differences:
        raise SpecdecError(
            f"{new.path} and {old.path} cannot be compared: they differ in "
            f"{', '.join(str(one) for one in forbidding)}; measure both alike, or flag the comparison with "
            "--allow-differences"
        )
    return Diff(pairing=pairing, flagged=bool(forbidding))


def diff_report(diff: Diff, title: str | None = None) -> Report:
    """The report of a comparison."""
    pairing = diff.pairing
    lead = diff.verdicts[0]
    rows = bench_rows([pairing.old, pairing.new])
    return Report(
        title=title or f"specdec diff: {pairing.new.name} against {pairing.old.name}",
        lead=lead,
        sections=[
            *_verdicts(diff),
            _figures_section(diff),
            _fairness(diff),
            SectionParts(title="All settings", blocks=[settings_table(rows)]),
            stack_section([pairing.old, pairing.new]),
        ],
    )


def _verdicts(diff: Diff) -> list[SectionParts]:
    rest = diff.verdicts[1:]
    return [SectionParts(title="Verdicts", blocks=[Notes(lines=rest)])] if rest else []


def _figures_section(diff: Diff) -> SectionParts:
    blocks: list[Part] = []
    rows = []
    for key, name, unit in (
        ("length", "acceptance length", "difference in tokens per verify step"),
        ("speedup", "speed-up", "difference in times the speed without speculation"),
    ):
        found = [
            (pair, one)
            for pair in diff.pairing.pairs
            if (one := pair.length if key == "length" else pair.speedup) is not None
        ]
        rows += [
            [pair.label, name, one.old, one.new, one.value, one.interval, one.detectable, one.verdict]
            for pair, one in found
        ]
        if found:
            blocks.append(
                forest(
                    f"d-{key}",
                    f"Difference in {name}, new minus old",
                    [Mark(label=pair.label, value=one.value, interval=one.interval) for pair, one in found],
                    unit=unit,
                    reference=0.0,
                    digits=3,
                    caption="Right of the dashed line the new run is better. Lines: 95 % intervals of the "
                    "paired bootstrap: the same prompts are drawn for both runs.",
                )
            )
    blocks += [part for number, pair in enumerate(diff.pairing.pairs) for part in _categories(pair, number)]
    blocks.append(
        Table(
            columns=["setting", "figure", "old", "new", "difference", "interval", "detectable", "verdict"],
            rows=rows,
            caption="detectable: the difference that would have been seen (two-sided 5 %, power 80 %)",
        )
    )
    blocks.append(
        Terms(
            meanings=[
                ("acceptance length", DEFINITIONS["acceptance_length"]),
                ("speed-up", "tokens per second over those of the same run's engine without speculation"),
            ]
        )
    )
    return SectionParts(title="Differences, paired by prompt", blocks=blocks)


def _categories(pair: RowPair, number: int) -> list[Part]:
    found = {"old": by_category(pair.old), "new": by_category(pair.new)}
    names = [name for name in found["old"] if name in found["new"]]
    if len(names) < 2:
        return []
    return [
        lines(
            f"d-category-{number}",
            f"By category: {pair.label}",
            {
                side: [(float(index), *values[name]) for index, name in enumerate(names)]
                for side, values in found.items()
            },
            x="category",
            y="tokens per verify step",
            names=dict(enumerate(names)),
            bottom=None,
            joined=False,
            caption="Acceptance length of either run on its own, with 95 % bootstrap intervals over prompts.",
        )
    ]


def _fairness(diff: Diff) -> SectionParts:
    pairing = diff.pairing
    means = {
        "text": "every comparison",
        "speed": "comparisons of speed",
        "": "none; it may be what is compared",
    }
    rows = [[one.name, one.old, one.new, means[one.forbids]] for one in pairing.differing]
    rows += [[one.name, one.old, one.new, means["text"]] for pair in pairing.pairs for one in pair.unfair]
    blocks: list[Part] = []
    if diff.flagged:
        blocks.append(f"{_FLAG}: the runs differ in what decides the figures.")
    if rows:
        blocks.append(Table(columns=["what differs", "old", "new", "makes unfair"], rows=rows))
    else:
        blocks.append("The two runs differ in nothing that their records tell.")
    notes = [f"not in the other run: {label}" for label in pairing.unpaired]
    for pair in pairing.pairs:
        for row, side in ((pair.old, "old"), (pair.new, "new")):
            count = len({answer["id"] for answer in row.answers})
            if count != len(pair.prompts):
                notes.append(
                    f"{pair.label}: {len(pair.prompts)} of the {side} run's {count} prompts are in both"
                )
    if any(one.forbids == "speed" for one in pairing.differing):
        notes.append("no speed-ups are compared: hardware or settings of the engine differ")
    if notes:
        blocks.append(Notes(lines=notes))
    return SectionParts(title="Is it fair", blocks=blocks)
