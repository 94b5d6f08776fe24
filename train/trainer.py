"""The training loop of a draft head.

Owns the optimiser, the order of batches, the guard against non-finite numbers, resuming, and stopping. fp32
master weights; products in bf16 under autocast when asked. A step is the same whatever the number of
processes: a batch is planned as a whole, each process computes its share, and the loss is divided by the
trained weight of the whole batch. Knows nothing of files of chats, of how target states are made, or of the
draft folder, which its caller writes when `on_evaluate` is called.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.drafts.eagle3 import Eagle3Head
from specdec.errors import SpecdecError
from specdec.train.batching import (
    epoch_plan,
    pack,
    sample_depths,
    sequence_weights,
    share_batch,
    shared_prefix_len,
    split_micro,
)
from specdec.train.checkpoint import TrainState, latest_state, load_state, save_state
from specdec.train.config import ABSENT_OPTIONS, TrainConfig
from specdec.train.loss import UnrolledLoss
from specdec.train.metrics import MetricsLog, StepNumbers
from specdec.train.objective import Objective
from specdec.train.processes import (
    Processes,
    load_optimizer,
    load_weights,
    sharded_like,
    whole,
    whole_optimizer,
)
from specdec.train.schedule import learning_rate
from specdec.train.sequences import TrainSequence
from specdec.train.states import StateSource
from specdec.train.step_parts import StepParts, memory_named

# steps timed before --max-hours is turned into a number of steps: the first ones also fill caches.
TIMING_STEPS = (10, 30)


@dataclass(frozen=True, kw_only=True)
class TrainOutcome:
    """How the loop ended: `complete` is false after a stop signal.

    `new_steps` are those of this call; speeds and loss are None without any. `new_rows`,
    `new_slots` and `flat_rows` (positions) are what this call computed, in `new_seconds`.
    """

    steps: int
    new_steps: int
    total_steps: int
    epochs: float
    slots: int
    seconds: float
    rows_per_second: float | None
    answer_tokens_per_second: float | None
    new_rows: int
    new_slots: int
    flat_rows: int
    new_seconds: float
    last_loss: float | None
    complete: bool


class Trainer:
    """Trains a head on sequences whose states come from `source`.

    Args:
        head: fp32 head; trained in place.
        sequences: training conversations, all of them in every process.
        source: target states.
        config: options.
        folder: where checkpoints and `metrics.jsonl` go.
        contract: what a resumed run must agree on.
        report: called with one line of progress.
        on_evaluate: called in the main process with the step and the weights to be served, at `eval_every`
            and at the end; returns numbers for the log.
        processes: those of the run; by itself a trainer is alone or takes the ones it was launched with.
        on_step: called in the main process after every step with the numbers of it.
        track: called in the main process with what is logged, as names and numbers, and its step.
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
        on_evaluate: Callable[[int, Mapping[str, Tensor]], Mapping[str, Any]],
        processes: Processes | None = None,
        on_step: Callable[[StepNumbers], None] = lambda numbers: None,
        track: Callable[[Mapping[str, float], int], None] = lambda values, step: None,
    ) -> None:
        self.config, self.folder, self.contract = config, folder, dict(contract)
        self.sequences, self.source = sequences, source
        self.report, self.on_evaluate, self.on_step = report, on_evaluate, on_step
        self.processes = processes or Processes(shard=config.shard_weights)
        self.head = head
        self.processes.start_alike(head)
        device = self.processes.device
        objective = Objective(head, source.output_rows(head.vocab.ids), config, device)
        self.objective = self.processes.wrap(objective)
        trained = [p for p in head.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.adam_betas, fused=not self.processes.sharded
        )
        self.average = (
            None
            if config.ema is None
            else {name: p.detach().clone() for name, p in head.named_parameters() if p.requires_grad}
        )
        prefix = shared_prefix_len(sequences)
        self.weights = [sequence_weights(sequence, config, prefix) for sequence in sequences]
        self.rows = [int((weight > 0).any(0).sum()) for weight in self.weights]
        if not sum(self.rows):
            raise SpecdecError(f"{len(sequences)} of {len(sequences)} samples have no trainable token")
        self.step = self.epoch = self.batch = self.slots = 0
        self.seconds = 0.0
        self.total_steps = config.steps or self._epoch_steps()
        self._stop = threading.Event()
        self.parts = StepParts()
        self.log = MetricsLog(folder, report, writes=self.processes.main, track=track)

    def _epoch_steps(self) -> int:
        """Steps of the configured number of epochs, a last part of an epoch included."""
        whole_epochs, part = divmod(self.config.epochs, 1.0)
        lengths = [len(self.plan(epoch)) for epoch in range(math.ceil(self.config.epochs))]
        return max(
            1,
            sum(lengths[: int(whole_epochs)]) + (round(lengths[int(whole_epochs)] * part) if part else 0),
        )

    def plan(self, epoch: int) -> list[list[int]]:
        """Batches of an epoch, over all processes, as sequence indices."""
        return epoch_plan(self.rows, self.config.batch_rows, self.config.seed, epoch)

    def largest_batch(self) -> int:
        """Positions of the largest share of a process in the first epoch."""
        shares = (
            share for batch in self.plan(0) for share in share_batch(batch, self.rows, self.processes.world)
        )
        return max(sum(len(self.sequences[index].token_ids) - 1 for index in share) for share in shares)

    def resume(self) -> Path | None:
        """Take up the newest checkpoint, if there is one; it may come from another number of processes."""
        path = self.processes.from_main(latest_state(self.folder) if self.processes.main else None)
        if path is None:
            return None
        state = self.processes.from_main(
            load_state(path, self.contract, ABSENT_OPTIONS) if self.processes.main else None
        )
        load_weights(self.head, state.weights)
        load_optimizer(self.optimizer, state.optimizer)
        if self.average is not None:
            assert state.average is not None, "the contract holds whether there is an average"
            averages = state.average
            self.average = {name: sharded_like(averages[name], own) for name, own in self.average.items()}
        torch.set_rng_state(state.rng)
        self.step, self.epoch, self.batch = state.step, state.epoch, state.batch
        self.total_steps, self.slots, self.seconds = state.total_steps, state.slots_seen, state.seconds
        self.log.cut(self.step)
        return path

    def served_weights(self) -> dict[str, Tensor]:
        """The weights to measure and to save as a draft, whole: averages where the run keeps them."""
        tensors = self.head.state_dict() | (self.average or {})
        return {name: whole(tensor.detach()).cpu() for name, tensor in tensors.items()}

    def save(self) -> Path | None:
        """Write a checkpoint of the current position; only the main process writes, and gives the path."""
        average = self.average and {name: whole(tensor).cpu() for name, tensor in self.average.items()}
        state = TrainState(
            step=self.step,
            epoch=self.epoch,
            batch=self.batch,
            total_steps=self.total_steps,
            slots_seen=self.slots,
            seconds=self.seconds,
            weights={name: whole(tensor.detach()).cpu() for name, tensor in self.head.state_dict().items()},
            optimizer=whole_optimizer(self.optimizer.state_dict()),
            rng=torch.get_rng_state(),
            contract=self.contract,
            average=average,
        )
        if not self.processes.main:
            return None
        return save_state(self.folder, state, keep=self.config.keep_checkpoints)

    def run(self) -> TrainOutcome:
        """Train to the end, or until SIGTERM reaches a process: then save and return."""
        previous = None
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        begun, before, timed = time.monotonic(), self.seconds, 0.0
        done = {"rows": 0, "answers": 0, "flat": 0, "slots": 0}
        first, stopped = self.step, False
        numbers: StepNumbers | None = None
        try:
            plan = self.plan(self.epoch)
            while self.step < self.total_steps and not stopped:
                if self.batch >= len(plan):
                    self.epoch, self.batch = self.epoch + 1, 0
                    plan = self.plan(self.epoch)
                measure = (self.step + 1) % self.config.log_every == 0 or self.step == 0
                batch = plan[self.batch]
                numbers, stopped = self._step(batch, measure)
                # several processes must agree, and do so in the step; one sees the signal at once
                stopped |= self.processes.world == 1 and self._stop.is_set()
                self.step, self.batch = self.step + 1, self.batch + 1
                self.slots += numbers.num_slots
                done["slots"] += numbers.num_slots
                done["rows"] += sum(self.rows[index] for index in batch)
                done["answers"] += sum(self.sequences[index].num_answer_tokens for index in batch)
                done["flat"] += sum(len(self.sequences[index].token_ids) - 1 for index in batch)
                self.seconds = before + time.monotonic() - begun
                passed = max(self.seconds - before, 1e-9)
                numbers = numbers.timed(
                    step=self.step,
                    total_steps=self.total_steps,
                    epoch=self.epoch,
                    rows_per_second=done["rows"] / passed,
                    answer_tokens_per_second=done["answers"] / passed,
                    eta_seconds=(self.total_steps - self.step) * self.seconds / self.step,
                )
                if self.step - first == TIMING_STEPS[0]:
                    timed = time.monotonic()
                if self.step - first == TIMING_STEPS[1] and self.config.max_hours is not None:
                    now = time.monotonic()
                    self._fit_to_hours(now - timed, self.config.max_hours * 3600 - (now - begun))
                self.on_step(numbers)
                if measure:
                    self.log.step(numbers)
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
            rows_per_second=numbers.rows_per_second if numbers else None,
            answer_tokens_per_second=numbers.answer_tokens_per_second if numbers else None,
            new_rows=done["rows"],
            new_slots=done["slots"],
            flat_rows=done["flat"],
            new_seconds=self.seconds - before,
            last_loss=numbers.loss if numbers else None,
            complete=complete,
        )

    def _fit_to_hours(self, seconds: float, left: float) -> None:
        """Shorten the run, once, to what fits in `left` seconds; the schedule then ends with it."""
        per_step = seconds / (TIMING_STEPS[1] - TIMING_STEPS[0])
        fitting = self.processes.from_main(self.step + max(0, int(left / per_step)))
        if fitting < self.total_steps:
            asked, hours = self.total_steps, self.config.max_hours
            self.report(f"--max-hours {hours:g}: ends at step {fitting}, not {asked} as asked for")
            self.total_steps = max(fitting, self.step + 1)

    def _step(self, batch: Sequence[int], measure: bool) -> tuple[StepNumbers, bool]:
        """One optimiser step; also whether a process was told to stop."""
        rate = learning_rate(self.step, self.total_steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        found, stopped = self.gradients(batch, measure)
        self._guard(found.loss, "loss", batch)
        parameters = list(self.head.parameters())
        norm = float(whole(nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)))
        self._guard(norm, "gradient norm", batch)
        with self.parts.timed("optimiser"):
            self.optimizer.step()
            self._average()
        return found.stepped(grad_norm=norm, lr=rate), stopped

    @torch.no_grad()
    def _average(self) -> None:
        if self.average is None:
            return
        assert self.config.ema is not None, "an average is kept when asked for"
        for name, parameter in self.head.named_parameters():
            if name in self.average:
                self.average[name].lerp_(parameter, 1 - self.config.ema)

    def gradients(self, batch: Sequence[int], measure: bool) -> tuple[StepNumbers, bool]:
        """Gradients of a batch, normalised by the trained weight of all of it, over all processes."""
        weights = {index: self.weights[index] for index in batch}
        if self.config.depth_sampling:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
            weights = {i: sample_depths(w, self.config.step_weight, generator) for i, w in weights.items()}
        total = float(sum(weight.sum() for weight in weights.values()))
        world = self.processes.world
        micros = [
            split_micro(share, self.rows, self.config.micro_batch_rows) if share else []
            for share in share_batch(batch, self.rows, world)
        ]
        mine = micros[self.processes.rank]
        count = max(len(each) for each in micros)
        steps = self.config.unroll
        # loss, stop, then per step: slots, greedy agreement, overlap
        sums = torch.zeros(2 + 3 * steps, dtype=torch.float64)
        sums[1] = float(self._stop.is_set())
        for number in range(count):
            # every process takes part in as many passes: one without work repeats a sequence for nothing
            idle = number >= len(mine)
            micro = [self._smallest(batch)] if idle else mine[number]
            sequences = [self.sequences[index] for index in micro]
            with (
                memory_named(partial(self._described, micro, batch)),
                self.processes.backward_pass(last=number == count - 1),
            ):
                with self.parts.timed("states"):
                    states = self.source.fetch(sequences)
                packed = pack(sequences, states, [weights[index] for index in micro])
                with self.parts.timed("forward and loss"):
                    output: UnrolledLoss = self.objective(packed.to(self.processes.device), measure)
                loss = output.loss * 0 if idle else output.loss
                with self.parts.timed("backward"):
                    self.processes.accelerator.backward(loss * world / total)
            if not idle:
                sums[0] += float(output.loss.detach())
                sums[2:] += torch.cat((output.slots, output.hits, output.overlap)).double().cpu()
        sums = self.processes.total(sums)
        slots, hits, overlap = sums[2:].view(3, steps).tolist()
        return StepNumbers(
            loss=float(sums[0]) / total,
            num_slots=int(sum(slots)),
            greedy=tuple(hit / max(1.0, n) for hit, n in zip(hits, slots, strict=True)),
            overlap=tuple(part / max(1.0, n) for part, n in zip(overlap, slots, strict=True)),
        ), bool(sums[1])

    def _smallest(self, batch: Sequence[int]) -> int:
        return min((index for index in batch if self.rows[index]), key=lambda index: self.rows[index])

    def _described(self, micro: Sequence[int], batch: Sequence[int]) -> str:
        longest = max(len(self.sequences[index].token_ids) for index in micro)
        return (
            f"step {self.step + 1}: {sum(self.rows[i] for i in micro)} rows of "
            f"{sum(self.rows[i] for i in batch)} in the batch, longest conversation {longest} tokens, "
            f"draft vocabulary {len(self.head.vocab)}"
        )

    def _guard(self, value: float, what: str, batch: Sequence[int]) -> None:
        """Stop before the weights are touched by a number that is not finite."""
        if math.isfinite(value):
            return
        names = ", ".join(self.sequences[index].id for index in batch[:8])
        kept = latest_state(self.folder)
        raise SpecdecError(
            f"{what} ({value}) of step {self.step + 1} is not finite, in a batch of samples {names}; the "
            f"weights are as after step {self.step}, the last checkpoint is {kept.name if kept else 'none'}. "
            "Lower --lr or leave the sample out"
        )

    def _evaluate(self) -> None:
        weights = self.served_weights()
        if self.processes.main:
            self.log.evaluation(self.step, self.epoch, self.on_evaluate(self.step, weights))
        self.processes.wait()
