"""Acceptance by category, by place in the answer and by length of context, and latencies, from watched steps.

Owns the buckets' edges and the arithmetic; what each figure means is in `bench_figures.DEFINITIONS`. A bucket
without a step is left out, so that no rate has a denominator of zero without being null.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

from specdec.cli.benching.measure import BenchPrompt, Measured
from specdec.cli.benching.observe import Commit
from specdec.cli.bootstrap import ratio_interval
from specdec.cli.loading.figures import distribution
from specdec.stats import SpecStats

# first numbers of the buckets: each about as wide as all before it, since effects go with the logarithm
POSITIONS = (0, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
MS = 1000.0


def acceptance_figures(
    answers: Sequence[Measured], rows: Sequence[BenchPrompt], groups: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Counts and rates of one setting.

    Args:
        answers: one of each row.
        rows: the prompts.
        groups: rows of each conversation, which intervals resample.
    """
    total = _total(one.stats for one in answers)
    grouped = [_total(answers[index].stats for index in group) for group in groups]
    lengths = [one.stats.acceptance_length for one in answers]
    known = [length for length in lengths if length is not None]
    categories: dict[str, list[SpecStats]] = {}
    for one, row in zip(answers, rows, strict=True):
        categories.setdefault(row.category, []).append(one.stats)
    by_category = {name: _total(found) for name, found in categories.items()}
    steps = [commit for one in answers for commit in one.commits if commit.is_verify]
    return {
        **total.to_dict(),
        "acceptance_length_interval": _interval(
            grouped, lambda one: one.committed, lambda one: one.verify_steps
        ),
        "acceptance_rate_interval": _interval(
            grouped, lambda one: one.accepted, lambda one: sum(one.steps_per_depth)
        ),
        "acceptance_length_mean_of_answers": mean(known) if known else None,
        "accepted_per_step": _ratio(total.accepted, total.verify_steps),
        "first_tokens": sum(
            commit.tokens for one in answers for commit in one.commits if not commit.is_verify
        ),
        "acceptance_length_by_category": {
            name: found.acceptance_length for name, found in by_category.items()
        },
        "by_category": [
            {"category": name, "answers": len(categories[name]), **_counts(found)}
            for name, found in by_category.items()
        ],
        "by_position": _buckets(steps, POSITIONS, lambda commit: commit.position),
        "by_context": _buckets(steps, CONTEXTS, lambda commit: commit.context),
    }


def latency_figures(answers: Sequence[Measured]) -> dict[str, Any] | None:
    """Distributions of TTFT, TPOT, ITL and end to end; None where steps were not watched."""
    watched = [one.commits for one in answers if one.commits]
    if not watched:
        return None
    gaps = [
        (later.at_s - earlier.at_s, later.tokens)
        for commits in watched
        for earlier, later in itertools.pairwise(commits)
    ]
    return {
        "ttft_ms": distribution([commits[0].at_s * MS for commits in watched]),
        "tpot_ms": distribution([time_per_token_ms(commits) for commits in watched]),
        "itl_ms": distribution([gap * MS for gap, _ in gaps]),
        "itl_token_ms": distribution([gap * MS / tokens for gap, tokens in gaps for _ in range(tokens)]),
        "e2el_ms": distribution([commits[-1].at_s * MS for commits in watched]),
    }


def time_per_token_ms(commits: Sequence[Commit]) -> float | None:
    """Time per output token after the first; None for an answer of one token."""
    later = sum(commit.tokens for commit in commits) - 1
    return (commits[-1].at_s - commits[0].at_s) * MS / later if later else None


def _buckets(
    steps: Sequence[Commit], edges: Sequence[int], place: Callable[[Commit], int]
) -> list[dict[str, Any]]:
    found = []
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        inside = [step for step in steps if low <= place(step) and (high is None or place(step) < high)]
        if not inside:
            continue
        verify_steps, depths = len(inside), sum(step.depths for step in inside)
        committed, accepted = (
            sum(step.tokens for step in inside),
            sum(step.accepted for step in inside),
        )
        found.append(
            {
                "from": low,
                "to": high,
                "verify_steps": verify_steps,
                "drafted": sum(step.drafted for step in inside),
                "depths_drafted": depths,
                "accepted": accepted,
                "committed": committed,
                "acceptance_length": committed / verify_steps,
                "acceptance_rate": _ratio(accepted, depths),
            }
        )
    return found


def _counts(stats: SpecStats) -> dict[str, Any]:
    return {
        "verify_steps": stats.verify_steps,
        "drafted": stats.drafted,
        "depths_drafted": sum(stats.steps_per_depth),
        "accepted": stats.accepted,
        "committed": stats.committed,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
    }


def _total(parts: Iterable[SpecStats]) -> SpecStats:
    total = SpecStats()
    for one in parts:
        total.add(one)
    return total


def _interval(
    grouped: Sequence[SpecStats], top: Callable[[SpecStats], int], bottom: Callable[[SpecStats], int]
) -> tuple[float, float] | None:
    counted = [one for one in grouped if bottom(one)]
    return ratio_interval([top(one) for one in counted], [bottom(one) for one in counted])


def _ratio(top: int, bottom: int) -> float | None:
    return top / bottom if bottom else None
