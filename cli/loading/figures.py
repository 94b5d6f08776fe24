"""From the records of a load to its figures, with vLLM's bench's names and meanings where it has the thing.

Owns the arithmetic and its definitions. Only whole answers are in latencies and throughputs; what failed is
counted beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec.cli.loading.drive import Load, LoadRecord

PERCENTILES = (50, 90, 95, 99)
MS = 1000.0
DEFINITIONS = {
    "ttft_ms": "time to first token: request sent to its first event with a choice",
    "tpot_ms": "time per output token after the first: (e2el - ttft) / (completion_tokens - 1); answers of "
    "one token are left out",
    "itl_ms": "gap between two events with a choice; an event may hold several tokens, so with speculation "
    "it is not tpot",
    "e2el_ms": "end to end: request sent to its last event with a choice",
    "percentiles": "numpy's linear interpolation; requests weigh alike in ttft, tpot and e2el, gaps in itl",
    "duration_s": "start of the load to the end of its last request",
    "request_throughput": "whole answers / duration_s",
    "output_throughput": "completion tokens of whole answers / duration_s, as the server's usage counts them",
    "total_token_throughput": "prompt and completion tokens of whole answers / duration_s",
    "request_goodput": "whole answers that meet every --goodput limit / duration_s",
    "in_flight": "mean number of requests under way: summed e2el / duration_s",
    "late_ms": "due time (arrival, or end of the pause) to sending: no client was free; in no latency",
    "failed_ms": "request sent to the refusal or failure, of those without a whole answer",
    "cached_tokens": "prompt tokens that the server took from its prefix cache, where it says so",
    "acceptance_length": "committed tokens / verify steps, as the server counts them for each request (vLLM: "
    "1 + accepted / steps, which counts drafts behind an end token)",
    "errors": "requests without a whole answer, by kind; the rest of their conversation is in unsent",
}


def figures_of(load: Load, *, requests: int, goodput: Mapping[str, float]) -> dict[str, Any]:
    """Figures of one load.

    Args:
        load: what came of it.
        requests: how many there would be if none failed.
        goodput: limits in ms by latency (`ttft`, `tpot`, `e2el`); empty for none.
    """
    whole = [record for record in load.records if record.error is None]
    latencies = [_latencies(record) for record in whole]
    prompt, written = (_sum(whole, name) for name in ("prompt_tokens", "completion_tokens"))
    seconds = load.duration_s
    good = sum(all((one[name] or 0.0) <= most for name, most in goodput.items()) for one in latencies)
    known = [record.cached_tokens for record in whole if record.cached_tokens is not None]
    return {
        "requests": requests,
        "completed": len(whole),
        "errors": dict(Counter(record.error for record in load.records if record.error is not None)),
        "unsent": requests - len(load.records),
        "duration_s": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(known) if known else None,
        "completion_tokens": written,
        "request_throughput": _rate(len(whole), seconds),
        "output_throughput": _rate(written, seconds),
        "total_token_throughput": _rate(prompt + written, seconds),
        "request_goodput": _rate(good, seconds) if goodput else None,
        "in_flight": _rate(sum(one["e2el"] or 0.0 for one in latencies) / MS, seconds),
        "ttft_ms": distribution([one["ttft"] for one in latencies]),
        "tpot_ms": distribution([one["tpot"] for one in latencies]),
        "itl_ms": distribution([gap * MS for record in whole for gap in record.gaps_s]),
        "e2el_ms": distribution([one["e2el"] for one in latencies]),
        "late_ms": distribution([record.late_s * MS for record in whole]),
        "failed_ms": distribution(
            [(one.failed_s - one.sent_s) * MS for one in load.records if one.failed_s is not None]
        ),
        "acceptance": acceptance_of(whole),
    }


def _latencies(record: LoadRecord) -> dict[str, float | None]:
    assert record.first_s is not None, "a whole answer has a first token"
    assert record.last_s is not None, "and a last one"
    tokens = record.completion_tokens or 0
    return {
        "ttft": (record.first_s - record.sent_s) * MS,
        "tpot": (record.last_s - record.first_s) * MS / (tokens - 1) if tokens > 1 else None,
        "e2el": (record.last_s - record.sent_s) * MS,
    }


def acceptance_of(records: Sequence[LoadRecord]) -> dict[str, Any] | None:
    """Summed counts of the requests whose server reports them; None when none does."""
    counts: Counter[str] = Counter()
    for record in records:
        one = record.speculation
        if one is None:
            continue
        if "verify_steps" in one:
            told = {name: one[name] for name in ("verify_steps", "drafted", "accepted", "committed")}
        elif one.get("num_spec_steps") is not None:
            steps, accepted = one["num_spec_steps"], one.get("num_accepted_draft_tokens") or 0
            drafted = one.get("num_draft_tokens") or 0
            told = {"verify_steps": steps, "drafted": drafted, "accepted": accepted}
            told["committed"] = steps + accepted
        else:
            continue
        counts.update({"requests": 1, **told})
    if not counts["requests"]:
        return None
    return {
        **dict(counts),
        "acceptance_length": _rate(counts["committed"], counts["verify_steps"]),
        "acceptance_rate_per_node": _rate(counts["accepted"], counts["drafted"]),
    }


def distribution(values: Sequence[float | None]) -> dict[str, float] | None:
    """Count, mean, deviation and percentiles of what is known; None of nothing."""
    known = np.asarray([value for value in values if value is not None], dtype=float)
    if not len(known):
        return None
    at = np.percentile(known, PERCENTILES)
    return {
        "n": len(known),
        "mean": float(known.mean()),
        "std": float(known.std()),
        "median": float(np.median(known)),
        **{f"p{percent}": float(value) for percent, value in zip(PERCENTILES, at, strict=True)},
    }


def _sum(records: Sequence[LoadRecord], name: str) -> int:
    return sum(getattr(record, name) or 0 for record in records)


def _rate(count: float, per: float) -> float | None:
    return count / per if per else None
