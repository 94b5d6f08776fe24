"""Figures of a load sweep from its turns: throughput by setting, ratios with intervals, the best fixed one.

Pure arithmetic on the turns' records. A ratio is tokens per second over tokens per second on the same turns
of both settings, which answer the same requests; its interval is a bootstrap over turns. The best fixed
setting is chosen by the figures it is then compared with, so it flatters itself by chance: few turns make it
look better than it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.cli.bootstrap import speedup_interval
from specdec.cli.load_sweeping.turns import ADAPTIVE, OFF

DEFINITIONS = {
    "tokens_per_second": "tokens of all answers / seconds, over all turns of the setting at this point",
    "over_off": "tokens per second over those without speculation on the same turns (same requests)",
    "cpu_over_off": "the same with the process's processor seconds, which other programs move less",
    "interval": "95 % bootstrap over turns; null with one turn",
    "best_fixed": "the fixed setting with most tokens per second here, none at all (off) being one of them",
    "rows_per_token": "rows of the target's passes, prompts not counted, per token of the answers",
    "identical": "answers that are token for token those without speculation",
}

Turns = Mapping[int, Mapping[str, Any]]


def ratio(ours: Turns, theirs: Turns, clock: str = "seconds") -> dict[str, Any] | None:
    """Tokens per second over another setting's, on the turns that both have."""
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return None
    columns = (
        [ours[turn]["tokens"] for turn in both],
        [ours[turn][clock] for turn in both],
        [theirs[turn]["tokens"] for turn in both],
        [theirs[turn][clock] for turn in both],
    )
    tokens, seconds, their_tokens, their_seconds = map(sum, columns)
    return {
        "value": tokens / seconds / (their_tokens / their_seconds),
        "interval": speedup_interval(*columns),
        "turns": len(both),
    }


def point_figures(by_setting: Mapping[str, Turns]) -> dict[str, Any]:
    """One point's figures: every setting's, and the adaptive one's beside off and the best fixed one."""
    off = by_setting[OFF]
    settings = {name: _setting(turns, off) for name, turns in by_setting.items() if turns}
    fixed = {name: turns for name, turns in by_setting.items() if turns and name != ADAPTIVE}
    best = max(fixed, key=lambda name: _speed_like_off(fixed[name], off))
    adaptive = by_setting[ADAPTIVE]
    return {
        "settings": settings,
        "best_fixed": best,
        "adaptive_over_off": ratio(adaptive, off),
        "adaptive_over_best_fixed": ratio(adaptive, fixed[best]),
    }


def is_slower(turns: Turns, others: Sequence[Turns], factor: float) -> bool:
    """Whether a setting has less than `factor` of the best other one's tokens per second."""
    return any(
        found is not None and found["value"] < factor for found in (ratio(turns, other) for other in others)
    )


def _speed_like_off(turns: Turns, off: Turns) -> float:
    found = ratio(turns, off)
    return 0.0 if found is None else float(found["value"])


def _setting(turns: Turns, off: Turns) -> dict[str, Any]:
    def total(name: str) -> float:
        return sum(turn[name] for turn in turns.values())

    same = [
        mine == off[turn]["text_hashes"].get(prompt)
        for turn, record in turns.items()
        if turn in off
        for prompt, mine in record["text_hashes"].items()
    ]
    steps = total("verify_steps")
    return {
        "turns": len(turns),
        "requests": total("requests"),
        "tokens": total("tokens"),
        "tokens_per_second": total("tokens") / total("seconds"),
        "over_off": ratio(turns, off),
        "cpu_over_off": ratio(turns, off, "cpu_seconds"),
        "acceptance_length": (total("tokens") - total("requests")) / steps if steps else None,
        "drafted_per_verify_step": total("drafted") / steps if steps else None,
        "rows_per_token": (steps + total("drafted")) / total("tokens"),
        "probes": total("probes"),
        "identical": sum(same),
        "compared": len(same),
    }
