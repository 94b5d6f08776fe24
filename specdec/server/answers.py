"""What a response says beside text: usage, speculation, finish reasons, and the frame of every object.

Owns the names under which a request's own counts are reported; they are those of `specdec.stats`, with vLLM's
spellings beside them. The sums of `usage` and of `metrics.speculative_decoding` over responses are the
counters of `/metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from specdec.requests import GenerationResult, verification_fields
from specdec.sampling import TARGET_FAULT
from specdec.server.problems import Problem, bad_field, engine_failed
from specdec.stats import SpecStats

# the runtime's reasons in OpenAI's words; what is not listed is an error
_FINISH = {"stop": "stop", "length": "length", "timeout": "timeout", "abort": "abort"}


def finish_reason(result: GenerationResult) -> str:
    """The reason a choice ended.

    Raises:
        Problem: it ended with an error; 400 when the request's own constraints or grammar left no token.
    """
    if result.error is None:
        return _FINISH.get(result.finish_reason, result.finish_reason)
    raise problem_of(result.error)


def problem_of(error: str) -> Problem:
    """What a sequence's own error is to its client."""
    if error == TARGET_FAULT:
        return engine_failed(error)
    return bad_field(None, error, "generation_failed")


def usage(results: Sequence[GenerationResult], num_choices: int, cached: int = 0) -> dict[str, Any]:
    """OpenAI's `usage`; a prompt counts once, however many choices it has."""
    prompts = sum(len(result.prompt_token_ids) for result in results[::num_choices])
    return usage_of(prompts, sum(len(result.token_ids) for result in results), cached)


def usage_of(prompt_tokens: int, completion_tokens: int, cached: int = 0) -> dict[str, Any]:
    """OpenAI's `usage` of counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """`metrics` of a response: how its choices were speculated and verified, all together."""
    total = SpecStats()
    for result in results:
        total.add(result.stats)
    drafts = total.steps_per_depth[0] if total.steps_per_depth else 0
    return {
        "speculative_decoding": {
            **total.to_dict(),
            **verification_fields(results),
            "lossy": any(not result.lossless for result in results),
            "rules": sorted({result.rule for result in results}),
            "seeds": [result.seed for result in results],
            # vLLM's names; its mean length is ours, bonus token included
            "mean_acceptance_length": total.acceptance_length,
            "draft_acceptance_rate": total.acceptance_rate_per_node,
            "num_spec_steps": drafts,
            "acceptance_histogram": _histogram(drafts, total.accepted_per_depth),
            "num_draft_tokens": total.drafted,
            "num_accepted_draft_tokens": total.accepted,
        }
    }


def _histogram(drafts: int, accepted_per_depth: list[int]) -> list[int]:
    """Entry j: steps with a draft that accepted exactly j of its tokens."""
    at_least = [drafts, *accepted_per_depth, 0]
    return [here - deeper for here, deeper in pairwise(at_least)] if drafts else []
