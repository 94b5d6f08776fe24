"""One bench: prompts, settings, the interleaved runs of every point, the table and the record."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec.cli.benching.conditions import engine_conditions, require_comparable
from specdec.cli.benching.energy import energy_meter
from specdec.cli.benching.figures import DEFINITIONS, answer_records, row_figures
from specdec.cli.benching.measure import (
    PLAIN,
    Interleaved,
    Measured,
    Setting,
    forget_estimates,
    make_decoders,
    make_engines,
    run_interleaved,
    transformers_decoder,
)
from specdec.cli.benching.points import (
    BenchData,
    BenchPoint,
    bench_data,
    check_drafts,
    follower,
    points_of,
    settings_of,
)
from specdec.cli.benching.record import SCHEMA, BenchRecord, open_record
from specdec.cli.benching.table import print_bench, print_paired, print_pooled
from specdec.cli.console import Bar, counted, progress, say
from specdec.cli.datasets import prompt_file, require_shorter
from specdec.cli.outputs import require_not_input, require_own_result, require_writable
from specdec.cli.shapes import check_simulation, simulation_notice
from specdec.cli.usage import flags_of, named_flags, usage_errors
from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.drafter import TapDrafter
from specdec.engine import Engine
from specdec.exactness import exactness_notice
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, sha256_file, sha256_text
from specdec.requests import PromptEncoder
from specdec.sequence import SamplingParams

TRANSFORMERS = "transformers"
# an uncounted batch is for caches and clocks, not for text
WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What to measure; the fields are the options of `specdec bench`."""

    target: str
    drafts: list[str]
    shapes: list[str]
    rules: list[str]
    knobs: dict[str, float | str]
    lossy: bool
    data: list[str]
    limit: int | None
    max_tokens: int
    batch_sizes: list[int]
    temperatures: list[float]
    seed: int
    repeats: int
    warm_up: int
    adaptive: bool
    transformers: bool
    out: Path | None
    spread: bool = False
    turns: int = 1
    ignore_eos: bool = False
    resume: bool = False
    simulate_acceptance: float | None = None
    device: str = "cpu"
    dtype: str = "float32"
    deterministic: bool = False
    pass_costs: str = "measured"
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def engine_config(self) -> EngineConfig:
        """What every setting's engine has in common.

        Raises:
            UsageError: a device or dtype that this machine or version lacks.
        """
        with usage_errors(flags_of(EngineConfig.__dataclass_fields__, {})):
            return EngineConfig(
                allow_lossy=self.lossy,
                device=self.device,
                dtype=self.dtype,
                deterministic=self.deterministic,
                pass_costs=self.pass_costs,
                **self.engine_options,
            )

    def params(self, temperature: float) -> SamplingParams:
        """How answers are sampled at one temperature."""
        with usage_errors({"temperature": "--temperature"}):
            return SamplingParams(
                temperature=temperature,
                max_tokens=self.max_tokens,
                # a meaningless text must not end by chance: all settings write the same number of tokens
                ignore_eos=self.ignore_eos or self.simulate_acceptance is not None,
            )

    def settings(self) -> list[Setting]:
        """Plain decoding, and what is measured beside it.

        Raises:
            SpecdecError: an unknown rule or knob, or one setting twice.
        """
        settings = settings_of(
            self.drafts, self.shapes, self.rules, self.knobs, SpecConfig(adaptive=self.adaptive)
        )
        for setting in settings:
            if self.simulate_acceptance is not None and setting.spec is not None:
                check_simulation(self.simulate_acceptance, setting.shape or "", setting.spec)
        return settings


class _Bench:
    """Engines that all points share, and what is known of them."""

    def __init__(self, plan: BenchPlan, settings: list[Setting]) -> None:
        self.plan, self.settings = plan, settings
        folder = resolve_target(plan.target)
        self.encoder = PromptEncoder(folder)
        self.data: dict[str, BenchData] = {}
        context = ModelConfig.from_folder(folder).max_position_embeddings
        for name in plan.data:
            found = bench_data(self.encoder, name, plan.limit, spread=plan.spread, seed=plan.seed)
            require_shorter("--data", name, found.lengths, context)
            self.data[name] = found
        longest = max(one.longest(self.encoder, plan.turns, plan.max_tokens) for one in self.data.values())
        self.longest = min(context, longest + plan.max_tokens)
        self.engines: dict[str, Engine] = make_engines(
            str(folder),
            settings,
            batch_size=max(plan.batch_sizes),
            longest=self.longest,
            engine_config=plan.engine_config(),
            simulate=plan.simulate_acceptance,
        )
        self.plain = self.engines[PLAIN]
        alike = engine_conditions(self.plain)
        for name, engine in self.engines.items():
            require_comparable(f"{name} over {PLAIN}", engine_conditions(engine), alike)
        self.conditions = {
            **alike,
            "template_hash": self.encoder.template_hash,
            "max_tokens": plan.max_tokens,
            "ignore_eos": plan.params(0.0).ignore_eos,
            "turns": plan.turns,
            "limit": plan.limit,
            "spread": plan.spread,
            "seed": plan.seed,
        }
        # what was decoded uncounted, for each batch size and temperature once
        self.warmed: dict[tuple[int, float], dict[str, list[Measured]]] = {}
        self.meter = energy_meter(self.plain.config.device)
        self.transformers = transformers_decoder(str(folder), plan.max_tokens) if plan.transformers else None

    def key(self) -> str:
        """Hash of all that points have in common: conditions, settings, drafts, prompts."""
        plan = self.plan
        return sha256_text(
            repr(
                [
                    sorted(self.conditions.items()),
                    [(one.name, one.spec) for one in self.settings],
                    [_draft_fingerprint(engine) for engine in self.engines.values()],
                    [plan.repeats, plan.warm_up, plan.lossy, plan.simulate_acceptance, plan.transformers],
                    plan.pass_costs,
                ]
            )
        )

    def measure(self, point: BenchPoint, bar: Bar, left_out: list[dict[str, Any]]) -> Interleaved:
        """Every setting at one point."""
        plan, data = self.plan, self.data[point.data]
        params = plan.params(point.temperature)
        decoders = make_decoders(self.engines, self.settings, params, meter=self.meter)
        short = make_decoders(self.engines, self.settings, params, most_tokens=WARM_UP_TOKENS)
        if self.transformers is not None:
            decoders[TRANSFORMERS] = short[TRANSFORMERS] = self.transformers
        begun = bar.completed
        follow = None
        if plan.turns > 1:
            room = self.longest - plan.max_tokens
            follow = follower(data, self.encoder, plan.turns, room, left_out)
        at = (point.batch_size, point.temperature)
        run = run_interleaved(
            decoders,
            data.first,
            batch_size=point.batch_size,
            repeats=plan.repeats,
            warm_up=0 if at in self.warmed else plan.warm_up,
            on_progress=lambda done, note: bar.update(begun + done, f"{point.label}, {note}"),
            warm_up_decoders=short,
            follow=follow,
            before_repeat=partial(forget_estimates, self.engines),
        )
        return replace(run, warm_up=self.warmed.setdefault(at, run.warm_up))

    def rows(self, point: BenchPoint, run: Interleaved) -> list[dict[str, Any]]:
        """The record's rows of one point."""
        known = {one.name: one for one in self.settings}
        rows = []
        for name in run.results:
            setting = known.get(name)
            report = self.engines[name].memory_report().to_dict() if setting else None
            rows.append(
                {
                    **row_figures(name, run, same_engine=setting is not None),
                    "draft": setting.draft if setting else None,
                    "shape": setting.shape if setting else None,
                    **point.coordinates,
                    "memory": report,
                }
            )
        return rows


def run_bench(plan: BenchPlan) -> dict[str, Any]:
    """Measure, print the table, write `--out`; returns the summary for the JSON line."""
    settings = plan.settings()
    check_drafts(settings)
    points = points_of(plan.data, plan.batch_sizes, plan.temperatures)
    plan.engine_config()
    for temperature in plan.temperatures:
        plan.params(temperature)
    files = {name: prompt_file(name) for name in plan.data}
    if plan.out is not None:
        require_writable("--out", plan.out)
        for file in files.values():
            require_not_input("--out", plan.out, {"--data": file})
        require_own_result("--out", plan.out, "bench")
    with named_flags({"device": "--device"}):
        bench = _Bench(plan, settings)
    record = open_record(plan.out, bench.key(), len(points), resume=plan.resume)
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "target": plan.target,
        "data": plan.data if len(plan.data) > 1 else plan.data[0],
    }
    if plan.simulate_acceptance is not None:
        head |= simulation_notice(plan.simulate_acceptance)
    todo = [point for point in points if not record.has(point)]
    if len(todo) < len(points):
        say(f"{len(points) - len(todo)} of {len(points)} points were measured before")
    answers = sum(plan.repeats * len(bench.data[point.data].first) for point in todo)
    with progress("answers", answers if plan.turns == 1 else None) as bar:
        for point in todo:
            run = bench.measure(point, bar, record.left_out)
            record.add(
                point, bench.rows(point, run), {name: answer_records(name, run) for name in run.results}
            )
            if plan.out is not None:
                record.write(plan.out, head, _tail(bench, record, files))
    print_bench(_title(bench), record.rows)
    pooled = record.pooled()
    if pooled:
        print_pooled(_title(bench), pooled)
    paired = record.paired_lengths()
    print_paired(_title(bench), paired)
    if notice := exactness_notice(bench.conditions["exact_against"]):
        say(notice)
    for one in record.left_out:
        say(f"left out: {one['data']} {one['id']} turn {one['turn'] + 1}: {one['reason']}")
    if plan.out is not None:
        if not todo:
            record.write(plan.out, head, _tail(bench, record, files))
        say(f"written: {plan.out}")
    return {
        **head,
        **record.state(),
        "conditions": bench.conditions,
        "settings": record.rows,
        "pooled": pooled,
        "paired_lengths": paired,
    }


def _tail(bench: _Bench, record: BenchRecord, files: Mapping[str, Path]) -> dict[str, Any]:
    plan, engine = bench.plan, bench.plain
    hashes = {name: sha256_file(file) for name, file in files.items()}
    run = RunRecord.collect(
        dtype=engine.config.dtype,
        seeds={"sampling": plan.seed},
        template_hash=bench.encoder.template_hash,
        data_hash=next(iter(hashes.values()))
        if len(hashes) == 1
        else sha256_text(repr(sorted(hashes.items()))),
        defaults={
            "max_tokens": plan.max_tokens,
            "batch_size": _one_or_all(plan.batch_sizes),
            "temperature": _one_or_all(plan.temperatures),
            "seeds": "seed + number of the prompt",
            "limit": plan.limit,
            "spread": plan.spread,
            "turns": plan.turns,
            "ignore_eos": plan.params(0.0).ignore_eos,
            "repeats": plan.repeats,
            "warm_up_batches": plan.warm_up,
            "warm_up_tokens": WARM_UP_TOKENS,
            "adaptive": plan.adaptive,
            "pass_costs": plan.pass_costs,
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
            "data_hashes": hashes,
        },
        extra={"earlier": record.earlier} if record.earlier else {},
    )
    return {
        "conditions": bench.conditions,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "run": run.to_dict(),
        "definitions": DEFINITIONS,
    }


def _draft_fingerprint(engine: Engine) -> str | None:
    return engine.drafter.fingerprint if isinstance(engine.drafter, TapDrafter) else None


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _title(bench: _Bench) -> str:
    plan, engine = bench.plan, bench.plain
    simulated = (
        ""
        if plan.simulate_acceptance is None
        else f"SIMULATED acceptance of {plan.simulate_acceptance:g} tokens a step, speed only: "
    )
    turns = f" x {plan.turns} turns" if plan.turns > 1 else ""
    return f"{simulated}{plan.target}, {plan.max_tokens} tokens{turns}, {_where(engine)}"


def _where(engine: Engine) -> str:
    """Precision and hardware in words, for a table's title."""
    if engine.config.device == "cpu":
        return f"{engine.config.dtype}, {counted(torch.get_num_threads(), 'thread')}"
    return f"{engine.config.dtype}, {torch.cuda.get_device_name(engine.config.device)}"
