"""What a run must keep, checked: thresholds, exactness, and no loss against a stored baseline.

Owns the checks and their sentences. Thresholds are compared with the figures themselves, not with the ends of
intervals: greedy acceptance in fp32 is the same in every run, and a speed's tolerance is the user's choice.
A figure that is needed and missing fails its check. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.cli.reporting.charts import number_with
from specdec.cli.reporting.exactness import recorded_exactness
from specdec.cli.reporting.pairs import PairedDifference, Pairing, RowPair
from specdec.cli.reporting.records import BenchRow


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What to check; None is not checked."""

    min_acceptance_length: float | None = None
    max_drop: float | None = None
    min_speedup: float | None = None
    max_speedup_drop: float | None = None
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question and its answer.

    Attributes:
        setting: what was checked.
        name: of the check, the option that asks for it.
        passed: the answer.
        found: the figure, with its interval where there is one.
        wanted: what it had to be.
    """

    setting: str
    name: str
    passed: bool
    found: str
    wanted: str


def checks_of(rows: Sequence[BenchRow], wanted: Thresholds, pairing: Pairing | None) -> list[Check]:
    """Every check of every row, in order.

    Args:
        rows: settings of the run that draft.
        wanted: the thresholds.
        pairing: the run beside its baseline, if there is one.
    """
    checks = [check for row in rows for check in _alone(row, wanted)]
    return checks + (list(_against(pairing, wanted)) if pairing else [])


def _alone(row: BenchRow, wanted: Thresholds) -> Iterator[Check]:
    if wanted.min_acceptance_length is not None:
        length = row.acceptance["acceptance_length"]
        yield Check(
            setting=row.label,
            name="min-acceptance-length",
            passed=length is not None and length >= wanted.min_acceptance_length,
            found=number_with(length, row.acceptance["acceptance_length_interval"], 3),
            wanted=f"at least {wanted.min_acceptance_length:g}",
        )
    if wanted.min_speedup is not None:
        speedup = row.body.get("speedup")
        yield Check(
            setting=row.label,
            name="min-speedup",
            passed=speedup is not None and speedup >= wanted.min_speedup,
            found=number_with(speedup, row.body.get("speedup_interval"), 3),
            wanted=f"at least {wanted.min_speedup:g}",
        )
    if wanted.exact:
        yield _exactness(row)


def _exactness(row: BenchRow) -> Check:
    count, same = row.body.get("answers", row.body["prompts"]), row.body.get("identical")
    if "simulated" in row.body:
        found = "acceptance was simulated: no text to compare"
    elif not row.lossless:
        found = f"lossy rule {row.body['rule']}"
    else:
        found = "not compared" if same is None else f"{same} of {count} identical"
    return Check(
        setting=row.label,
        name="exact",
        passed=row.lossless and same == count,
        found=found,
        wanted=f"{count} of {count} identical to no speculation on {recorded_exactness(row.record.body)}",
    )


def _against(pairing: Pairing, wanted: Thresholds) -> Iterator[Check]:
    forbidding = pairing.forbidding
    yield Check(
        setting="both runs",
        name="comparable",
        passed=not forbidding,
        found="; ".join(str(one) for one in forbidding) or "alike",
        wanted="nothing but speculation differs from the baseline",
    )
    for label in pairing.unpaired:
        yield Check(
            setting=label,
            name="in-baseline",
            passed=False,
            found="not in the baseline",
            wanted="a row to compare",
        )
    if forbidding:
        return
    for pair in pairing.pairs:
        yield _drop(pair, "max-drop", pair.length, wanted.max_drop)
        if wanted.max_speedup_drop is not None:
            yield _drop(pair, "max-speedup-drop", pair.speedup, wanted.max_speedup_drop)


def _drop(pair: RowPair, name: str, found: PairedDifference | None, most: float | None) -> Check:
    """A loss within `most`; without it, no loss that is certain."""
    sentence = f"at most {most:g} lost" if most is not None else "no loss whose interval excludes 0"
    if found is None:
        why = "no prompt in common" if not pair.prompts else "not to be compared: hardware or settings differ"
        return Check(setting=pair.label, name=name, passed=False, found=why, wanted=sentence)
    if most is not None:
        passed = found.value >= -most
    else:
        passed = found.interval is None or found.interval[1] >= 0
    return Check(
        setting=pair.label,
        name=name,
        passed=passed,
        found=f"{found.new:.3f}, before {found.old:.3f}: {found} (n = {len(pair.prompts)} prompts, paired)",
        wanted=sentence,
    )
