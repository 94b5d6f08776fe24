"""Drafters of one bench against each other: differences in acceptance length, paired by prompt.

Two intervals of lengths may overlap though one drafter is better on nearly every prompt, since prompts differ
more than drafters do. Works on the record alone, so that points of an earlier run count too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.cli.bootstrap import ArmCounts, arm_difference

Row = Mapping[str, Any]
Answer = Mapping[str, Any]
_PLACE = ("temperature", "batch_size", "shape", "rule")


def paired_lengths(rows: Sequence[Row], answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    """Every drafter minus the first one that drafts in the same shape under the same rule.

    Args:
        rows: figures of every setting at every point.
        answers: one record an answer, by setting.

    Returns:
        A difference for each prompt set, and for all together where there are several (`data` names them).
    """
    drafting = [row for row in rows if row["draft"] is not None and "simulated" not in row]
    found = []
    for sets in _set_groups(drafting):
        cells: dict[tuple[Any, ...], list[str]] = {}
        for row in drafting:
            if row["data"] == sets[0]:
                cells.setdefault(tuple(row[name] for name in _PLACE), []).append(row["setting"])
        for cell, (first, *others) in cells.items():
            place = dict(zip(_PLACE, cell, strict=True))
            for setting in others:
                difference = _difference(answers[setting], answers[first], place, sets)
                if difference is not None:
                    found.append({"setting": setting, "against": first, "data": sets, **place, **difference})
    return found


def _set_groups(rows: Sequence[Row]) -> list[list[str]]:
    sets = list(dict.fromkeys(row["data"] for row in rows))
    return [[one] for one in sets] + ([sets] if len(sets) > 1 else [])


def _difference(
    mine: Sequence[Answer], theirs: Sequence[Answer], place: Mapping[str, Any], sets: Sequence[str]
) -> dict[str, Any] | None:
    """Of the prompts that took verify steps under both; None with fewer than two."""
    ours, other = (_counts(answers, place, sets) for answers in (mine, theirs))
    keys = [key for key in ours if key in other and ours[key][1] and other[key][1]]
    if len(keys) < 2:
        return None
    arms = [
        ArmCounts(*(np.array([[counts[key][column] for key in keys]], dtype=float) for column in (0, 1)))
        for counts in (ours, other)
    ]
    difference = arm_difference(*arms)
    return {
        "prompts": len(keys),
        "value": difference.value,
        "interval": list(difference.interval),
        "detectable": difference.detectable,
    }


def _counts(
    answers: Sequence[Answer], place: Mapping[str, Any], sets: Sequence[str]
) -> dict[tuple[str, str], list[int]]:
    """Committed tokens and verify steps of each prompt."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in answers:
        here = all(one[name] == place[name] for name in ("temperature", "batch_size"))
        if here and one["data"] in sets:
            sums = found.setdefault((one["data"], one["id"]), [0, 0])
            sums[0] += one["committed"]
            sums[1] += one["verify_steps"]
    return found
