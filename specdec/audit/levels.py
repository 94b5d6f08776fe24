"""What an audit reports: a level's claim, whether it held, its figures, and the failures one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import UsageError

LEVELS: dict[str, str] = {
    "C0": "the rule's emitted joint law, enumerated exactly, is the declared one",
    "C1": "the implementation's draws follow the law: on tensors, and through the engine on this target",
    "C2": "greedy text with speculation is the plain text; each first difference is a near tie",
    "C3": "sampled text depends on seed and target alone: no drafter, lookup and draft write the same",
    "C4": "at committed positions the tree pass has the logits of a plain pass over the same text",
    "C5": "exact-match task scores with and without speculation agree",
}
# what a lossy rule promises in place of C2, C3 and C5
LOSSY = "lossy"
CLAIMS: dict[str, str] = {
    **LEVELS,
    LOSSY: "no token that the target excludes, and no more overshoot than the rule declares",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of a level's table: what was tried, what came out.

    Attributes:
        name: what was tried.
        values: figures by column; every row of a level has the same columns.
        passed: whether it held; None: it is reported and decides nothing.
    """

    name: str
    values: dict[str, Any]
    passed: bool | None = None


@dataclass(frozen=True, kw_only=True)
class LevelResult:
    """One level's outcome.

    Attributes:
        level: a key of `CLAIMS`.
        passed: whether every figure that decides held; None when nothing could be decided.
        figures: rows of the level's table.
        notes: how it was measured: sizes, thresholds and where they come from.
        findings: single failures and differences, most telling first.
    """

    level: str
    passed: bool | None
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    findings: Sequence[dict[str, Any]] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "level": self.level,
            "claim": CLAIMS[self.level],
            "passed": self.passed,
            "figures": [
                {"name": figure.name, **figure.values, "passed": figure.passed} for figure in self.figures
            ],
            "notes": list(self.notes),
            "findings": list(self.findings),
        }


def level_result(
    level: str,
    figures: Sequence[Figure],
    *,
    notes: Sequence[str] = (),
    findings: Sequence[dict[str, Any]] = (),
) -> LevelResult:
    """Collect a level: it holds when each of its deciding figures does."""
    deciding = [figure.passed for figure in figures if figure.passed is not None]
    return LevelResult(
        level=level,
        passed=all(deciding) if deciding else None,
        figures=figures,
        notes=notes,
        findings=findings,
    )


def parse_levels(text: str) -> tuple[str, ...]:
    """The levels of a comma-separated list, in order.

    Raises:
        UsageError: an unknown level.
    """
    wanted = [word.strip().upper() for word in text.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in LEVELS]
    if unknown or not wanted:
        raise UsageError(f"--levels ({text}) must be some of {','.join(LEVELS)}, separated by commas")
    return tuple(level for level in LEVELS if level in wanted)
