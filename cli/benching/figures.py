"""From measured answers to the figures of one setting: speed, spread, identity, and what they mean.

Owns the arithmetic over answers (`DEFINITIONS` says what each figure is) and the rows of a record. Acceptance
by bucket and latencies are made in `bench_buckets.py`, counts in `specdec.stats`. Intervals of counts
resample conversations, the turns of one not being independent; those of speeds resample batches, whose
answers share one time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from specdec.cli.benching.buckets import acceptance_figures, latency_figures
from specdec.cli.benching.measure import PLAIN, BenchPrompt, Interleaved, Measured
from specdec.cli.bootstrap import ratio_interval, speedup_interval
from specdec.stats import DEFINITIONS as COUNT_DEFINITIONS

DEFINITIONS = {
    **COUNT_DEFINITIONS,
    "accepted_per_step": "accepted / verify_steps: drafted tokens a step keeps, without the target's own one",
    "acceptance_length_mean_of_answers": "mean over answers of each one's acceptance length",
    "first_tokens": "tokens that the passes ending a prompt add; tokens = committed + first_tokens",
    "by_position": "steps by the number of answer tokens before them: from <= number < to",
    "by_context": "steps by the tokens of prompt and answer before them: from <= number < to",
    "intervals": "95 % percentile bootstrap: of counts over prompts, all turns of one together; of "
    "speeds over batches, which share their time (at batch 1 that is over prompts); null with fewer than two",
    "seconds": "time of a batch, prompts read, shared equally by its answers; medians over repeats, summed",
    "tokens_per_second": "tokens / seconds",
    "decode_tokens_per_second": "tokens that came after the first token of every answer of their batch / the "
    "time since then",
    "total_tokens_per_second": "(prompt_tokens + tokens) / seconds",
    "ttft_ms": "time to first token: batch asked for to the first token of the answer",
    "tpot_ms": "time per output token after the first: (e2el - ttft) / (tokens - 1); one-token answers left "
    "out",
    "itl_ms": "gap between two steps that add tokens to an answer; a step may add several",
    "itl_token_ms": "the same gap over the tokens of its later step, once for each of them",
    "e2el_ms": "end to end: batch asked for to the last token of the answer",
    "step_time": "share of wall time: draft (proposing), verify (target passes, prompts included), sample "
    "(rows of logits that rules ask for, rules, draws), commit (moving rows, writing tokens down), host "
    "(scheduling and the rest)",
    "energy": "what the card drew while the setting decoded, by its driver's counter, with other work on it",
    "warm_up": "short answers before the first measured one at that batch size and temperature, in no figure",
    "lossless": "the rule leaves a text the law it has without drafts, that of conditions.exact_against",
    "repeats": "times every answer is written; each time engines begin with nothing known of acceptance",
    "pooled": "all prompt sets together: sums over all answers; intervals over prompts (counts) and batches "
    "(speeds) of all sets",
    "paired_lengths": "acceptance length of a drafter minus that of the first one in the same shape under "
    "the same rule; interval over prompts, the same ones drawn for both; detectable: the difference that "
    "would have been seen at 5 % (two-sided) with a power of 80 %",
    "speedup": "tokens_per_second over that of `baseline`: the same engine without speculation, same "
    "prompts, lengths, dtype and batch, interleaved; below 1 is slower",
    "decode_speedup": "decode_tokens_per_second over that of `baseline`",
    "relative": "tokens_per_second of another engine over that of `baseline`",
    "identical": "answers whose tokens are those of `baseline`, one by one",
    "equal_lengths": "answers with as many tokens as those of `baseline`",
    "repeatability": "each repeat as a run of its own; within_interval: repeats whose speedup lies in the "
    "printed interval; within_width: repeats whose speedup differs from the next one's by less than "
    "their own interval is wide",
}
MS = 1000.0


def row_figures(
    name: str,
    run: Interleaved,
    *,
    baseline: str = PLAIN,
    same_engine: bool = True,
) -> dict[str, Any]:
    """Figures of one setting; speed-up and identity against `baseline`, paired by answer.

    A setting of simulated acceptance says so, and is compared in speed only. Another engine has no speed-up:
    its speed is `relative`.
    """
    repeated, rows = run.results[name], run.rows
    # tokens and counts are those of the first repeat (greedy text repeats; sampled text is seeded)
    first = [repeats[0] for repeats in repeated]
    tokens = [float(len(one.token_ids)) for one in first]
    seconds = _medians(repeated, lambda one: one.seconds)
    decoded = [float(one.decode_tokens) for one in first]
    decode_seconds = _medians(repeated, lambda one: one.decode_seconds)
    prompt_tokens = sum(len(row.token_ids) for row in rows)
    groups, batches = conversations(rows), batches_of(run)
    total = sum(seconds)
    figures: dict[str, Any] = {
        "setting": name,
        "rule": first[0].rule,
        "lossless": all(one.lossless for one in first),
        "prompts": len(groups),
        "answers": len(rows),
        "tokens": int(sum(tokens)),
        "prompt_tokens": prompt_tokens,
        "seconds": total,
        "tokens_per_second": sum(tokens) / total,
        "tokens_per_second_interval": ratio_interval(grouped(tokens, batches), grouped(seconds, batches)),
        "decode_tokens_per_second": _ratio(sum(decoded), sum(decode_seconds)),
        "total_tokens_per_second": (prompt_tokens + sum(tokens)) / total,
        "answers_per_second": len(rows) / total,
        "acceptance": acceptance_figures(first, rows, groups),
        "latency": latency_figures([one for repeats in repeated for one in repeats]),
        "step_time": step_time([one for repeats in repeated for one in repeats]),
        "energy": energy(first),
        "repeats": len(repeated[0]),
        "warm_up": {
            "answers": len(run.warm_up[name]),
            "tokens": sum(len(one.token_ids) for one in run.warm_up[name]),
        },
    }
    if name == baseline:
        return figures
    base = run.results[baseline]
    base_first = [repeats[0] for repeats in base]
    base_tokens = [float(len(one.token_ids)) for one in base_first]
    base_seconds = _medians(base, lambda one: one.seconds)
    columns = (tokens, seconds, base_tokens, base_seconds)
    key = "speedup" if same_engine else "relative"
    figures["baseline"] = baseline
    figures[key] = _speedup(*columns)
    figures[f"{key}_interval"] = speedup_interval(*(grouped(column, batches) for column in columns))
    figures["equal_lengths"] = sum(
        len(a.token_ids) == len(b.token_ids) for a, b in zip(first, base_first, strict=True)
    )
    if same_engine:
        figures["speedup_by_category"] = {
            category: _speedup(*(_pick(column, chosen) for column in columns))
            for category, chosen in by_category(rows).items()
        }
        decode = (
            decoded,
            decode_seconds,
            [float(one.decode_tokens) for one in base_first],
            _medians(base, lambda one: one.decode_seconds),
        )
        known = all(sum(column) > 0 for column in decode)
        figures["decode_speedup"] = _speedup(*decode) if known else None
        figures["decode_speedup_interval"] = (
            speedup_interval(*(grouped(column, batches) for column in decode)) if known else None
        )
        if figures["repeats"] > 1:
            figures["repeatability"] = repeatability(run, name, baseline, figures["speedup_interval"])
    if any(one.simulated for one in first):
        figures["simulated"] = True
    else:
        figures["identical"] = sum(
            one.token_ids == other.token_ids for one, other in zip(first, base_first, strict=True)
        )
    return figures


def repeatability(
    run: Interleaved, name: str, baseline: str, printed: tuple[float, float] | None
) -> dict[str, Any]:
    """Every repeat as a run of its own: acceptance length, speed-up and the interval it would print."""
    mine, base = run.results[name], run.results[baseline]
    batches = batches_of(run)
    lengths, speedups, intervals = [], [], []
    for repeat in range(len(mine[0])):
        ours, theirs = ([repeats[repeat] for repeats in side] for side in (mine, base))
        steps = sum(one.stats.verify_steps for one in ours)
        lengths.append(_ratio(sum(one.stats.committed for one in ours), steps))
        columns = (
            [float(len(one.token_ids)) for one in ours],
            [one.seconds for one in ours],
            [float(len(one.token_ids)) for one in theirs],
            [one.seconds for one in theirs],
        )
        speedups.append(_speedup(*columns))
        intervals.append(speedup_interval(*(grouped(column, batches) for column in columns)))
    known = [length for length in lengths if length is not None]
    changes = [abs(one - other) for one, other in zip(speedups, [*speedups[1:], speedups[0]], strict=True)]
    return {
        "repeats": len(lengths),
        "acceptance_lengths": lengths,
        "acceptance_length_range": max(known) - min(known) if known else None,
        "identical_texts": sum(
            all(one.token_ids == repeats[0].token_ids for one in repeats) for repeats in mine
        ),
        "speedups": speedups,
        "speedup_intervals": intervals,
        "within_interval": sum(printed[0] <= value <= printed[1] for value in speedups) if printed else 0,
        "within_width": sum(
            found is not None and change < found[1] - found[0]
            for change, found in zip(changes, intervals, strict=True)
        ),
    }


def answer_records(name: str, run: Interleaved) -> list[dict[str, Any]]:
    """One record an answer, for the report's details."""
    return [
        {
            "id": row.id,
            "category": row.category,
            "turn": row.turn,
            "batch": batch,
            "prompt_tokens": len(row.token_ids),
            "tokens": len(repeats[0].token_ids),
            **({"finish_reason": reason} if (reason := repeats[0].finish_reason) else {}),
            "seconds": [round(one.seconds, 6) for one in repeats],
            "ttft_ms": [round(one.commits[0].at_s * MS, 1) if one.commits else None for one in repeats],
            "e2el_ms": [round(one.commits[-1].at_s * MS, 1) if one.commits else None for one in repeats],
            "verify_steps": repeats[0].stats.verify_steps,
            "committed": repeats[0].stats.committed,
            "accepted": repeats[0].stats.accepted,
            "drafted": repeats[0].stats.drafted,
        }
        for row, batch, repeats in zip(run.rows, run.batches, run.results[name], strict=True)
    ]


def conversations(rows: Sequence[BenchPrompt]) -> list[list[int]]:
    """Numbers of the rows of each conversation."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.id, []).append(index)
    return list(found.values())


def batches_of(run: Interleaved) -> list[list[int]]:
    """Numbers of the rows of each batch, with the turns that followed."""
    found: dict[int, list[int]] = {}
    for index, number in enumerate(run.batches):
        found.setdefault(number, []).append(index)
    return list(found.values())


def by_category(rows: Sequence[BenchPrompt]) -> dict[str, list[int]]:
    """Numbers of the rows of each category."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.category, []).append(index)
    return found


def step_time(answers: Sequence[Measured]) -> dict[str, Any] | None:
    """Shares of wall time by part; None where an engine does not tell."""
    parts = [one.parts for one in answers if one.parts is not None]
    total = sum(one.seconds for one in answers)
    if len(parts) != len(answers) or not total:
        return None
    seconds = {
        part: sum(getattr(one, part) for one in parts)
        for part in ("draft", "verify", "sample", "commit", "host")
    }
    return {
        "steps": round(sum(one.steps for one in parts)),
        "seconds": total,
        "shares": {part: value / total for part, value in seconds.items()},
    }


def energy(answers: Sequence[Measured]) -> dict[str, float] | None:
    """Energy of the card; None where none tells."""
    joules = [one.parts.joules if one.parts else None for one in answers]
    known = [value for value in joules if value is not None]
    if len(known) != len(answers):
        return None
    tokens = sum(len(one.token_ids) for one in answers)
    return {"joules": sum(known), "joules_per_token": sum(known) / tokens}


def _medians(repeated: Sequence[Sequence[Measured]], value: Callable[[Measured], float]) -> list[float]:
    return [median(value(one) for one in repeats) for repeats in repeated]


def grouped(column: Sequence[float], groups: Sequence[Sequence[int]]) -> list[float]:
    """Sums of a column over groups of rows."""
    return [sum(column[index] for index in group) for group in groups]


def _pick(column: Sequence[float], rows: Sequence[int]) -> list[float]:
    return [column[index] for index in rows]


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None


def _speedup(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
) -> float:
    """Tokens per second over the baseline's."""
    return (sum(tokens) / sum(seconds)) / (sum(base_tokens) / sum(base_seconds))
