"""One sweep from the command line: points done one by one and kept; table, picture, record and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.audit.goodness import sign_test
from specdec.audit.parity import Task
from specdec.cli.console import counted, print_table, progress, say
from specdec.cli.outputs import require_own_beside, require_own_result, require_writable
from specdec.cli.paper import cell_text
from specdec.cli.paper_page import write_paper
from specdec.cli.shapes import parse_shape
from specdec.cli.sweeping.cost import draft_cost, draft_fingerprint
from specdec.cli.sweeping.measure import SweepBench, measure
from specdec.cli.sweeping.picture import draw_sweep
from specdec.cli.sweeping.points import AXES, PLAIN, check_lossy, grid, mark_dominated
from specdec.cli.sweeping.report import PRINTED, row_of, sweep_paper
from specdec.cli.tasks import exact_match_tasks
from specdec.cli.usage import flags_of, usage_errors
from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import RuleMismatchError, UsageError
from specdec.hub import resolve_target
from specdec.provenance import (
    RunRecord,
    folder_fingerprint,
    git_state,
    read_json,
    sha256_text,
    write_json_atomic,
)
from specdec.requests import PromptEncoder
from specdec.sampling_params import GREEDY_TEMPERATURE, SamplingParams

SCHEMA = "specdec.sweep/1"


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of `specdec sweep`."""

    target: str
    drafts: list[str]
    rules: list[str]
    shapes: list[str]
    batch_sizes: list[int]
    tasks: list[str]
    task_limit: int
    max_tokens: int
    temperature: float
    dtype: str
    lossy: bool
    exact: bool
    seed: int
    out: Path

    def params(self) -> SamplingParams:
        """How answers are sampled.

        Raises:
            UsageError: a value out of range, by its flag.
        """
        with usage_errors(flags_of({"temperature": 0, "seed": 0}, {})):
            return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=self.seed)

    def engine_config(self) -> EngineConfig:
        """Of the engine that holds the weights of all.

        Raises:
            UsageError: a dtype that there is not.
        """
        with usage_errors(flags_of({"dtype": 0}, {})):
            return EngineConfig(dtype=self.dtype, max_num_seqs=1, kv_tokens=64)


def run_sweep(options: SweepOptions) -> dict[str, Any]:
    """Measure what is missing, compare what exists, write the folder; returns the JSON line.

    A point whose rule does not go with its draft or shape is left out, and asked for again by the next run.

    Raises:
        SpecdecError: an option that is wrong, or a point that cannot be measured.
    """
    options.params()
    options.engine_config()
    check_lossy(options.rules, lossy=options.lossy, exact=options.exact)
    if options.lossy and options.temperature <= GREEDY_TEMPERATURE:
        raise UsageError(
            f"--lossy needs a --temperature above {GREEDY_TEMPERATURE:g}: greedy text leaves nothing to relax"
        )
    points = grid(options.drafts, options.rules, options.shapes, options.batch_sizes)
    for shape in options.shapes:
        parse_shape(shape)
    fingerprints = {draft: draft_fingerprint(draft) for draft in (PLAIN, *options.drafts)}
    result = options.out / "sweep.json"
    require_writable("--out", result)
    require_own_result("--out", result, "sweep")
    for ending in (".md", ".html", ".png"):
        require_own_beside("--out", options.out / "points", result.with_suffix(ending))
    folder = resolve_target(options.target)
    encoder = PromptEncoder(folder)
    tasks = exact_match_tasks(
        options.tasks,
        options.task_limit,
        lambda text: encoder.encode([{"role": "user", "content": text}]),
    )
    longest = max(len(task.token_ids) for task in tasks) + options.max_tokens
    shared = _shared(options, folder, tasks)
    bench: SweepBench | None = None
    measured: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    with progress("points", len(points)) as bar:
        for number, point in enumerate(points):
            path = options.out / "points" / f"{point.key(shared, fingerprints[point.draft])}.json"
            try:
                if not path.exists():
                    # weights are read only when something is left to do
                    bench = bench or _bench(options, folder, tasks, longest)
                    write_json_atomic(path, {**measure(bench, point), "git": git_state()})
                measured.append(read_json(path))
            except RuleMismatchError as error:
                # not every combination makes sense; without plain decoding there is nothing to compare with
                if point.draft == PLAIN:
                    raise
                refused.append({"label": point.label, "batch_size": point.batch_size, "refused": str(error)})
            bar.update(number + 1, point.label)
    _compare_with_plain(measured)
    for record in measured:
        _add_draft_cost(record, longest)
    for record, better in zip(measured, mark_dominated(measured), strict=True):
        record["dominated_by"] = better
        record["dominated"] = bool(better)
    title = _title(options, len(tasks))
    rows = [[cell_text(value) for value in row_of(record, PRINTED)] for record in measured]
    print_table(title, PRINTED, rows)
    for record in refused:
        say(f"left out: {record['label']}: {record['refused']}")
    picture = options.out / "sweep.png"
    draw_sweep(measured, picture, title=title)
    summary = {
        "schema": SCHEMA,
        "target": options.target,
        "lossy": options.lossy,
        "axes": list(AXES),
        "points": [
            {name: record[name] for name in record if name not in ("right_by_task", "scores")}
            for record in measured
        ],
        "left_out": refused,
    }
    run = _run_record(options, {**shared, "draft_fingerprints": fingerprints}, encoder)
    write_json_atomic(options.out / "sweep.json", {**summary, "points": measured, "run": run.to_dict()})
    write_paper(sweep_paper(title, measured, refused, picture), options.out, "sweep")
    say(f"written: {options.out}")
    return summary


def _shared(options: SweepOptions, folder: Path, tasks: Sequence[Task]) -> dict[str, Any]:
    """What all points have in common, and what a kept point must have been measured with."""
    return {
        "target_fingerprint": folder_fingerprint(folder),
        "tasks": options.tasks,
        "tasks_hash": sha256_text(repr([(task.id, task.category, task.token_ids) for task in tasks])),
        "task_limit": options.task_limit,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "dtype": options.dtype,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
    }


def _bench(options: SweepOptions, folder: Path, tasks: list[Task], longest: int) -> SweepBench:
    return SweepBench(
        base=Engine(folder, config=options.engine_config()),
        tasks=tasks,
        params=options.params(),
        kv_tokens=longest,
        lossy=options.lossy,
    )


def _add_draft_cost(record: dict[str, Any], longest: int) -> None:
    """Add what a point's draft costs by its shapes and its record; memory is that of a full batch."""
    cost = draft_cost(record["draft"])
    record["training_target_tokens"] = cost.training_target_tokens
    record["training_seconds"] = cost.training_seconds
    record["training_tap_bytes"] = cost.training_tap_bytes
    record["draft_memory_bytes"] = cost.memory_bytes(record["batch_size"] * longest)
    record["draft_megabytes"] = record["draft_memory_bytes"] / 1e6


def _compare_with_plain(records: list[dict[str, Any]]) -> None:
    """Add the task score's difference from plain decoding at the same batch size, paired by task."""
    plain = {record["batch_size"]: record["right_by_task"] for record in records if record["draft"] == PLAIN}
    for record in records:
        base = plain[record["batch_size"]]
        pairs = list(zip(record["right_by_task"], base, strict=True))
        record["score_difference"] = (record["right"] - sum(base)) / len(base)
        record["parity_p_value"] = sign_test(
            sum(one > other for one, other in pairs), sum(one < other for one, other in pairs)
        )


def _title(options: SweepOptions, num_tasks: int) -> str:
    return (
        f"{options.target}: {num_tasks} tasks ({', '.join(options.tasks)}) of up to {options.max_tokens} "
        f"tokens, temperature {options.temperature:g}, {options.dtype}, "
        f"{counted(torch.get_num_threads(), 'thread')}"
    )


def _run_record(options: SweepOptions, shared: dict[str, Any], encoder: PromptEncoder) -> RunRecord:
    return RunRecord.collect(
        dtype=options.dtype,
        seeds={"sampling": options.seed},
        template_hash=encoder.template_hash,
        defaults={
            **shared,
            "drafts": options.drafts,
            "rules": options.rules,
            "shapes": options.shapes,
            "batch_sizes": options.batch_sizes,
        },
    )
