"""Two runs of one bench, paired: what differs between them, and by how much, prompt by prompt.

Owns fairness (which differences of two records forbid which comparison) and paired differences with their
intervals. Rows are paired by setting and point; where a record has only one drafting setting at a point, that
one is paired whatever its name, since drafts of different names are what is often compared. A difference
resamples the prompts that both have, so that what prompts have in common cancels. Speed-ups are compared,
each against its own interleaved baseline; tokens per second of runs at different times are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.cli.bootstrap import CONFIDENCE, RESAMPLES
from specdec.cli.reporting.records import PLAIN, BenchRow, Record, bench_rows
from specdec.cli.reporting.stack import run_fields
from specdec.errors import UsageError

# two-sided 5 %, power 80 %, as in `bootstrap.Difference`
_POWER = 2.8
# settings of a run (as `reporting.stack` names them) that decide the text, and with it acceptance
_TEXT = frozenset(
    {"target", "dtype", "template_hash", "data_hash", "defaults.max_tokens", "defaults.temperature"}
    | {"defaults.simulate_acceptance", "conditions.target_fingerprint", "conditions.dtype"}
    | {"conditions.weights", "conditions.kv_cache_dtype", "conditions.exact_against"}
)
_SAMPLED = frozenset({"seeds.sampling"})
# those that decide speed as well; of a bench's own `conditions`, all that are not named above
_SPEED = frozenset(
    {"hardware.cpu", "hardware.cores", "hardware.gpus", "hardware.torch_threads", "versions.torch"}
    | {"defaults.device", "defaults.deterministic", "defaults.threads", "defaults.packed_matrices"}
)
# what a run is called, not what it is
_UNTOLD = frozenset({"command", "started_at", "revision", "extra"})


@dataclass(frozen=True, kw_only=True)
class Differing:
    """One thing that two runs do not share; `forbids` is text (all comparisons), speed, or nothing."""

    name: str
    old: str
    new: str
    forbids: str

    def __str__(self) -> str:
        return f"{self.name} ({self.old} and {self.new})"


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """New minus old, over the prompts of both.

    `detectable` is the difference that this comparison would have seen (two-sided 5 %, power 80 %).
    """

    old: float
    new: float
    interval: tuple[float, float] | None
    detectable: float | None

    @property
    def value(self) -> float:
        """New minus old."""
        return self.new - self.old

    @property
    def verdict(self) -> str:
        """What the interval allows to say, where more is better."""
        if self.interval is None:
            return "one prompt: no interval, so nothing is certain"
        if self.interval[0] > 0:
            return "interval excludes 0: improvement"
        return (
            "interval excludes 0: regression" if self.interval[1] < 0 else "interval holds 0: no change shown"
        )

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:+.2f}, {self.verdict}"
        return f"{self.value:+.2f} ({self.interval[0]:+.2f}..{self.interval[1]:+.2f}), {self.verdict}"


@dataclass(frozen=True, kw_only=True)
class RowPair:
    """The same setting, or the only ones, of two runs at one point.

    Attributes:
        old: the one compared with.
        new: the other.
        prompts: ids that both have, in the old one's order.
        unfair: what differs between the rows themselves, such as an exact and a lossy rule.
        length: difference in acceptance length; None where a side has no verify step.
        speedup: difference in speed-up; None where a side has none, or where it must not be taken.
    """

    old: BenchRow
    new: BenchRow
    prompts: Sequence[str]
    unfair: Sequence[Differing] = ()
    length: PairedDifference | None = None
    speedup: PairedDifference | None = None

    @property
    def label(self) -> str:
        """Setting and point, both names where they differ."""
        same = self.old.setting == self.new.setting
        name = self.new.setting if same else f"{self.new.setting} against {self.old.setting}"
        return f"{name}, {self.new.data}, batch {self.new.batch_size}, temperature {self.new.temperature:g}"


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Two records set side by side."""

    old: Record
    new: Record
    differing: Sequence[Differing]
    pairs: Sequence[RowPair] = field(default_factory=tuple)
    unpaired: Sequence[str] = ()

    @property
    def forbidding(self) -> list[Differing]:
        """What makes every comparison unfair."""
        found = [one for one in self.differing if one.forbids == "text"]
        of_rows = [one for pair in self.pairs for one in pair.unfair]
        return [*found, *dict.fromkeys(of_rows)]


def pair_records(old: Record, new: Record, *, settings: Sequence[str] = ()) -> Pairing:
    """Pair the rows of two bench records and take their differences.

    Args:
        old: the record compared with.
        new: the other one.
        settings: names of rows to compare; all that draft when empty.

    Raises:
        UsageError: a record that is no bench, an unknown setting, or two records without a point in common.
    """
    for record in (old, new):
        if record.kind != "bench":
            raise UsageError(
                f"RUN ({record.path}) is a {record.kind} record; only bench records are compared"
            )
    differing = record_differences(old, new)
    theirs, ours = bench_rows([old]), bench_rows([new])
    for name in settings:
        if name not in {row.setting for row in ours}:
            known = ", ".join(dict.fromkeys(row.setting for row in ours if row.setting != PLAIN))
            raise UsageError(f"--setting ({name}) is not in {new.path}; it has {known}")
    wanted = [row for row in ours if row.drafts and (not settings or row.setting in settings)]
    pairs, unpaired = [], []
    speed = not any(one.forbids for one in differing)
    for row in wanted:
        match = _match(row, wanted, [one for one in theirs if one.drafts])
        if match is None:
            unpaired.append(row.label)
        else:
            pairs.append(_pair(match, row, theirs, ours, speed=speed))
    return Pairing(old=old, new=new, differing=differing, pairs=pairs, unpaired=unpaired)


def record_differences(old: Record, new: Record) -> list[Differing]:
    """Whatever two runs do not share that can change a figure, the gravest first.

    A field that only one of them tells is left out: the other record is older than the field.
    """
    one, other = _fields(old), _fields(new)
    if "conditions.target_fingerprint" in one and "conditions.target_fingerprint" in other:
        # the same weights may stand in folders of two names
        del one["target"], other["target"]
    sampled = any(row.temperature > 0 for row in bench_rows([old, new]))
    found = [
        Differing(name=name, old=one[name], new=other[name], forbids=_forbids(name, sampled=sampled))
        for name in one
        if name in other and one[name] != other[name] and name.split(".")[0] not in _UNTOLD
    ]
    return sorted(found, key=lambda one: ("text", "speed", "").index(one.forbids))


def _forbids(name: str, *, sampled: bool) -> str:
    """Which comparisons a differing field makes unfair."""
    if name in _TEXT or name.split(".")[0] in _TEXT or (sampled and name in _SAMPLED):
        return "text"
    return "speed" if name in _SPEED or name.startswith("conditions.") else ""


def _fields(record: Record) -> dict[str, str]:
    fields = {"target": str(record.body["target"])}
    if record.run:
        fields |= run_fields(record.run)
    conditions = record.body.get("conditions")
    if isinstance(conditions, Mapping):
        fields |= {f"conditions.{name}": str(value) for name, value in conditions.items()}
    return fields


def _match(row: BenchRow, wanted: Sequence[BenchRow], others: Sequence[BenchRow]) -> BenchRow | None:
    at_point = [one for one in others if one.point == row.point]
    if len({one.point for one in others}) == len({one.point for one in wanted}) == 1:
        # one point each: where they differ in it, that is told, and makes the pair unfair
        at_point = list(others)
    same = [one for one in at_point if one.setting == row.setting]
    if same:
        return same[0]
    alone = len(at_point) == 1 and sum(one.point == row.point for one in wanted) == 1
    return at_point[0] if alone else None


def _pair(
    old: BenchRow, new: BenchRow, theirs: Sequence[BenchRow], ours: Sequence[BenchRow], *, speed: bool
) -> RowPair:
    unfair = _unfair(old, new)
    one, other = _by_prompt(old.answers), _by_prompt(new.answers)
    prompts = [name for name in one if name in other]
    pair = RowPair(old=old, new=new, prompts=prompts, unfair=unfair)
    if not prompts:
        return pair
    columns = [[side[name] for name in prompts] for side in (one, other)]
    length = _difference([[(p.committed, p.steps) for p in side] for side in columns], _ratio)
    found = None
    bases = [_plain(row, rows) for row, rows in ((old, theirs), (new, ours))]
    if speed and all(name in base for base in bases for name in prompts):
        timed = [
            [
                (p.tokens, p.seconds, base[name].tokens, base[name].seconds)
                for name, p in zip(prompts, side, strict=True)
            ]
            for side, base in zip(columns, bases, strict=True)
        ]
        found = _difference(timed, _ratio_of_ratios)
    return RowPair(old=old, new=new, prompts=prompts, unfair=unfair, length=length, speedup=found)


def _unfair(old: BenchRow, new: BenchRow) -> list[Differing]:
    """What two rows must not differ in."""
    sides = [
        {
            "data": row.data,
            "batch_size": str(row.batch_size),
            "temperature": f"{row.temperature:g}",
            # older records hold exact rules only, and do not say so
            "lossless": "yes" if row.body.get("lossless", True) else "no",
            "simulated": "yes" if "simulated" in row.body else "no",
        }
        for row in (old, new)
    ]
    return [
        Differing(name=name, old=value, new=sides[1][name], forbids="text")
        for name, value in sides[0].items()
        if value != sides[1][name]
    ]


@dataclass
class _Prompt:
    """Counts of one prompt, all its turns together; seconds are medians over repeats."""

    committed: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


def _by_prompt(answers: Sequence[Mapping[str, Any]]) -> dict[str, _Prompt]:
    found: dict[str, _Prompt] = {}
    for answer in answers:
        one = found.setdefault(answer["id"], _Prompt())
        one.committed += answer["committed"]
        one.steps += answer["verify_steps"]
        one.tokens += answer["tokens"]
        one.seconds += float(np.median([second for second in answer["seconds"] if second is not None]))
    return found


def _plain(row: BenchRow, rows: Sequence[BenchRow]) -> dict[str, _Prompt]:
    """The run's own baseline at the row's point."""
    base = [one for one in rows if one.setting == PLAIN and one.point == row.point]
    return _by_prompt(base[0].answers) if base else {}


def _ratio(sums: np.ndarray) -> np.ndarray:
    return np.asarray(sums[..., 0] / sums[..., 1])


def _ratio_of_ratios(sums: np.ndarray) -> np.ndarray:
    return np.asarray((sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3]))


def _difference(
    sides: Sequence[Sequence[tuple[float, ...]]], statistic: Callable[[np.ndarray], np.ndarray]
) -> PairedDifference | None:
    """The statistic of summed columns, new minus old, with the same prompts drawn for both."""
    old, new = (np.asarray(side, dtype=float) for side in sides)
    count = len(old)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = [float(statistic(side.sum(axis=0))) for side in (old, new)]
        if not np.isfinite(values).all():
            return None
        if count < 2:
            return PairedDifference(old=values[0], new=values[1], interval=None, detectable=None)
        drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
        spread = statistic(drawn @ new) - statistic(drawn @ old)
    spread = spread[np.isfinite(spread)]
    tail = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(spread, [tail, 100 - tail])
    return PairedDifference(
        old=values[0],
        new=values[1],
        interval=(float(low), float(high)),
        detectable=_POWER * float(spread.std(ddof=1)),
    )
