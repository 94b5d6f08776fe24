"""One audit from the command line: options to plan, progress, tables, the record and the report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.audit.levels import CLAIMS, LevelResult, parse_levels
from specdec.audit.plan import AuditPlan, AuditRecord, check_plan
from specdec.audit.run import Audit
from specdec.cli.console import LINE_INTERVAL_S, print_table, say
from specdec.cli.datasets import load_prompts, prompt_file
from specdec.cli.outputs import require_own_beside, require_own_result, require_writable
from specdec.cli.paper import Notes, Paper, Section, Table, cell_text
from specdec.cli.paper_page import write_paper
from specdec.cli.sampling_options import parse_knobs
from specdec.cli.shapes import parse_shape
from specdec.cli.tasks import exact_match_tasks
from specdec.cli.usage import check_rule, flags_of, usage_errors
from specdec.config import EngineConfig
from specdec.drafts import check_spelling
from specdec.errors import UsageError
from specdec.exactness import exact_against, exactness_notice
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, sha256_file, write_json_atomic
from specdec.requests import PromptEncoder
from specdec.sampling_params import SamplingParams
from specdec.verification.registry import rule_named
from specdec.verification.rules import BoundRule

SCHEMA = "specdec.audit/1"
WORDS = {True: "pass", False: "FAIL", None: "not decided"}
MAX_FINDINGS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The options of `specdec audit`."""

    target: str
    draft: str
    levels: str
    rule: str | None
    lossy: str | None
    knobs: list[str]
    dtype: str
    weights: str
    shape: str
    batch_size: int
    data: str
    limit: int
    tasks: list[str]
    task_limit: int
    max_tokens: int
    task_tokens: int
    draws: int
    engine_draws: int
    temperature: float
    seed: int
    out: Path | None


def chosen_rule(rule: str | None, lossy: str | None, knobs: list[str]) -> BoundRule | None:
    """The rule an audit is about; None: all exact ones, and exact verification as served.

    Raises:
        SpecdecError: an unknown rule, knob or value.
        UsageError: a lossy rule under --rule, an exact one under --lossy, or a knob without "=".
    """
    name = lossy or rule
    if name is None:
        return None
    given = parse_knobs(knobs)
    check_rule(name, given, "--rule" if lossy is None else "--lossy")
    bound = rule_named(name, given)
    if lossy is not None and bound.rule.is_lossless:
        raise UsageError(f"--lossy ({name}) is a lossless rule; audit it with --rule {name}")
    if lossy is None and not bound.rule.is_lossless:
        raise UsageError(f"--rule ({name}) is {bound.rule.kind}; price it with --lossy {name}")
    return bound


class _Spaced:
    """Says what is being done, each thing once and counts some seconds apart."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, message: str) -> None:
        # counts begin with a digit behind the level's name
        counting = message.partition(": ")[2][:1].isdigit()
        if not counting or time.monotonic() - self._last >= LINE_INTERVAL_S:
            self._last = time.monotonic()
            say(message)


def run_audit(options: AuditOptions) -> dict[str, Any]:
    """Audit, print, write the folder; returns the summary for the JSON line."""
    rule = chosen_rule(options.rule, options.lossy, options.knobs)
    levels = parse_levels(options.levels)
    spec = parse_shape(options.shape)
    check_plan(rule=rule, levels=levels, spec=spec)
    check_spelling(options.draft)
    # what only the last level would come upon is refused before the first
    with usage_errors(flags_of(dict.fromkeys(("dtype", "weights", "temperature", "seed")), {})):
        EngineConfig(dtype=options.dtype, weights=options.weights)
        SamplingParams(temperature=options.temperature, seed=options.seed)
    if options.out is not None:
        result = options.out / "audit.json"
        require_writable("--out", result)
        require_own_result("--out", result, "audit")
        for ending in (".md", ".html"):
            require_own_beside("--out", result, result.with_suffix(ending))
    folder = resolve_target(options.target)
    encoder = PromptEncoder(folder)

    def encode(text: str) -> list[int]:
        return encoder.encode([{"role": "user", "content": text}])

    needs_tasks = "C5" in levels or options.lossy is not None
    plan = AuditPlan(
        target=str(folder),
        draft=options.draft,
        spec=spec,
        dtype=options.dtype,
        weights=options.weights,
        batch_size=options.batch_size,
        levels=levels,
        rule=rule,
        prompts=[
            (prompt.id, encode(prompt.turns[0])) for prompt in load_prompts(options.data)[: options.limit]
        ],
        tasks=exact_match_tasks(options.tasks, options.task_limit, encode) if needs_tasks else (),
        max_tokens=options.max_tokens,
        task_tokens=options.task_tokens,
        draws=options.draws,
        engine_draws=options.engine_draws,
        temperature=options.temperature,
        seed=options.seed,
    )
    audit = Audit(plan, _Spaced())
    record = audit.run()
    for level in record.levels:
        _print_level(level)
    if record.baselines:
        _print_baselines(plan, record)
    summary = _summary(options, plan, record)
    if notice := exactness_notice(summary["exact_against"]):
        say(notice)
    if options.out is not None:
        details = {**_details(plan, record), "run": _run_record(options, plan, encoder).to_dict()}
        write_json_atomic(options.out / "audit.json", {**summary, **details})
        write_paper(_paper(options, plan, record, summary), options.out, "audit")
        say(f"written: {options.out}")
    return summary


def _summary(options: AuditOptions, plan: AuditPlan, record: AuditRecord) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "target": options.target,
        "draft": options.draft,
        "dtype": options.dtype,
        "weights": options.weights,
        "exact_against": exact_against(weights=options.weights, kv_cache_dtype="auto"),
        "batch_size": options.batch_size,
        "shape": options.shape,
        "verification": plan.label,
        "lossy": plan.lossy,
        "passed": record.passed,
        "levels": {level.level: level.passed for level in record.levels},
    }


def _details(plan: AuditPlan, record: AuditRecord) -> dict[str, Any]:
    noise = record.noise
    return {
        "results": [level.to_dict() for level in record.levels],
        "baselines": [baseline.to_dict(plan.tasks) for baseline in record.baselines],
        "noise": None
        if noise is None
        else {
            "margin": noise.margin,
            "relative": noise.relative,
            "positions": noise.positions,
            "scale": noise.scale,
            "near_tie": noise.near_tie,
            "same_row": noise.same_row,
        },
    }


def _run_record(options: AuditOptions, plan: AuditPlan, encoder: PromptEncoder) -> RunRecord:
    return RunRecord.collect(
        dtype=options.dtype,
        seeds={"sampling": options.seed},
        template_hash=encoder.template_hash,
        data_hash=sha256_file(prompt_file(options.data)),
        defaults={
            "levels": list(plan.levels),
            "shape": options.shape,
            "batch_size": plan.batch_size,
            "prompts": len(plan.prompts),
            "tasks": len(plan.tasks),
            "max_tokens": plan.max_tokens,
            "task_tokens": plan.task_tokens,
            "draws": plan.draws,
            "engine_draws": plan.engine_draws,
            "temperature": plan.temperature,
            "threads": torch.get_num_threads(),
        },
    )


def _level_table(level: LevelResult) -> tuple[list[str], list[list[Any]]]:
    columns = list(level.figures[0].values) if level.figures else []
    rows = [[figure.name, *figure.values.values(), WORDS[figure.passed]] for figure in level.figures]
    return ["", *(column.replace("_", " ") for column in columns), "verdict"], rows


def _print_level(level: LevelResult) -> None:
    columns, rows = _level_table(level)
    shown = [[cell_text(value) for value in row] for row in rows]
    print_table(f"{level.level}: {CLAIMS[level.level]}: {WORDS[level.passed]}", columns, shown)
    for note in level.notes:
        say(f"{level.level}: {note}")


def _baseline_table(plan: AuditPlan, record: AuditRecord) -> tuple[list[str], list[list[Any]]]:
    found = [baseline.to_dict(plan.tasks) for baseline in record.baselines]
    categories = list(found[0]["scores"])
    columns = [
        "baseline",
        "TV per token",
        "KL per token",
        "largest pi/p",
        "accept length",
        "accept rate",
        *categories,
    ]
    rows = [
        [
            one["baseline"],
            one["total_variation"],
            one["kl"],
            one["largest_overshoot"],
            one["acceptance_length"],
            one["acceptance_rate"],
            *(f"{one['scores'][name]['right']}/{one['scores'][name]['tasks']}" for name in categories),
        ]
        for one in found
    ]
    return columns, rows


def _print_baselines(plan: AuditPlan, record: AuditRecord) -> None:
    columns, rows = _baseline_table(plan, record)
    title = f"{plan.label}, temperature {plan.temperature:g}: right answers by difficulty, easiest first"
    print_table(title, columns, [[cell_text(value) for value in row] for row in rows])


def _paper(options: AuditOptions, plan: AuditPlan, record: AuditRecord, summary: dict[str, Any]) -> Paper:
    held = "" if options.weights == "auto" else f", weights {options.weights}"
    regime = f"{options.dtype}{held}, batch {options.batch_size}, {options.shape}"
    sections = []
    if record.baselines:
        columns, rows = _baseline_table(plan, record)
        assert plan.rule is not None, "only a lossy rule has baselines"
        sections.append(
            Section(
                title="The four baselines",
                blocks=[
                    plan.rule.rule.sentence,
                    Table(columns=columns, rows=rows, caption="right answers by difficulty, easiest first"),
                    Notes(lines=[f"{one.name}: {one.sentence}" for one in record.baselines]),
                ],
            )
        )
    for level in record.levels:
        columns, rows = _level_table(level)
        section: list[Any] = [
            f"{CLAIMS[level.level].capitalize()}.",
            Table(columns=columns, rows=rows),
            Notes(lines=level.notes),
        ]
        if level.findings:
            shown = level.findings[:MAX_FINDINGS_SHOWN]
            names = list(shown[0])
            section.append(
                Table(
                    columns=[name.replace("_", " ") for name in names],
                    rows=[[finding.get(name) for name in names] for finding in shown],
                    caption=f"{len(shown)} of {len(level.findings)} findings",
                )
            )
        sections.append(Section(title=f"{level.level}: {WORDS[level.passed]}", blocks=section))
    verdict = "passed" if summary["passed"] else "FAILED"
    lead = (
        f"Audit {verdict}: {options.target} with draft {options.draft}, verification {plan.label}, {regime}."
    )
    if notice := exactness_notice(summary["exact_against"]):
        lead += f" {notice[0].upper()}{notice[1:]}."
    return Paper(title=f"Audit of {options.target}", lead=lead, sections=sections)
