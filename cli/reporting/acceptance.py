"""The charts of a bench that are about acceptance: gain, depth, category, position, context.

Owns them. Figures are the record's own; added here are only intervals that it does not hold: of categories by
resampling prompts, of depths from counts (Wilson 1927, over steps). Knows nothing of time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.cli.bootstrap import ratio_interval
from specdec.cli.reporting.charts import Interval, Mark, forest, lines, number_with
from specdec.cli.reporting.parts import Part
from specdec.cli.reporting.records import BenchRow

_Z = 1.959964  # two-sided 95 %


def length_of(row: BenchRow) -> str:
    """Acceptance length with its interval."""
    return number_with(row.acceptance["acceptance_length"], row.acceptance["acceptance_length_interval"])


def gain_charts(rows: Sequence[BenchRow], key: str) -> list[Part]:
    """Speed-up and acceptance length of every setting that has a speed-up."""
    fast = [row for row in rows if row.body.get("speedup") is not None]
    if not fast:
        return []
    return [
        forest(
            f"{key}-speedup",
            "Speed-up over no speculation",
            [
                Mark(label=r.label, value=r.body["speedup"], interval=pair(r.body["speedup_interval"]))
                for r in fast
            ],
            unit="times the tokens per second without speculation",
            reference=1.0,
            caption="Same engine, prompts, lengths, dtype and batch, interleaved. Dashed: 1, no gain. Lines: "
            "95 % bootstrap intervals over prompts.",
        ),
        forest(
            f"{key}-length",
            "Acceptance length",
            [
                Mark(
                    label=row.label,
                    value=row.acceptance["acceptance_length"],
                    interval=pair(row.acceptance["acceptance_length_interval"]),
                )
                for row in fast
            ],
            unit="tokens per verify step",
            reference=1.0,
            caption="Committed tokens / verify steps, bonus and recovered tokens included. Dashed: 1, no "
            "speculation. Lines: 95 % bootstrap intervals over prompts.",
        ),
    ]


def acceptance_charts(rows: Sequence[BenchRow], key: str, definitions: Mapping[str, str]) -> list[Part]:
    """Acceptance by depth, category, position and context, of settings that draft."""
    charts: list[Part] = []
    for name, title in (
        ("acceptance_per_depth", "Acceptance by depth"),
        ("acceptance_per_depth_conditional", "Acceptance by depth, given the depth before"),
    ):
        curves = {row.label: curve for row in rows if (curve := _by_depth(row, name))}
        if curves:
            charts.append(
                lines(
                    f"{key}-{name.replace('_', '-')}",
                    title,
                    curves,
                    x="depth",
                    y="share accepted",
                    whole=True,
                    caption=f"{definitions[name]}. Lines: 95 % Wilson intervals over steps, as if steps were "
                    "independent.",
                )
            )
    categories = {row.label: found for row in rows if (found := by_category(row))}
    names = list(dict.fromkeys(name for found in categories.values() for name in found))
    if len(names) > 1:
        charts.append(
            lines(
                f"{key}-category",
                "Acceptance length by category",
                {
                    label: [(float(names.index(one)), *value) for one, value in found.items()]
                    for label, found in categories.items()
                },
                x="category",
                y="tokens per verify step",
                names={float(index): name for index, name in enumerate(names)},
                bottom=None,
                joined=False,
                caption="Committed / verify steps of the category's prompts. Lines: 95 % bootstrap intervals "
                "over prompts; none with fewer than two.",
            )
        )
    for name, title, where in (
        ("by_position", "Acceptance length by position in the answer", "answer tokens before the step"),
        ("by_context", "Acceptance length by context", "tokens before the step"),
    ):
        ranges = {row.label: buckets for row in rows if (buckets := _by_bucket(row, name))}
        if any(len(buckets) > 1 for buckets in ranges.values()):
            charts.append(
                lines(
                    f"{key}-{name.replace('_', '-')}",
                    title,
                    {
                        label: [(float(at), length, None) for at, _, length in x]
                        for label, x in ranges.items()
                    },
                    x=where,
                    y="tokens per verify step",
                    names={float(at): text for buckets in ranges.values() for at, text, _ in buckets},
                    bottom=1.0,
                    caption="Committed / verify steps in each range; ranges of few steps scatter.",
                )
            )
    return charts


def _by_depth(row: BenchRow, name: str) -> list[tuple[float, float, Interval]]:
    accepted, steps = row.acceptance["accepted_per_depth"], row.acceptance["steps_per_depth"]
    reached = steps if name == "acceptance_per_depth" else None
    curve: list[tuple[float, float, Interval]] = []
    for index, rate in enumerate(row.acceptance[name]):
        if rate is None:
            continue
        # of the conditional rate, the record holds the rate and its numerator
        trials = reached[index] if reached else (accepted[index] / rate if rate else None)
        curve.append((float(index + 1), rate, wilson(rate, trials) if trials else None))
    return curve


def wilson(rate: float, trials: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of `trials`."""
    assert trials > 0, "a share has trials"
    square = _Z * _Z / trials
    middle = (rate + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials))
    return middle - half, middle + half


def by_category(row: BenchRow) -> dict[str, tuple[float, Interval]]:
    """Acceptance length of every category, with an interval where the record has its prompts."""
    found: dict[str, tuple[float, Interval]] = {}
    for name, length in row.acceptance["acceptance_length_by_category"].items():
        if length is None:
            continue
        counts: dict[str, list[float]] = {}
        for answer in row.answers:
            if answer["category"] == name and answer["verify_steps"]:
                both = counts.setdefault(answer["id"], [0.0, 0.0])
                both[0] += answer["committed"]
                both[1] += answer["verify_steps"]
        columns = list(zip(*counts.values(), strict=True)) or [(), ()]
        found[name] = (length, ratio_interval(columns[0], columns[1]))
    return found


def _by_bucket(row: BenchRow, name: str) -> list[tuple[int, str, float]]:
    curve = []
    for bucket in row.acceptance.get(name) or ():
        if bucket["acceptance_length"] is not None:
            end = bucket["to"]
            text = f"{bucket['from']}+" if end is None else f"{bucket['from']}-{end - 1}"
            curve.append((bucket["from"], text, bucket["acceptance_length"]))
    return curve


def pair(interval: Any) -> Interval:
    """An interval as a record holds it, as a pair."""
    return None if interval is None else (float(interval[0]), float(interval[1]))
