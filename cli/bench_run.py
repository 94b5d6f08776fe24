"""One bench: prompts, settings, the interleaved run, the table and the record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdec.cli.console import format_interval, print_table, progress, say
from specdec.cli.datasets import load_prompts, prompt_file, require_shorter
from specdec.cli.measure import (
    PLAIN,
    BenchPrompt,
    Decode,
    Setting,
    make_decoders,
    per_prompt,
    run_interleaved,
    summarise,
    transformers_decoder,
)
from specdec.cli.outputs import require_not_input, require_writable
from specdec.cli.shapes import check_simulation, parse_shape, simulation_notice
from specdec.cli.usage import flags_of, usage_errors
from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, sha256_file, write_json_atomic
from specdec.requests import PromptEncoder
from specdec.sequence import SamplingParams
from specdec.stats import DEFINITIONS
from specdec.verification.registry import rule_named

SCHEMA = "specdec.bench/1"


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What to measure; the fields are the options of `specdec bench`."""

    target: str
    drafts: list[str]
    shapes: list[str]
    rules: list[str]
    knobs: dict[str, float | str]
    lossy: bool
    data: str
    limit: int | None
    max_tokens: int
    batch_size: int
    temperature: float
    seed: int
    repeats: int
    warm_up: int
    adaptive: bool
    transformers: bool
    out: Path | None
    simulate_acceptance: float | None = None
    device: str = "cpu"
    dtype: str = "float32"
    deterministic: bool = False

    def engine_config(self) -> EngineConfig:
        """What every setting's engine has in common.

        Raises:
            UsageError: a device or dtype that this machine or version lacks.
        """
        with usage_errors(flags_of({"device": 0, "dtype": 0, "deterministic": 0}, {})):
            return EngineConfig(
                allow_lossy=self.lossy,
                device=self.device,
                dtype=self.dtype,
                deterministic=self.deterministic,
            )


def bench_prompts(encoder: PromptEncoder, data: str, limit: int | None) -> list[BenchPrompt]:
    """First turns of a prompt set, rendered with the target's chat template."""
    prompts = load_prompts(data)[:limit]
    return [
        BenchPrompt(
            id=prompt.id,
            category=prompt.category,
            token_ids=encoder.encode([{"role": "user", "content": prompt.turns[0]}]),
        )
        for prompt in prompts
    ]


def settings_of(plan: BenchPlan) -> list[Setting]:
    """Plain decoding and every drafter in every shape under every rule.

    Raises:
        SpecdecError: an unknown rule or knob, or one setting twice.
    """
    base = SpecConfig(adaptive=plan.adaptive)
    settings = [Setting(name=PLAIN, draft=None, spec=None)]
    shapes = {shape: parse_shape(shape, base) for shape in plan.shapes}
    if plan.simulate_acceptance is not None:
        for shape, spec in shapes.items():
            check_simulation(plan.simulate_acceptance, shape, spec)
    for draft in plan.drafts:
        for shape, spec in shapes.items():
            settings.append(Setting(name=f"{draft} {shape}", draft=draft, spec=spec))
    if plan.rules:
        labels = {rule: rule_named(rule, plan.knobs).label for rule in plan.rules}
        settings[1:] = [
            replace(setting, name=f"{setting.name} {label}", rule=rule, knobs=plan.knobs)
            for setting in settings[1:]
            for rule, label in labels.items()
        ]
    if len({setting.name for setting in settings}) != len(settings) or len(set(plan.rules)) != len(
        plan.rules
    ):
        raise SpecdecError("--draft, --shape and --rule must not name the same setting twice")
    return settings


def run_bench(plan: BenchPlan) -> dict[str, Any]:
    """Measure, print the table, write `--out`; returns the summary for the JSON line."""
    settings = settings_of(plan)
    plan.engine_config()
    if plan.out is not None:
        require_writable("--out", plan.out)
        require_not_input("--out", plan.out, {"--data": prompt_file(plan.data)})
    params = SamplingParams(
        temperature=plan.temperature,
        seed=plan.seed,
        max_tokens=plan.max_tokens,
        # a meaningless text must not end by chance: every setting writes the same number of tokens
        ignore_eos=plan.simulate_acceptance is not None,
    )
    folder = resolve_target(plan.target)
    encoder = PromptEncoder(folder)
    prompts = bench_prompts(encoder, plan.data, plan.limit)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    context = ModelConfig.from_folder(folder).max_position_embeddings
    lengths = {prompt.id: len(prompt.token_ids) for prompt in prompts}
    require_shorter("--data", plan.data, lengths, context)
    engine, decoders = make_decoders(
        str(folder),
        settings,
        params,
        batch_size=plan.batch_size,
        max_prompt=len(longest.token_ids),
        engine_config=plan.engine_config(),
        simulate=plan.simulate_acceptance,
    )
    if plan.transformers:
        decoders["transformers"] = transformers_decoder(str(folder), params)
    with progress("prompts", plan.repeats * len(prompts)) as bar:
        results = run_interleaved(
            decoders,
            prompts,
            batch_size=plan.batch_size,
            repeats=plan.repeats,
            warm_up=plan.warm_up,
            on_progress=bar.update,
        )
    figures = [summarise(name, results, prompts) for name in decoders]
    _print(plan, figures, engine)
    summary = {"schema": SCHEMA, "target": plan.target, "data": plan.data, "settings": figures}
    if plan.simulate_acceptance is not None:
        summary |= simulation_notice(plan.simulate_acceptance)
    if plan.out is not None:
        write_json_atomic(
            plan.out, {**summary, **_details(plan, decoders, results, prompts, encoder, engine)}
        )
        say(f"written: {plan.out}")
    return summary


def _details(
    plan: BenchPlan,
    decoders: dict[str, Decode],
    results: dict[str, Any],
    prompts: list[BenchPrompt],
    encoder: PromptEncoder,
    engine: Engine,
) -> dict[str, Any]:
    record = RunRecord.collect(
        dtype=engine.config.dtype,
        seeds={"sampling": plan.seed},
        template_hash=encoder.template_hash,
        data_hash=sha256_file(prompt_file(plan.data)),
        defaults={
            "max_tokens": plan.max_tokens,
            "batch_size": plan.batch_size,
            "temperature": plan.temperature,
            "repeats": plan.repeats,
            "warm_up_batches": plan.warm_up,
            "adaptive": plan.adaptive,
            "simulate_acceptance": plan.simulate_acceptance,
            "device": plan.device,
            "deterministic": plan.deterministic,
            "shapes": plan.shapes,
            "rules": plan.rules,
            "knobs": plan.knobs,
            "threads": torch.get_num_threads(),
            "weights": engine.config.weights,
            "draft_weights": engine.config.resolved_draft_weights,
            "packed_matrices": engine.decoder.num_packed,
            "plain_matrices": engine.decoder.num_plain,
        },
    )
    return {
        "run": record.to_dict(),
        "definitions": DEFINITIONS,
        "per_prompt": {name: per_prompt(name, results, prompts) for name in decoders},
    }


def _print(plan: BenchPlan, figures: list[dict[str, Any]], engine: Engine) -> None:
    rows = []
    for one in figures:
        acceptance = one["acceptance"]
        rows.append(
            [
                one["setting"],
                one["rule"] if one["lossless"] or "simulated" in one else f"{one['rule']}, lossy",
                acceptance["acceptance_length"],
                format_interval(acceptance["acceptance_length_interval"]),
                acceptance["acceptance_rate"],
                one["tokens_per_second"],
                one.get("speedup"),
                format_interval(one.get("speedup_interval")),
                f"{one['identical']}/{one['prompts']}" if "identical" in one else None,
            ]
        )
    simulated = (
        ""
        if plan.simulate_acceptance is None
        else f"SIMULATED acceptance of {plan.simulate_acceptance:g} tokens a step, speed only: "
    )
    title = (
        f"{simulated}{plan.target}, {plan.data}, {figures[0]['prompts']} prompts x {plan.max_tokens} tokens, "
        f"batch {plan.batch_size}, {_where(engine)}; speedup and "
        "identical against plain; 95 % intervals over prompts"
    )
    columns = [
        "setting",
        "rule",
        "accept length",
        "interval",
        "accept rate",
        "tokens/s",
        "speedup",
        "interval",
        "identical",
    ]
    print_table(title, columns, rows)


def _where(engine: Engine) -> str:
    """Precision and hardware in words, for a table's title."""
    if engine.config.device == "cpu":
        return f"{engine.config.dtype}, {torch.get_num_threads()} threads"
    return f"{engine.config.dtype}, {torch.cuda.get_device_name(engine.config.device)}"
