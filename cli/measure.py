"""Acceptance and speed of several settings on the same prompts, interleaved. The work behind `specdec bench`.

Every batch of prompts is decoded by every setting before the next batch, in an order that turns
round from batch to batch, so that a machine whose speed drifts treats all settings alike. The plain
setting (no speculation, same engine, same weights) is always measured beside the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.cli.bootstrap import ratio_interval, speedup_interval
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.sequence import SamplingParams
from specdec.stats import SpecStats

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """One prompt as token ids, with its name in the data set."""

    id: str
    category: str
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of decoding: a drafter's spelling and how it speculates; None is plain decoding.

    `rule` None verifies by the exact rule that suits.
    """

    name: str
    draft: str | None
    spec: SpecConfig | None
    rule: str | None = None
    knobs: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One prompt under one setting. `seconds` is the batch's time divided by its number of prompts.

    `rule` verified the drafts; not `lossless`: the text does not have the target's law; `simulated`: it means
    nothing, accepted lengths were drawn.
    """

    token_ids: list[int]
    seconds: float
    stats: SpecStats
    rule: str = "none"
    lossless: bool = True
    simulated: bool = False


Decode = Callable[[Sequence[BenchPrompt]], list[Measured]]


def engine_decoder(engine: Engine, params: Sequence[SamplingParams] | SamplingParams) -> Decode:
    """Decode a batch with an engine."""

    def decode(batch: Sequence[BenchPrompt]) -> list[Measured]:
        started = time.perf_counter()
        results = engine.generate([prompt.token_ids for prompt in batch], params)
        seconds = (time.perf_counter() - started) / len(batch)
        for prompt, result in zip(batch, results, strict=True):
            if result.error:
                raise SpecdecError(f"prompt {prompt.id}: {result.error}; nothing was measured")
        return [
            Measured(
                token_ids=r.token_ids,
                seconds=seconds,
                stats=r.stats,
                rule=r.rule,
                lossless=r.lossless,
                simulated=r.simulated,
            )
            for r in results
        ]

    return decode


def transformers_decoder(folder: str, params: SamplingParams) -> Decode:
    """Decode prompts one after the other with `transformers` `generate` (fp32, eager, greedy)."""
    import torch

    from specdec.hf import load_hf_model

    model = load_hf_model(folder)

    def decode(batch: Sequence[BenchPrompt]) -> list[Measured]:
        measured = []
        for prompt in batch:
            ids = torch.tensor([prompt.token_ids])
            mask = torch.ones_like(ids)
            started = time.perf_counter()
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=params.max_tokens, do_sample=False
            )
            seconds = time.perf_counter() - started
            tokens = output[0, len(prompt.token_ids) :].tolist()
            measured.append(Measured(token_ids=tokens, seconds=seconds, stats=SpecStats()))
        return measured

    return decode


def run_interleaved(
    decoders: dict[str, Decode],
    prompts: Sequence[BenchPrompt],
    *,
    batch_size: int,
    repeats: int,
    warm_up: int,
    on_progress: Callable[[int, str], None],
) -> dict[str, list[list[Measured]]]:
    """Decode every prompt with every decoder, `repeats` times.

    Returns:
        Per decoder one list of repeats for every prompt, in prompt order.
    """
    names = list(decoders)
    results: dict[str, list[list[Measured]]] = {name: [[] for _ in prompts] for name in names}
    batches = [range(i, min(i + batch_size, len(prompts))) for i in range(0, len(prompts), batch_size)]
    for _ in range(warm_up):
        for name in names:
            decoders[name]([prompts[i] for i in batches[0]])
    done = 0
    for repeat in range(repeats):
        for turn, batch in enumerate(batches):
            shift = (turn + repeat) % len(names)
            for name in names[shift:] + names[:shift]:
                measured = decoders[name]([prompts[i] for i in batch])
                for index, one in zip(batch, measured, strict=True):
                    results[name][index].append(one)
            done += len(batch)
            on_progress(done, f"repeat {repeat + 1} of {repeats}")
    return results


def summarise(
    name: str, results: dict[str, list[list[Measured]]], prompts: Sequence[BenchPrompt], baseline: str = PLAIN
) -> dict[str, Any]:
    """Figures of one setting; speedup and identity against `baseline`, paired by prompt.

    A setting of simulated acceptance says so, and is compared in speed only.
    """
    mine = results[name]
    # tokens and counts are those of the first repeat (greedy text repeats; sampled text is seeded)
    first = [repeats[0] for repeats in mine]
    seconds = [_median([one.seconds for one in repeats]) for repeats in mine]
    total = SpecStats()
    for one in first:
        total.add(one.stats)
    tokens = sum(len(one.token_ids) for one in first)
    figures: dict[str, Any] = {
        "setting": name,
        "rule": first[0].rule,
        "lossless": all(one.lossless for one in first),
        "prompts": len(prompts),
        "tokens": tokens,
        "tokens_per_second": tokens / sum(seconds),
        "acceptance": {
            **total.to_dict(),
            "acceptance_length_interval": _length_interval(first),
            "acceptance_length_by_category": _by_category(first, prompts),
        },
    }
    if name != baseline:
        base = results[baseline]
        base_seconds = [_median([one.seconds for one in repeats]) for repeats in base]
        mine_columns = [len(one.token_ids) for one in first], seconds
        base_columns = [len(repeats[0].token_ids) for repeats in base], base_seconds
        figures["speedup"] = _speedup(*mine_columns, *base_columns)
        figures["speedup_interval"] = speedup_interval(*mine_columns, *base_columns)
        figures["speedup_by_category"] = {
            category: _speedup(*(_pick(column, rows) for column in (*mine_columns, *base_columns)))
            for category, rows in _rows_by_category(prompts).items()
        }
        if any(one.simulated for one in first):
            figures["simulated"] = True
        else:
            same = [one.token_ids == other[0].token_ids for one, other in zip(first, base, strict=True)]
            figures["identical"] = sum(same)
    return figures


def per_prompt(
    name: str, results: dict[str, list[list[Measured]]], prompts: Sequence[BenchPrompt]
) -> list[dict[str, Any]]:
    """One record a prompt, for the report's details."""
    return [
        {
            "id": prompt.id,
            "category": prompt.category,
            "tokens": len(repeats[0].token_ids),
            "seconds": [round(one.seconds, 4) for one in repeats],
            "verify_steps": repeats[0].stats.verify_steps,
            "committed": repeats[0].stats.committed,
            "accepted": repeats[0].stats.accepted,
            "drafted": repeats[0].stats.drafted,
        }
        for prompt, repeats in zip(prompts, results[name], strict=True)
    ]


def make_decoders(
    target: str,
    settings: Sequence[Setting],
    params: SamplingParams,
    *,
    batch_size: int,
    max_prompt: int,
    engine_config: EngineConfig,
    simulate: float | None = None,
) -> tuple[Engine, dict[str, Decode]]:
    """Engines for every setting, all on one set of target weights.

    Args:
        target: a folder, or what else names a target.
        settings: the first one is plain decoding.
        params: how to sample.
        batch_size: prompts decoded at once.
        max_prompt: tokens of the longest prompt.
        engine_config: everything but sizes and speculation.
        simulate: acceptance length to simulate in the settings that draft.
    """
    longest = max_prompt + (params.max_tokens or 0)
    # rows a proposal may write behind the text: a tree, or the nodes grown on the way to it
    behind = max(
        (max(s.spec.max_nodes, s.spec.top_k * s.spec.max_depth) for s in settings if s.spec), default=0
    )
    config = replace(
        engine_config,
        max_num_seqs=batch_size,
        # every answer pays for its own prompt, in every repeat
        prefix_cache=False,
        kv_tokens=batch_size * (longest + behind + 2 * engine_config.block_size),
    )
    plain = Engine(target, config=config)
    decoders: dict[str, Decode] = {}
    for setting in settings:
        if setting.draft is None:
            decoders[setting.name] = engine_decoder(plain, params)
            continue
        assert setting.spec is not None, "a drafter needs speculation settings"
        engine = Engine(
            plain,
            draft=setting.draft,
            config=replace(config, spec=setting.spec, simulate_acceptance=simulate),
        )
        chosen = replace(params, rule=setting.rule, rule_knobs=setting.knobs)
        decoders[setting.name] = engine_decoder(engine, chosen)
    return plain, decoders


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _length_interval(first: list[Measured]) -> tuple[float, float] | None:
    with_steps = [one.stats for one in first if one.stats.verify_steps]
    return ratio_interval([s.committed for s in with_steps], [s.verify_steps for s in with_steps])


def _rows_by_category(prompts: Sequence[BenchPrompt]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        rows.setdefault(prompt.category, []).append(index)
    return rows


def _by_category(first: list[Measured], prompts: Sequence[BenchPrompt]) -> dict[str, float | None]:
    lengths: dict[str, float | None] = {}
    for category, rows in _rows_by_category(prompts).items():
        total = SpecStats()
        for index in rows:
            total.add(first[index].stats)
        lengths[category] = total.acceptance_length
    return lengths


def _pick(column: Sequence[float], rows: list[int]) -> list[float]:
    return [column[index] for index in rows]


def _speedup(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
) -> float:
    """Tokens per second over the baseline's."""
    return (sum(tokens) / sum(seconds)) / (sum(base_tokens) / sum(base_seconds))
