"""One training run from a target folder to a draft folder.

Owns the wiring: target, data, held-out split, vocabulary, states, head, loop, draft. Each part is its own
module. Knows nothing of the command line.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specdec.drafts.checkpoint import CONFIG_NAME
from specdec.errors import SpecdecError, writing
from specdec.hf import template_hash
from specdec.provenance import held_alone, sha256_file
from specdec.train.checkpoint import FOLDER, latest_state, load_state
from specdec.train.config import ABSENT_OPTIONS, TrainConfig
from specdec.train.curve import write_curve
from specdec.train.evaluate import OfflineAcceptance
from specdec.train.metrics import METRICS_NAME, StepNumbers
from specdec.train.plan import TrainPlan, make_plan
from specdec.train.precision import settle_dtype
from specdec.train.prepare import ONLINE, Prepared, data_hash, prepare
from specdec.train.processes import Processes
from specdec.train.publish import Publisher
from specdec.train.throughput import (
    Work,
    head_flop,
    matrix_rate,
    memory_parts,
    peak_bytes,
    target_flop,
    total_bytes,
)
from specdec.train.trackers import Tracking, check_tracker
from specdec.train.trainer import Trainer, TrainOutcome

LOCK_NAME = ".lock"
# options that change neither the weights nor the order of batches, so a resumed run may change them.
FREE_OPTIONS = frozenset(
    {
        "max_hours",
        "log_every",
        "save_every",
        "eval_every",
        "keep_checkpoints",
        "eval_depth",
        "save_dtype",
        "accept_every",
        "accept_prompts",
        "accept_tokens",
        "shard_weights",
        "device_map",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run gave: where the draft is, how the loop ended, what it reaches offline, and its record.

    `config` has "auto" options as they were settled; `main` is false in every process but the one that writes
    and speaks.
    """

    folder: Path
    config: TrainConfig
    outcome: TrainOutcome
    acceptance: OfflineAcceptance | None
    summary: Mapping[str, Any]
    main: bool = True


def check_out_folder(out: Path) -> None:
    """Refuse a folder that is in use for something else."""
    if out.exists() and not out.is_dir():
        raise SpecdecError(f"--out ({out}) is a file; name a folder")
    known = (FOLDER, METRICS_NAME, CONFIG_NAME, "run.json", LOCK_NAME)
    if out.is_dir() and any(out.iterdir()) and not any((out / name).exists() for name in known):
        raise SpecdecError(f"--out ({out}) is not empty and is no draft or run folder; name another")
    if (out / CONFIG_NAME).exists() and '"specdec"' not in (out / CONFIG_NAME).read_text(errors="replace"):
        raise SpecdecError(f"--out ({out}) holds another model; name another folder")


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Keep a run folder to this run; one that stays without content is taken away again.

    Raises:
        SpecdecError: another run writes there, or the folder cannot be made.
    """
    with writing(f"--out ({out})"):
        out.mkdir(parents=True, exist_ok=True)
    with held_alone(out / LOCK_NAME, f"--out ({out})"):
        try:
            yield
        finally:
            (out / LOCK_NAME).unlink(missing_ok=True)
            if out.is_dir() and not any(out.iterdir()):
                out.rmdir()


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """A head to be trained: for which target, on what, from what, and where to.

    Attributes:
        target: Hugging Face folder.
        boundaries: taps, ascending.
        data: JSONL of the target's answers.
        out: draft folder; checkpoints and `metrics.jsonl` go there too.
        config: options.
        states_cache: a folder that keeps target states over epochs and runs, or "online".
        init_from: a draft folder to go on from; its vocabulary and shape are kept, and if its boundaries
            are others its fusion is fitted to the new ones.
        resume: go on from the newest checkpoint in `out`.
        tracker: a tracker of accelerate's that also gets the numbers: tensorboard, trackio, ...
        report: called with one line of progress, in the main process.
        on_step: called after every step, in the main process.
    """

    target: str | Path
    boundaries: Sequence[int]
    data: str | Path
    out: Path
    config: TrainConfig = field(default_factory=TrainConfig)
    states_cache: str = ONLINE
    init_from: str | Path | None = None
    resume: bool = True
    tracker: str | None = None
    report: Callable[[str], None] = lambda line: None
    on_step: Callable[[StepNumbers], None] = lambda numbers: None

    def train(self) -> TrainResult:
        """Train the head and write its folder.

        Raises:
            SpecdecError: anything wrong with the options, the data or the folders.
        """
        check_tracker(self.tracker)
        processes = Processes(shard=self.config.shard_weights)
        program = peak_bytes(processes.device)
        run = self._settled(processes)
        if processes.main:
            check_out_folder(self.out)
            run._check_begun()
        else:
            run = replace(run, report=lambda line: None, on_step=lambda numbers: None)
        with own_folder(self.out) if processes.main else nullcontext():
            parts = run._prepared(processes)
            try:
                return _train(run, parts, processes, program)
            finally:
                parts.close()

    def plan(self) -> TrainPlan:
        """What `train` would take, from a short measurement; writes nothing."""
        check_out_folder(self.out)
        processes = Processes(shard=self.config.shard_weights)
        run = self._settled(processes)
        run._check_begun()
        return make_plan(run._prepared(processes, plan_only=True), run.out, run.config, processes)

    def _settled(self, processes: Processes) -> TrainRun:
        return replace(self, config=settle_dtype(self.config, processes.device))

    def _check_begun(self) -> None:
        """Refuse other options than those of the run that is gone on with, before a target is read for it."""
        path = latest_state(self.out) if self.resume else None
        if path is not None:
            options = _options(self.config, tuple(self.boundaries), self.init_from)
            load_state(path, options, ABSENT_OPTIONS, whole=False)

    def _prepared(self, processes: Processes, plan_only: bool = False) -> Prepared:
        return prepare(
            self.target,
            tuple(self.boundaries),
            self.data,
            self.config,
            states_cache=self.states_cache,
            init_from=self.init_from,
            processes=processes,
            report=self.report,
            plan_only=plan_only,
        )


def train_draft(
    target: str | Path,
    *,
    boundaries: Sequence[int],
    data: str | Path,
    out: str | Path,
    config: TrainConfig | None = None,
    states_cache: str = ONLINE,
    init_from: str | Path | None = None,
    resume: bool = True,
    tracker: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    on_step: Callable[[StepNumbers], None] = lambda numbers: None,
) -> TrainResult:
    """Train a draft head for a target and write its folder; the arguments are those of `TrainRun`.

    Raises:
        SpecdecError: anything wrong with the options, the data or the folders.
    """
    return TrainRun(
        target=target,
        boundaries=boundaries,
        data=data,
        out=Path(out),
        config=config or TrainConfig(),
        states_cache=states_cache,
        init_from=init_from,
        resume=resume,
        tracker=tracker,
        report=report,
        on_step=on_step,
    ).train()


def _train(run: TrainRun, parts: Prepared, processes: Processes, program: int) -> TrainResult:
    """Train what is prepared; `program` is what the process held before it began, in bytes."""
    folder, config, report = run.out, run.config, run.report
    head, training = parts.head, parts.training
    published = Publisher(
        folder,
        run.target,
        head,
        parts.source,
        parts.held_out,
        config,
        target_fingerprint=parts.target_fingerprint,
        template_hash=template_hash(parts.tokenizer),
        trained_on={
            "conversations": len(training),
            "answer_tokens": sum(s.num_answer_tokens for s in training),
        },
        report=report,
    )
    tracking = Tracking(processes.accelerator, run.tracker, folder, asdict(config))
    trainer = Trainer(
        head,
        training,
        parts.source,
        config,
        folder,
        contract=_contract(parts, config, run.init_from),
        report=report,
        on_evaluate=published,
        processes=processes,
        on_step=run.on_step,
        track=tracking.track,
    )
    if run.resume:
        path = trainer.resume()
        if path is not None:
            report(f"resuming from {path} at step {trainer.step} of {trainer.total_steps}")
    elif processes.main:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        (folder / METRICS_NAME).unlink(missing_ok=True)
    # nobody reads what the main process is about to write
    processes.wait()
    outcome = trainer.run()
    tracking.close()
    if processes.main:
        write_curve(folder)
    acceptance = published.acceptance
    speed = _speed(parts, config, processes, trainer, outcome, program) if outcome.new_steps else {}
    summary = {
        "target_fingerprint": parts.target_fingerprint,
        "template_hash": template_hash(parts.tokenizer),
        "data": str(run.data),
        "boundaries": list(head.config.boundaries),
        "steps": outcome.steps,
        "complete": outcome.complete,
        "epochs": round(outcome.epochs, 3),
        "conversations": len(training),
        "answer_tokens": sum(s.num_answer_tokens for s in training),
        "dropped": parts.chats.dropped_reasons(),
        "draft_vocab_coverage": round(parts.coverage, 4),
        "processes": processes.world,
        "rows_per_second": _rounded(outcome.rows_per_second, 1),
        "seconds": round(outcome.seconds, 1),
        **speed,
        "loss": _rounded(outcome.last_loss, 4),
        "acceptance": acceptance.to_dict() if acceptance else None,
        "engine_acceptance_length": _rounded(published.served_length, 4),
    }
    return TrainResult(
        folder=folder,
        config=config,
        outcome=outcome,
        acceptance=acceptance,
        summary=summary,
        main=processes.main,
    )


def _contract(parts: Prepared, config: TrainConfig, init_from: str | Path | None) -> dict[str, Any]:
    """What a resumed run must agree on."""
    return _options(config, parts.head.config.boundaries, init_from) | {
        "data_hash": data_hash(parts.chats),
        "target_fingerprint": parts.target_fingerprint,
    }


def _options(
    config: TrainConfig, boundaries: tuple[int, ...], init_from: str | Path | None
) -> dict[str, Any]:
    """The part of it that is known before anything is read."""
    options = {key: value for key, value in asdict(config).items() if key not in FREE_OPTIONS}
    return options | {
        "adam_betas": list(config.adam_betas),
        "boundaries": list(boundaries),
        "init_from": None if init_from is None else sha256_file(Path(init_from) / "model.safetensors"),
    }


def _speed(
    parts: Prepared,
    config: TrainConfig,
    processes: Processes,
    trainer: Trainer,
    outcome: TrainOutcome,
    program: int,
) -> dict[str, Any]:
    """Throughput beside the matrix rate of this machine, and peak memory beside the sum of its parts.

    `program` is what the process held before it began.
    """
    shape = parts.head.config
    online = parts.source.computes
    work = Work(rows=outcome.new_rows, slots=outcome.new_slots, flat_rows=outcome.flat_rows)
    flop = head_flop(shape, work) + (target_flop(parts.target_parameters, work.flat_rows) if online else 0.0)
    dtype = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
    rate = matrix_rate(processes.device, dtype)
    memory = {"program": program} | memory_parts(
        shape,
        sum(parameter.numel() for parameter in parts.head.parameters()),
        config,
        target_bytes=parts.target_bytes,
        batch_rows=trainer.largest_batch(),
        world=processes.world,
    )
    return {
        "answer_tokens_per_second": _rounded(outcome.answer_tokens_per_second, 1),
        "flop_per_second": round(flop / outcome.new_seconds, -6),
        "matrix_flop_per_second": round(rate, -6),
        "flop_utilisation": round(flop / outcome.new_seconds / (rate * processes.world), 4),
        "seconds_by_part": {name: round(value, 2) for name, value in trainer.parts.seconds.items()},
        "peak_bytes": peak_bytes(processes.device),
        "memory_parts": memory,
        "memory_parts_sum": total_bytes(memory),
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
