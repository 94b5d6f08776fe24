"""The points of a sweep: what is combined with what, how a point is spelled, and which are dominated.

Owns the grid and the Pareto order. Axes, in which less is better: verify cost per committed token (FLOPs, and
measured processor milliseconds), minus acceptance length, distance from the target's law (total variation a
token, and overshoot, since rules of equal total variation and acceptance differ by that), draft training cost
(target tokens read), memory. A point is dominated when another one of the same batch size is no worse on
every axis and better on one; point estimates are compared, intervals are given beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.cli.sampling_options import parse_knobs
from specdec.cli.usage import check_rule
from specdec.errors import UsageError
from specdec.provenance import sha256_text
from specdec.verification.registry import rule_named
from specdec.verification.rules import BoundRule

EXACT = "exact"
PLAIN = "none"
# name of a figure -> 1 where less is better, -1 where more is
AXES: dict[str, int] = {
    "verify_gflops_per_token": 1,
    "verify_cpu_ms_per_token": 1,
    "acceptance_length": -1,
    "total_variation": 1,
    "largest_overshoot": 1,
    "training_target_tokens": 1,
    "draft_memory_bytes": 1,
}


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One setting.

    Attributes:
        draft: spelling of the drafter, "none" for plain decoding.
        rule: spelling of the rule, "exact" for the exact one the engine takes by itself.
        shape: spelling of the trees.
        batch_size: requests decoded at once.
    """

    draft: str
    rule: str
    shape: str
    batch_size: int

    @property
    def label(self) -> str:
        """How tables call it."""
        return f"{self.draft}, {self.rule}, {self.shape}, batch {self.batch_size}"

    def key(self, settings: Mapping[str, Any], draft_fingerprint: str | None) -> str:
        """Name of its file: a hash of the point, of its draft's contents, and of what all points share."""
        spelled = [self.draft, self.rule, self.shape, self.batch_size]
        spelled += [draft_fingerprint, sorted(settings.items())]
        return sha256_text(repr(spelled))[:16]


def parse_rule(text: str) -> BoundRule | None:
    """The rule of `RULE` or `RULE:KNOB=VALUE,KNOB=VALUE`; None for "exact".

    Raises:
        SpecdecError: an unknown rule or knob, or a value out of range.
    """
    name, _, knobs = text.partition(":")
    if name == EXACT and not knobs:
        return None
    given = parse_knobs([part for part in knobs.split(",") if part])
    check_rule(name, given)
    return rule_named(name, given)


def grid(
    drafts: Sequence[str], rules: Sequence[str], shapes: Sequence[str], batch_sizes: Sequence[int]
) -> list[SweepPoint]:
    """Every combination, and plain decoding at every batch size first.

    Raises:
        UsageError: the same value twice, or no drafter among the drafts.
    """
    if PLAIN in drafts:
        raise UsageError(f"--draft ({PLAIN}) must be a drafter; plain decoding is measured in every sweep")
    for option, values in (("--draft", drafts), ("--rule", rules), ("--shape", shapes)):
        if len(set(values)) < len(values):
            raise UsageError(f"{option} must not name the same value twice")
    points = [
        SweepPoint(draft=PLAIN, rule=EXACT, shape="-", batch_size=size) for size in dict.fromkeys(batch_sizes)
    ]
    points += [
        SweepPoint(draft=draft, rule=rule, shape=shape, batch_size=size)
        for size, draft, shape, rule in itertools.product(dict.fromkeys(batch_sizes), drafts, shapes, rules)
    ]
    return points


def check_lossy(rules: Sequence[str], *, lossy: bool, exact: bool) -> None:
    """Refuse lossy rules that were not asked for.

    Raises:
        UsageError: a lossy rule without --lossy, or with --exact.
    """
    if lossy and exact:
        raise UsageError("--exact promises that nothing lossy runs; drop it, or --lossy")
    for text in rules:
        bound = parse_rule(text)
        if bound is not None and not bound.rule.is_lossless and not lossy:
            raise UsageError(
                f"--rule ({text}) is lossy, the text would not have the target's law; allow it with --lossy"
            )


def mark_dominated(figures: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each measured point, the names of those that dominate it.

    A figure that was not measured (no declared law) is no better and no worse than any other: such a point is
    dominated by none and dominates none.
    """
    return [
        [
            other["label"]
            for other in figures
            if other is not one and other["batch_size"] == one["batch_size"] and _dominates(other, one)
        ]
        for one in figures
    ]


def _dominates(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    pairs = [(one[name], other[name], sign) for name, sign in AXES.items()]
    if any(first is None or second is None for first, second, _ in pairs):
        return False
    return all(sign * first <= sign * second for first, second, sign in pairs) and any(
        sign * first < sign * second for first, second, sign in pairs
    )
