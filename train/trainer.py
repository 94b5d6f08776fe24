"""The training loop of a draft head.

Owns the optimiser, the schedule, the order of batches, the guard against non-finite numbers, resuming, and
the log. fp32 master weights; products in bf16 under autocast when asked. Knows nothing of files of chats,
of how target states are made, or of the draft folder, which its caller writes when `on_evaluate` is called.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from specdec.drafts.eagle3 import Eagle3Head
from specdec.errors import SpecdecError, writing
from specdec.provenance import write_text_atomic
from specdec.train.batching import (
    RowBatch,
    epoch_plan,
    pack,
    sample_depths,
    sequence_weights,
    shared_prefix_len,
    split_micro,
)
from specdec.train.checkpoint import TrainState, latest_state, load_state, save_state
from specdec.train.config import TrainConfig
from specdec.train.loss import LossOptions, Teacher, UnrolledLoss, unrolled_loss
from specdec.train.packed_rows import packed_rows
from specdec.train.sequences import TrainSequence
from specdec.train.states import StateSource

# steps timed before --max-hours is turned into a number of steps: the first ones also fill caches.
TIMING_STEPS = (10, 30)
METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """How the loop ended: `complete` is false after a stop signal.

    `new_steps` are those of this call; speed and loss are None without any.
    """

    steps: int
    new_steps: int
    total_steps: int
    epochs: float
    slots: int
    seconds: float
    rows_per_second: float | None
    last_loss: float | None
    complete: bool


class Objective(nn.Module):
    """A head and the loss of a batch: the module whose forward is wrapped for mixed precision."""

    def __init__(
        self, head: Eagle3Head, teacher_rows: Tensor, config: TrainConfig, device: torch.device
    ) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self.compute_dtype = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
        self.register_buffer("teacher_rows", teacher_rows, persistent=False)
        self._packed_rows = packed_rows(teacher_rows.to(device))
        # a shift common to all logits changes no probability; without it bf16 logits are small and finer.
        centred = teacher_rows - teacher_rows.mean(0)
        self.register_buffer("student_rows", centred.to(self.compute_dtype), persistent=False)
        self.register_buffer("draft_ids", head.vocab.draft_ids(), persistent=False)

    teacher_rows: Tensor
    student_rows: Tensor
    draft_ids: Tensor

    def forward(self, batch: RowBatch, measure: bool) -> UnrolledLoss:
        """Weighted loss sum of the batch, with acceptance counts when `measure`."""
        own = self.head.config.lm_head == "own"
        teacher = Teacher(
            batch.final,
            batch.log_norm,
            self.teacher_rows,
            self.draft_ids[batch.argmax.long()],
            self.config.distill_top_k,
            self._packed_rows,
        )
        options = LossOptions(self.config.loss, self.config.loss_chunk_rows, self.compute_dtype, measure)
        weight = self.head.head_weight if own else self.student_rows
        mixed = self.compute_dtype == torch.bfloat16
        with torch.autocast(batch.final.device.type, dtype=torch.bfloat16, enabled=mixed):
            return unrolled_loss(self.head, batch, teacher, weight, options)


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Rate of optimiser step `step` (from 0): linear warm-up, cosine to `min_lr_ratio` at the last step."""
    warmup = max(1, round(total * config.warmup_ratio))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, total - warmup)
    share = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


class Trainer:
    """Trains a head on sequences whose states come from `source`.

    Args:
        head: fp32 head; trained in place.
        sequences: training conversations.
        source: target states.
        config: options.
        folder: where checkpoints and `metrics.jsonl` go.
        contract: what a resumed run must agree on.
        report: called with one line of progress.
        on_evaluate: called with the step, at `eval_every` and at the end; returns numbers for the log.
    """

    def __init__(
        self,
        head: Eagle3Head,
        sequences: Sequence[TrainSequence],
        source: StateSource,
        config: TrainConfig,
        folder: Path,
        *,
        contract: Mapping[str, Any],
        report: Callable[[str], None],
        on_evaluate: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self.config, self.folder, self.contract = config, folder, dict(contract)
        self.sequences, self.source = sequences, source
        self.report, self.on_evaluate = report, on_evaluate
        # the objective does its own casting: accelerate fixes one precision for the life of a process.
        self.accelerator = Accelerator(mixed_precision="no")
        if self.accelerator.num_processes != 1:
            raise SpecdecError(
                f"num_processes ({self.accelerator.num_processes}) must be 1: training on several "
                f"processes is not "
                "supported; start without accelerate launch"
            )
        self.head = head
        objective = Objective(head, source.output_rows(head.vocab.ids), config, self.accelerator.device)
        decayed = [p for p in head.parameters() if p.requires_grad and p.dim() > 1]
        plain = [p for p in head.parameters() if p.requires_grad and p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.adam_betas, fused=True)
        self.objective, self.optimizer = self.accelerator.prepare(objective, optimizer)
        prefix = shared_prefix_len(sequences)
        self.weights = [sequence_weights(sequence, config, prefix) for sequence in sequences]
        self.rows = [int((weight > 0).any(0).sum()) for weight in self.weights]
        if not sum(self.rows):
            raise SpecdecError(f"{len(sequences)} of {len(sequences)} samples have no trainable token")
        self.step = self.epoch = self.batch = self.slots = 0
        self.seconds = 0.0
        self.total_steps = config.steps or self._epoch_steps()
        self._stop = threading.Event()

    def _epoch_steps(self) -> int:
        """Steps of the configured number of epochs, a last part of an epoch included."""
        whole, part = divmod(self.config.epochs, 1.0)
        lengths = [len(self._plan(epoch)) for epoch in range(math.ceil(self.config.epochs))]
        return max(1, sum(lengths[: int(whole)]) + (round(lengths[int(whole)] * part) if part else 0))

    def _plan(self, epoch: int) -> list[list[int]]:
        return epoch_plan(self.rows, self.config.batch_rows, self.config.seed, epoch)

    def resume(self) -> Path | None:
        """Take up the newest checkpoint, if there is one."""
        path = latest_state(self.folder)
        if path is None:
            return None
        state = load_state(path, self.contract)
        self.head.load_state_dict(state.weights)
        self.optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng)
        self.step, self.epoch, self.batch = state.step, state.epoch, state.batch
        self.total_steps, self.slots, self.seconds = state.total_steps, state.slots_seen, state.seconds
        self._cut_metrics()
        return path

    def save(self) -> Path:
        """Write a checkpoint of the current position."""
        state = TrainState(
            step=self.step,
            epoch=self.epoch,
            batch=self.batch,
            total_steps=self.total_steps,
            slots_seen=self.slots,
            seconds=self.seconds,
            weights={name: tensor.detach().cpu() for name, tensor in self.head.state_dict().items()},
            optimizer=self.optimizer.state_dict(),
            rng=torch.get_rng_state(),
            contract=self.contract,
        )
        return save_state(self.folder, state, keep=self.config.keep_checkpoints)

    def run(self) -> TrainOutcome:
        """Train to the end, or until SIGTERM: then save and return."""
        previous = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        begun, before, timed = time.monotonic(), self.seconds, 0.0
        rows_done, rate = 0, 0.0
        loss: float | None = None
        first = self.step
        try:
            plan = self._plan(self.epoch)
            while self.step < self.total_steps and not self._stop.is_set():
                if self.batch >= len(plan):
                    self.epoch, self.batch = self.epoch + 1, 0
                    plan = self._plan(self.epoch)
                measure = (self.step + 1) % self.config.log_every == 0 or self.step == 0
                numbers = self._step(plan[self.batch], measure)
                self.step, self.batch = self.step + 1, self.batch + 1
                rows_done += numbers["rows"]
                self.slots += numbers["slots"]
                loss = numbers["loss"]
                self.seconds = before + time.monotonic() - begun
                rate = rows_done / max(self.seconds - before, 1e-9)
                if self.step - first == TIMING_STEPS[0]:
                    timed = time.monotonic()
                if self.step - first == TIMING_STEPS[1] and self.config.max_hours is not None:
                    now = time.monotonic()
                    self._fit_to_hours(now - timed, self.config.max_hours * 3600 - (now - begun))
                if measure:
                    self._log(numbers, rate)
                if self.step % self.config.save_every == 0 and self.step < self.total_steps:
                    self.save()
                if self.step % self.config.eval_every == 0 and self.step < self.total_steps:
                    self._evaluate()
        finally:
            if previous is not None:
                signal.signal(signal.SIGTERM, previous)
        complete = self.step >= self.total_steps
        path = self.save()
        if not complete:
            self.report(
                f"stopped at step {self.step} of {self.total_steps}, saved {path}; the same command goes on"
            )
        else:
            self._evaluate()
        return TrainOutcome(
            steps=self.step,
            new_steps=self.step - first,
            total_steps=self.total_steps,
            epochs=self.epoch + self.batch / max(1, len(plan)),
            slots=self.slots,
            seconds=self.seconds,
            rows_per_second=rate or None,
            last_loss=loss,
            complete=complete,
        )

    def _fit_to_hours(self, seconds: float, left: float) -> None:
        """Shorten the run, once, to what fits in `left` seconds; the schedule then ends with it."""
        per_step = seconds / (TIMING_STEPS[1] - TIMING_STEPS[0])
        fitting = self.step + max(0, int(left / per_step))
        if fitting < self.total_steps:
            self.report(
                f"--max-hours {self.config.max_hours:g}: ends at step {fitting}, not {self.total_steps} as "
                f"asked for"
            )
            self.total_steps = max(fitting, self.step + 1)

    def _step(self, batch: Sequence[int], measure: bool) -> dict[str, Any]:
        """One optimiser step, normalised by the trained weight of the whole batch."""
        weights = {index: self.weights[index] for index in batch}
        if self.config.depth_sampling:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
            weights = {i: sample_depths(w, self.config.step_weight, generator) for i, w in weights.items()}
        total = float(sum(weight.sum() for weight in weights.values()))
        rate = learning_rate(self.step, self.total_steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[float] = []
        outputs: list[UnrolledLoss] = []
        for micro in split_micro(batch, self.rows, self.config.micro_batch_rows):
            sequences = [self.sequences[index] for index in micro]
            packed = pack(sequences, self.source.fetch(sequences), [weights[index] for index in micro])
            output: UnrolledLoss = self.objective(packed.to(self.accelerator.device), measure)
            self._guard(float(output.loss.detach()), "loss", batch)
            self.accelerator.backward(output.loss / total)
            losses.append(float(output.loss.detach()))
            outputs.append(output)
        norm = float(self.accelerator.clip_grad_norm_(self.head.parameters(), self.config.clip_norm))
        self._guard(norm, "gradient norm", batch)
        self.optimizer.step()
        slots = torch.stack([output.slots for output in outputs]).sum(0)
        hits = torch.stack([output.hits for output in outputs]).sum(0)
        overlap = torch.stack([output.overlap for output in outputs]).sum(0)
        return {
            "loss": sum(losses) / total,
            "grad_norm": norm,
            "lr": rate,
            "rows": sum(self.rows[index] for index in batch),
            "slots": int(slots.sum()),
            "greedy": [round(float(h) / max(1, int(n)), 4) for h, n in zip(hits, slots, strict=True)],
            "overlap": [round(float(a) / max(1, int(n)), 4) for a, n in zip(overlap, slots, strict=True)],
        }

    def _guard(self, value: float, what: str, batch: Sequence[int]) -> None:
        """Stop before the weights are touched by a number that is not finite."""
        if math.isfinite(value):
            return
        names = ", ".join(self.sequences[index].id for index in batch[:8])
        kept = latest_state(self.folder)
        raise SpecdecError(
            f"{what} ({value}) of step {self.step + 1} is not finite, in a batch of samples {names}; the "
            f"weights are "
            f"as after step {self.step}, the last checkpoint is {kept.name if kept else 'none'}. "
            "Lower --lr or leave the sample out"
        )

    def _evaluate(self) -> None:
        self._write({"step": self.step, "epoch": self.epoch, "eval": dict(self.on_evaluate(self.step))})

    def _log(self, numbers: Mapping[str, Any], rate: float) -> None:
        left = (self.total_steps - self.step) * self.seconds / max(1, self.step)
        greedy = " ".join(f"{value:.3f}" for value in numbers["greedy"])
        overlap = " ".join(f"{value:.3f}" for value in numbers["overlap"])
        self.report(
            f"step {self.step}/{self.total_steps} epoch {self.epoch} loss {numbers['loss']:.4f} greedy "
            f"{greedy} "
            f"overlap {overlap} lr {numbers['lr']:.2e} {rate:.0f} rows/s eta {left / 60:.0f} min"
        )
        kept = {key: value for key, value in numbers.items() if key != "rows"}
        self._write({"step": self.step, "epoch": self.epoch, **kept, "rows_per_second": round(rate, 1)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        path = self.folder / METRICS_NAME
        with writing(str(path)), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _cut_metrics(self) -> None:
        """Drop what a killed run logged after the checkpoint it is resumed from."""
        path = self.folder / METRICS_NAME
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= self.step]
        write_text_atomic(path, "".join(line + "\n" for line in kept))
