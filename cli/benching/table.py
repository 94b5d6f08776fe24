"""A bench as a table for people. Owns titles, columns and the words for slower settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.cli.console import format_interval, print_table, say

_COORDINATES = {"data": "data", "temperature": "temp.", "batch_size": "batch"}


def print_bench(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print every setting's figures; what differs among points has a column.

    Args:
        title: target, lengths and machine.
        rows: of the record.
    """
    varied = {heading: name for name, heading in _COORDINATES.items() if len({row[name] for row in rows}) > 1}
    fixed = [
        text
        for name, text in (
            ("data", f"{rows[0]['data']}"),
            ("prompts", f"{rows[0]['prompts']} prompts"),
            ("temperature", f"temperature {rows[0]['temperature']:g}"),
            ("batch_size", f"batch {rows[0]['batch_size']}"),
        )
        if len({row[name] for row in rows}) == 1
    ]
    columns = [
        *varied,
        "setting",
        "rule",
        "accept length",
        "interval",
        "accept rate",
        "tokens/s",
        "decode t/s",
    ]
    columns += ["ttft ms", "tpot ms", "speedup", "interval", "identical"]
    print_table(
        f"{title}, {', '.join(fixed)}; speedup and identical against plain; latencies are medians; 95 % "
        "intervals",
        columns,
        [[*(row[name] for name in varied.values()), *_cells(row)] for row in rows],
    )
    for row in rows:
        if "repeatability" in row:
            say(f"{row['setting']}: {repeatability_sentence(row)}")


def print_pooled(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows over all prompt sets."""
    columns = ["temp.", "batch", "setting", "prompts", "accept length", "interval", "tokens/s"]
    columns += ["speedup", "interval", "identical"]
    print_table(
        f"{title}, all {len(rows[0]['data'])} prompt sets together; 95 % intervals",
        columns,
        [
            [
                row["temperature"],
                row["batch_size"],
                row["setting"],
                row["prompts"],
                row["acceptance_length"],
                format_interval(row["acceptance_length_interval"]),
                row["tokens_per_second"],
                *_factor(row),
            ]
            for row in rows
        ],
    )


def print_paired(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print drafters against each other over all sets that were measured; nothing where one drafts alone."""
    widest = max((len(row["data"]) for row in rows), default=0)
    shown = [row for row in rows if len(row["data"]) == widest]
    if shown:
        print_table(
            f"{title}, acceptance length against the first drafter in the same shape, paired by prompt; 95 % "
            "intervals",
            ["temp.", "batch", "setting", "against", "rule", "prompts", "difference", "interval"],
            [
                [
                    *(row[name] for name in ("temperature", "batch_size", "setting", "against", "rule")),
                    row["prompts"],
                    f"{row['value']:+.3f}",
                    "{:+.3f}..{:+.3f}".format(*row["interval"]),
                ]
                for row in shown
            ],
        )


def _factor(row: dict[str, Any]) -> list[Any]:
    """Speed-up, its interval and how many answers are identical."""
    factor = row.get("speedup", row.get("relative"))
    return [
        None if factor is None else times(factor),
        format_interval(row.get("speedup_interval", row.get("relative_interval"))),
        f"{row['identical']}/{row['answers']}" if "identical" in row else None,
    ]


def _cells(row: dict[str, Any]) -> list[Any]:
    acceptance, latency = row["acceptance"], row["latency"] or {}
    return [
        row["setting"],
        row["rule"] if row["lossless"] or "simulated" in row else f"{row['rule']}, lossy",
        acceptance["acceptance_length"],
        format_interval(acceptance["acceptance_length_interval"]),
        acceptance["acceptance_rate"],
        row["tokens_per_second"],
        row["decode_tokens_per_second"],
        *((latency.get(name) or {}).get("median") for name in ("ttft_ms", "tpot_ms")),
        *_factor(row),
    ]


def times(factor: float) -> str:
    """A factor of speed as people write it; below 1 it says so, whatever rounding makes of it."""
    if factor >= 1:
        return f"{factor:.3f}x"
    return f"{min(factor, 0.999):.3f}x slower"


def repeatability_sentence(row: dict[str, Any]) -> str:
    """What the repeats say about a setting."""
    found = row["repeatability"]
    count = found["repeats"]
    words = [f"{count} repeats", f"texts identical in {found['identical_texts']} of {row['answers']} answers"]
    if found["acceptance_length_range"] is not None:
        words.append(f"acceptance lengths differ by {found['acceptance_length_range']:g}")
    words.append(f"speedup inside the printed interval in {found['within_interval']} of {count}")
    words.append(f"closer to the next than its interval is wide in {found['within_width']} of {count}")
    return ", ".join(words)
