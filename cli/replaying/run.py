"""One replay of conversations: the two engines, the figures and the record.

Owns what the figures mean. The two engines share the target's weights; see `specdec.cli.replaying.turns` for
how the conversations go.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec.cli.bootstrap import ratio_interval
from specdec.cli.console import format_interval, print_table, progress, say
from specdec.cli.datasets import load_prompts, prompt_file
from specdec.cli.outputs import require_not_input, require_own_result, require_writable
from specdec.cli.replaying.turns import Conversation, Turn, answer_batch, conversations_of, replay_turns
from specdec.cli.shapes import parse_shape
from specdec.cli.usage import flags_of, named_flags, usage_errors
from specdec.config import EngineConfig, SpecConfig
from specdec.drafts import check_spelling
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.provenance import RunRecord, sha256_file, write_json_atomic
from specdec.sequence import SamplingParams
from specdec.stats import SpecStats

SCHEMA = "specdec.replay/1"
DEFINITIONS: dict[str, str] = {
    "repeated_tokens": "prompt tokens of later turns that the same conversation had before, by token id: the "
    "beginning that a prompt shares with the prompt and answer of the turn before",
    "recomputed_tokens": "those of them that the engine with the cache computed again; the last token of an "
    "answer never had a KV row, so one a turn is the least",
    "recomputed_share": "recomputed_tokens / repeated_tokens",
    "rendered_differently": "turns whose prompt leaves the text of the turn before: the answer, tokenised "
    "again, has other token ids than were generated",
    "ttft": "seconds from a batch's arrival to a request's first token; medians over later turns",
    "ttft_ratio": "summed ttft of later turns, with the cache over without; 95 % interval over batches",
    "identical": "turns whose token ids are the same with and without the cache",
}


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """What to replay; the fields are the options of `specdec replay`."""

    target: str
    draft: str
    shape: str
    data: str
    limit: int
    turns: int
    max_tokens: int
    batch_size: int
    temperature: float
    seed: int
    adaptive: bool
    block_size: int
    kv_tokens: int | None
    out: Path | None

    def engine_config(self) -> EngineConfig:
        """Of the engine with the cache.

        Raises:
            UsageError: a value out of range, by its flag.
        """
        with usage_errors(flags_of({"block_size": 0, "kv_tokens": 0}, {"max_num_seqs": "--batch-size"})):
            return EngineConfig(
                block_size=self.block_size,
                kv_tokens=self.kv_tokens,
                max_num_seqs=self.batch_size,
                spec=parse_shape(self.shape, SpecConfig(adaptive=self.adaptive)),
            )


def figures_of(turns: list[Turn]) -> dict[str, Any]:
    """The figures of `DEFINITIONS`."""
    later = [turn for turn in turns if turn.number > 1]
    repeated = sum(turn.repeated for turn in later)
    recomputed = sum(turn.recomputed for turn in later)
    totals = {"warm": SpecStats(), "cold": SpecStats()}
    for turn in turns:
        totals["warm"].add(turn.warm.stats)
        totals["cold"].add(turn.cold.stats)
    lengths = {side: total.acceptance_length for side, total in totals.items()}
    # what is answered together waits for one another
    together: dict[int, list[Turn]] = {}
    for turn in later:
        together.setdefault(turn.batch, []).append(turn)
    warm = [sum(turn.warm.ttft_s for turn in batch) for batch in together.values()]
    cold = [sum(turn.cold.ttft_s for turn in batch) for batch in together.values()]
    both = lengths["warm"] is not None and lengths["cold"] is not None
    return {
        "conversations": len({turn.id for turn in turns}),
        "turns": len(turns),
        "later_turns": len(later),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "cached_tokens": sum(turn.warm.cached for turn in turns),
        "repeated_tokens": repeated,
        "recomputed_tokens": recomputed,
        "recomputed_share": recomputed / repeated if repeated else None,
        "rendered_differently": sum(turn.rendered_differently for turn in later),
        "identical": sum(turn.warm.token_ids == turn.cold.token_ids for turn in turns),
        "tokens": sum(len(turn.warm.token_ids) for turn in turns),
        "acceptance_length_warm": lengths["warm"],
        "acceptance_length_cold": lengths["cold"],
        "acceptance_difference": (lengths["warm"] or 0.0) - (lengths["cold"] or 0.0) if both else None,
        "ttft_warm_s": median(turn.warm.ttft_s for turn in later),
        "ttft_cold_s": median(turn.cold.ttft_s for turn in later),
        "ttft_ratio": sum(warm) / sum(cold),
        "ttft_ratio_interval": ratio_interval(warm, cold),
        "acceptance_warm": totals["warm"].to_dict(),
        "acceptance_cold": totals["cold"].to_dict(),
    }


def run_replay(plan: ReplayPlan) -> dict[str, Any]:
    """Replay, print the table, write `--out`; returns the summary for the JSON line."""
    config = plan.engine_config()
    with usage_errors({"temperature": "--temperature"}):
        params = SamplingParams(max_tokens=plan.max_tokens, temperature=plan.temperature)
    check_spelling(plan.draft)
    prompts = load_prompts(plan.data)
    talks = conversations_of(prompts, plan.limit, plan.turns, plan.seed)
    if plan.out is not None:
        require_writable("--out", plan.out)
        require_not_input("--out", plan.out, {"--data": prompt_file(plan.data)})
        require_own_result("--out", plan.out, "replay")
    with named_flags({"kv_tokens": "--kv-tokens"}):
        warm = Engine(plan.target, draft=plan.draft, config=config)
    _require_room(warm, talks, plan)
    # enough for a batch of the longest, since it keeps nothing
    rows = plan.batch_size * (warm.max_model_len + config.block_size)
    cold_rows = min(rows, warm.blocks.num_blocks * config.block_size)
    cold = Engine(warm, draft=plan.draft, config=replace(config, prefix_cache=False, kv_tokens=cold_rows))
    # an uncounted answer each, so that the first turn pays for no compiling
    for engine in (cold, warm):
        answer_batch(engine, [([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))])
    with progress("turns", len(talks) * plan.turns) as bar:
        turns = replay_turns(warm, cold, talks, params, plan.batch_size, bar.advance)
    assert warm.prefixes is not None, "the warm engine keeps prefixes"
    figures = figures_of(turns)
    summary = {
        "schema": SCHEMA,
        "target": plan.target,
        "draft": plan.draft,
        "shape": plan.shape,
        "data": plan.data,
        **figures,
        "blocks_given_up": warm.prefixes.counts.evicted,
        "blocks_copied": warm.prefixes.counts.copied,
    }
    _print(plan, figures)
    if plan.out is not None:
        write_json_atomic(plan.out, {**summary, **_details(plan, warm, turns)})
        say(f"written: {plan.out}")
    return summary


def _require_room(engine: Engine, talks: list[Conversation], plan: ReplayPlan) -> None:
    """Refuse conversations that may outgrow context or pool, before the first is answered."""
    room = min(engine.max_model_len, engine.blocks.num_blocks * plan.block_size)
    for talk in talks:
        asked = sum(len(engine.encoder.encode([{"role": "user", "content": ask}])) for ask in talk.asks)
        # rendered again, an answer may have more tokens than it was written with
        longest = asked + 2 * plan.max_tokens * plan.turns
        if longest > room:
            raise UsageError(
                f"--turns ({plan.turns}): conversation {talk.id} may have {longest} tokens, context and KV "
                f"pool hold {room}; fewer --turns or --max-tokens, or another --kv-tokens"
            )


def _details(plan: ReplayPlan, engine: Engine, turns: list[Turn]) -> dict[str, Any]:
    record = RunRecord.collect(
        dtype=engine.config.dtype,
        seeds={"sampling": plan.seed},
        template_hash=engine.encoder.template_hash,
        data_hash=sha256_file(prompt_file(plan.data)),
        defaults={
            "limit": plan.limit,
            "turns": plan.turns,
            "max_tokens": plan.max_tokens,
            "batch_size": plan.batch_size,
            "temperature": plan.temperature,
            "adaptive": plan.adaptive,
            "block_size": plan.block_size,
            "pool_tokens": engine.blocks.num_blocks * plan.block_size,
            "threads": torch.get_num_threads(),
            "weights": engine.config.weights,
            "draft_weights": engine.config.resolved_draft_weights,
        },
    )
    return {
        "run": record.to_dict(),
        "definitions": DEFINITIONS,
        "per_turn": [turn.to_dict() for turn in turns],
    }


def _print(plan: ReplayPlan, figures: dict[str, Any]) -> None:
    title = (
        f"{plan.target} with {plan.draft} {plan.shape}: {figures['conversations']} conversations x "
        f"{plan.turns} turns x {plan.max_tokens} tokens, batch {plan.batch_size}"
    )
    rows = [
        ("repeated prompt tokens of later turns", figures["repeated_tokens"], None),
        ("computed again, with the cache", figures["recomputed_tokens"], None),
        ("share computed again", figures["recomputed_share"], None),
        ("identical texts, of", f"{figures['identical']}/{figures['turns']}", None),
        ("acceptance length, with the cache", figures["acceptance_length_warm"], None),
        ("acceptance length, without", figures["acceptance_length_cold"], None),
        ("seconds to the first token, later turns, with the cache", figures["ttft_warm_s"], None),
        ("seconds to the first token, later turns, without", figures["ttft_cold_s"], None),
        ("the one over the other", figures["ttft_ratio"], format_interval(figures["ttft_ratio_interval"])),
    ]
    print_table(title, ["figure", "value", "interval"], [list(row) for row in rows])
