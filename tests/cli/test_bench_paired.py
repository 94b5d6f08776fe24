"""Drafters of one bench are compared prompt by prompt, in the same place alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.cli.benching.paired import paired_lengths
from specdec.cli.benching.table import print_paired

PLACE = {"temperature": 0.0, "batch_size": 8}
SETS = ("one", "two")


def row(
    setting: str, data: str, *, draft: str | None = "d", shape: str = "chain:4", **more: Any
) -> dict[str, Any]:
    return {
        "setting": setting,
        "draft": draft,
        "shape": shape,
        "rule": "greedy",
        "data": data,
        **PLACE,
        **more,
    }


def answers(gain: float, data: str, count: int = 40, **place: Any) -> list[dict[str, Any]]:
    """Prompts that differ much more from each other than the drafters do."""
    steps = np.random.default_rng(0).integers(20, 60, count)
    return [
        {
            **{"id": f"p{number}", "data": data, "verify_steps": int(taken)},
            **{"committed": round(taken * (1.2 + number / count + gain)), **PLACE, **place},
        }
        for number, taken in enumerate(steps)
    ]


def test_a_difference_is_certain_though_both_intervals_overlap() -> None:
    rows = [row("plain", "one", draft=None), row("old", "one"), row("new", "one")]
    found = paired_lengths(rows, {"old": answers(0.0, "one"), "new": answers(0.1, "one")})
    [one] = found
    assert (one["setting"], one["against"], one["data"], one["prompts"]) == ("new", "old", ["one"], 40)
    assert one["value"] == pytest.approx(0.1, abs=0.01)
    low, high = one["interval"]
    assert 0.08 < low < one["value"] < high < 0.12
    assert one["detectable"] < 0.05


def test_sets_are_compared_alone_and_together() -> None:
    rows = [row(name, data) for data in SETS for name in ("old", "new")]
    kept = {
        "old": answers(0.0, "one") + answers(0.0, "two"),
        "new": answers(0.3, "one") + answers(0.1, "two"),
    }
    first, second, both = paired_lengths(rows, kept)
    assert [one["data"] for one in (first, second, both)] == [["one"], ["two"], ["one", "two"]]
    assert first["value"] > both["value"] > second["value"]
    assert both["prompts"] == first["prompts"] + second["prompts"]


@pytest.mark.parametrize(
    "other",
    [
        row("new", "one", shape="tree:2x2:4"),
        row("new", "one", draft=None),
        row("new", "one", simulated=True),
        row("new", "one") | {"rule": "block"},
        row("new", "one") | {"batch_size": 1},
    ],
)
def test_unlike_settings_are_not_compared(other: dict[str, Any]) -> None:
    kept = {"old": answers(0.0, "one"), "new": answers(0.1, "one", batch_size=other["batch_size"])}
    assert paired_lengths([row("old", "one"), other], kept) == []


def test_the_table_shows_the_widest_comparison_and_nothing_for_one_drafter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_paired("bench", [])
    assert capsys.readouterr().out == ""
    rows = [row(name, data) for data in SETS for name in ("old", "new")]
    kept = {name: answers(gain, "one") + answers(gain, "two") for name, gain in (("old", 0.0), ("new", 0.1))}
    print_paired("bench", paired_lengths(rows, kept))
    lines = [line for line in capsys.readouterr().out.splitlines() if "old" in line]
    assert len(lines) == 1
    assert "80" in lines[0]
    assert "+0.1" in lines[0]
