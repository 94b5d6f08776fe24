"""One study: named sets or recipes resolved, arms trained, records compared, table, picture and JSON."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.cli.console import emit_json, resumable, say
from specdec.cli.layers import read_layers
from specdec.cli.studying.picture import draw_study
from specdec.cli.studying.probe import probe_scores, probe_texts
from specdec.cli.studying.report import compare, compare_recipes, foresight, print_findings
from specdec.cli.studying.scores import subset_scores
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, folder_fingerprint, sha256_file, write_json_atomic
from specdec.train.records import data_file
from specdec.train.study import Study
from specdec.train.study_arms import TapSet, order_arms, plan_tap_sets, recipe_arms
from specdec.train.study_config import StudyConfig
from specdec.train.study_recipes import Recipe

SCHEMA = "specdec.study/1"


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """The options of `specdec study`."""

    target: str
    data: Path
    out: Path
    named: list[tuple[str, str]]
    counts: list[int]
    seeds: list[int]
    random_sets: int
    random_seed: int
    scores: Path | None
    probe_tokens: int
    config: StudyConfig
    max_hours: float | None
    states_cache: Path | None
    picture: Path | None
    recipes: list[Recipe]


def run_study(options: StudyOptions) -> None:
    """Train what is missing, compare what exists, write `study.json`."""
    begun = time.monotonic()
    config = options.config
    folder = resolve_target(options.target)
    fingerprint = folder_fingerprint(folder)
    named = [(name, read_layers(value, fingerprint)) for name, value in options.named]
    scores = {} if options.scores is None else subset_scores(options.scores, fingerprint)
    fixed = None
    if options.recipes:
        name, boundaries = named[0]
        fixed = TapSet(boundaries=tuple(sorted(boundaries)), names=(name,))
    work = Study(
        folder,
        options.data,
        options.out,
        config,
        states_cache=options.states_cache,
        only=fixed,
        report=say,
    )
    config = work.config
    tap_sets = plan_tap_sets(
        work.num_layers,
        [] if options.recipes else options.counts,
        named,
        random_draws=options.random_sets,
        random_seed=options.random_seed,
    )
    if fixed is not None:
        arms = recipe_arms(fixed.boundaries, options.recipes, options.seeds[0])
    else:
        pairs = enumerate(options.counts)
        seeds = {count: options.seeds[min(i, len(options.seeds) - 1)] for i, count in pairs}
        for taps in tap_sets:
            seeds.setdefault(len(taps.boundaries), options.seeds[-1])
        arms = order_arms(tap_sets, seeds)
    limit = None if options.max_hours is None else begun + options.max_hours * 3600
    if options.probe_tokens:
        # hours of training come first, so what the probe needs is checked before them.
        probe_texts(work, options.probe_tokens)
    with resumable(f"finished arms are in {options.out}"):
        records = work.run(arms, until=limit)
    if fixed is not None:
        findings = compare_recipes(records, fixed.boundaries, options.recipes)
    else:
        findings = compare(records, tap_sets)
    if options.probe_tokens and findings:
        measured = [finding.taps for finding in findings]
        scores |= probe_scores(work, measured, options.probe_tokens)
    ranks = [] if options.recipes else foresight(findings, scores, options.counts[0])
    first = config.training
    title = (
        f"{options.target}: {len(records)} of {len(arms)} heads, {config.train_tokens:,} answer tokens x "
        f"{first.epochs:g} epochs, draft vocabulary {first.draft_vocab_size:,}; greedy chain of "
        f"{config.chain}, n={config.held_out} held-out conversations, {config.served} served; reference: "
        f"{'base' if options.recipes else 'default triple, else uniform'}; 95 % intervals over conversations "
        "and seeds"
    )
    if findings:
        print_findings(title, findings, ranks)
    if options.picture is not None and findings:
        draw_study(findings, options.picture, title=f"{options.target}, {len(records)} heads")
    summary = {
        "schema": SCHEMA,
        "target": options.target,
        "target_fingerprint": fingerprint,
        "heads": len(records),
        "planned": len(arms),
        "findings": [finding.to_dict() for finding in findings],
        "foresight": ranks,
    }
    path = options.out / "study.json"
    write_json_atomic(path, {**summary, "run": _run_record(options, config, work, records)})
    say(f"written: {path}")
    emit_json(summary)


def _run_record(
    options: StudyOptions, config: StudyConfig, work: Study, records: list[dict[str, Any]]
) -> dict[str, Any]:
    return RunRecord.collect(
        dtype=config.training.compute_dtype,
        seeds={"random_sets": options.random_seed},
        template_hash=work.contract.template_hash,
        data_hash=sha256_file(data_file(options.data)),
        defaults={**asdict(config), "threads": torch.get_num_threads()},
        extra={
            "study": work.hash,
            "train_seconds": sum(record["train_seconds"] for record in records),
            "seconds": sum(record["seconds"] for record in records),
        },
    ).to_dict()
