"""All prompt sets of a bench together: one row for each setting at each batch size and temperature.

Owns the pooling: sums over all answers, so that a long answer weighs more than a short one and a large set
more than a small one. One cell of a grid holds few prompts; what a setting is worth is read here. Works on
the record alone, so that points of an earlier run count too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from specdec.cli.bootstrap import ratio_interval, speedup_interval

Answer = Mapping[str, Any]


def pooled_rows(
    rows: Sequence[Mapping[str, Any]], answers: Mapping[str, Sequence[Answer]]
) -> list[dict[str, Any]]:
    """Rows over all sets; none where there is one set alone.

    Args:
        rows: figures of every setting at every point.
        answers: one record an answer, by setting.
    """
    if len({row["data"] for row in rows}) < 2:
        return []
    cells: dict[tuple[str, float, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["setting"], row["temperature"], row["batch_size"]), []).append(row)
    return [_pooled(found, rows, answers) for found in cells.values()]


def _pooled(
    found: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    answers: Mapping[str, Sequence[Answer]],
) -> dict[str, Any]:
    first = found[0]
    mine = _answers_at(first, answers[first["setting"]])
    tokens, seconds = _speeds(mine)
    counts = {name: sum(row["acceptance"][name] for row in found) for name in ("committed", "verify_steps")}
    accepted = sum(row["acceptance"]["accepted"] for row in found)
    depths = sum(sum(row["acceptance"]["steps_per_depth"]) for row in found)
    prompts = _sums(mine, ("data", "id"), ("committed", "verify_steps"))
    stepped = [(top, bottom) for top, bottom in prompts.values() if bottom]
    figures: dict[str, Any] = {
        **{name: first[name] for name in ("setting", "draft", "shape", "temperature", "batch_size")},
        "rule": first["rule"],
        "lossless": all(row["lossless"] for row in found),
        "data": [row["data"] for row in found],
        "prompts": len(prompts),
        "answers": len(mine),
        "tokens": sum(tokens.values()),
        "tokens_per_second": sum(tokens.values()) / sum(seconds.values()),
        "acceptance_length": counts["committed"] / counts["verify_steps"] if counts["verify_steps"] else None,
        "acceptance_length_interval": ratio_interval(*zip(*stepped, strict=True)) if stepped else None,
        "acceptance_rate": accepted / depths if depths else None,
    }
    if "baseline" not in first:
        return figures
    figures["baseline"] = first["baseline"]
    base = _answers_at(first, answers[first["baseline"]])
    base_tokens, base_seconds = _speeds(base)
    keys = [key for key in tokens if key in base_tokens]
    columns = [
        [float(column[key]) for key in keys] for column in (tokens, seconds, base_tokens, base_seconds)
    ]
    factor = (sum(columns[0]) / sum(columns[1])) / (sum(columns[2]) / sum(columns[3]))
    name = "speedup" if "speedup" in first else "relative"
    figures[name], figures[f"{name}_interval"] = factor, speedup_interval(*columns)
    if all("identical" in row for row in found):
        figures["identical"] = sum(row["identical"] for row in found)
    if any("simulated" in row for row in found):
        figures["simulated"] = True
    return figures


def _answers_at(row: Mapping[str, Any], answers: Sequence[Answer]) -> list[Answer]:
    return [one for one in answers if all(one[name] == row[name] for name in ("temperature", "batch_size"))]


def _speeds(answers: Sequence[Answer]) -> tuple[dict[Any, int], dict[Any, float]]:
    """Tokens and seconds of each batch of each set."""
    tokens: dict[Any, int] = {}
    seconds: dict[Any, float] = {}
    for one in answers:
        key = (one["data"], one["batch"])
        tokens[key] = tokens.get(key, 0) + one["tokens"]
        seconds[key] = seconds.get(key, 0.0) + median(one["seconds"])
    return tokens, seconds


def _sums(
    answers: Sequence[Answer], key: Sequence[str], names: Sequence[str]
) -> dict[tuple[Any, ...], list[int]]:
    found: dict[tuple[Any, ...], list[int]] = {}
    for one in answers:
        sums = found.setdefault(tuple(one[name] for name in key), [0] * len(names))
        for index, name in enumerate(names):
            sums[index] += one[name]
    return found
