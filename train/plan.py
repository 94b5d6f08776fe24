"""What a training run would take, before it is started: size, memory, steps, disk and time.

Owns the measurement of a few steps, which changes nothing, and the sums. Knows nothing of the command line.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.train.checkpoint import FOLDER
from specdec.train.config import TrainConfig
from specdec.train.prepare import Prepared
from specdec.train.processes import Processes
from specdec.train.throughput import memory_parts, total_bytes
from specdec.train.trainer import Trainer

# batches that are timed; one more warms up
TIMED_STEPS = 2
# names and numbers of a saved state beside its tensors
OVERHEAD_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Bytes are of one process; `seconds` are those of training, of filling a store and of the whole."""

    trained_parameters: int
    processes: int
    conversations: int
    held_out: int
    answer_tokens: int
    rows_per_epoch: int
    steps: int
    memory: Mapping[str, int]
    memory_sum: int
    draft_bytes: int
    checkpoint_bytes: int
    checkpoints_kept: int
    states_bytes: int
    disk_bytes: int
    disk_free_bytes: int
    seconds_per_step: float
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return asdict(self)


def make_plan(parts: Prepared, out: Path, config: TrainConfig, processes: Processes) -> TrainPlan:
    """Sums over what is prepared, and a few steps timed without touching weights.

    Raises:
        SpecdecError: the disk lacks room for what the run would write.
    """
    trainer = Trainer(
        parts.head,
        parts.training,
        parts.source,
        config,
        out / FOLDER,
        contract={},
        report=lambda line: None,
        on_evaluate=lambda step, weights: {},
        processes=processes,
    )
    trained = sum(parameter.numel() for parameter in parts.head.parameters() if parameter.requires_grad)
    memory = memory_parts(
        parts.head.config,
        trained,
        config,
        target_bytes=parts.target_bytes,
        batch_rows=trainer.largest_batch(),
        world=processes.world,
    )
    # fp32 weights, two moments, and the averages
    checkpoint = trained * (16 if config.ema is not None else 12) + OVERHEAD_BYTES
    draft = 2 * trained + OVERHEAD_BYTES
    # one more exists while the oldest is still there
    disk = draft + (config.keep_checkpoints + 1) * checkpoint + parts.states_bytes
    place = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if disk > free:
        raise SpecdecError(
            f"--out ({out}) and --states-cache need {disk / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; "
            "free space, lower --keep, or use --states-cache online"
        )
    per_step = _seconds_per_step(trainer)
    return TrainPlan(
        trained_parameters=trained,
        processes=processes.world,
        conversations=len(parts.training),
        held_out=len(parts.held_out),
        answer_tokens=sum(sequence.num_answer_tokens for sequence in parts.training),
        rows_per_epoch=sum(trainer.rows),
        steps=trainer.total_steps,
        memory=memory,
        memory_sum=total_bytes(memory),
        draft_bytes=draft,
        checkpoint_bytes=checkpoint,
        checkpoints_kept=config.keep_checkpoints,
        states_bytes=parts.states_bytes,
        disk_bytes=disk,
        disk_free_bytes=free,
        seconds_per_step=per_step,
        seconds=per_step * trainer.total_steps,
    )


def _seconds_per_step(trainer: Trainer) -> float:
    """Mean over a few batches of the first epoch, target states computed on the way."""
    batches = trainer.plan(0)
    timed = [batches[number % len(batches)] for number in range(TIMED_STEPS + 1)]
    begun = 0.0
    for number, batch in enumerate(timed):
        if number == 1:
            begun = time.monotonic()
        trainer.gradients(batch, measure=False)
        trainer.optimizer.zero_grad(set_to_none=True)
    return (time.monotonic() - begun) / TIMED_STEPS
