"""What a run says of itself on the way: the numbers of a step, `metrics.jsonl`, and a line of progress.

Owns the fields of the log and its repair after a kill. Knows nothing of how the numbers came about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import writing
from specdec.provenance import write_text_atomic

METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Of one optimiser step, over all processes.

    `greedy` and `overlap` by unroll step are what simulated chains of drafts would get accepted, greedily and
    when sampling (0 where not measured); speeds are those of the run so far, `eta_seconds` what is left.
    """

    loss: float
    num_slots: int
    greedy: tuple[float, ...]
    overlap: tuple[float, ...]
    grad_norm: float = 0.0
    lr: float = 0.0
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    rows_per_second: float = 0.0
    answer_tokens_per_second: float = 0.0
    eta_seconds: float = 0.0

    def stepped(self, *, grad_norm: float, lr: float) -> StepNumbers:
        """The same with what the optimiser did."""
        return replace(self, grad_norm=grad_norm, lr=lr)

    def timed(
        self,
        *,
        step: int,
        total_steps: int,
        epoch: int,
        rows_per_second: float,
        answer_tokens_per_second: float,
        eta_seconds: float,
    ) -> StepNumbers:
        """The same with where the run is."""
        return replace(
            self,
            step=step,
            total_steps=total_steps,
            epoch=epoch,
            rows_per_second=rows_per_second,
            answer_tokens_per_second=answer_tokens_per_second,
            eta_seconds=eta_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """One line of `metrics.jsonl`."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "slots": self.num_slots,
            "greedy": [round(value, 4) for value in self.greedy],
            "overlap": [round(value, 4) for value in self.overlap],
            "rows_per_second": round(self.rows_per_second, 1),
            "answer_tokens_per_second": round(self.answer_tokens_per_second, 1),
        }

    def line(self) -> str:
        """One line for a reader."""
        greedy = " ".join(f"{value:.3f}" for value in self.greedy)
        overlap = " ".join(f"{value:.3f}" for value in self.overlap)
        return (
            f"step {self.step}/{self.total_steps} epoch {self.epoch} loss {self.loss:.4f} greedy {greedy} "
            f"overlap {overlap} lr {self.lr:.2e} {self.answer_tokens_per_second:.0f} answer tokens/s "
            f"{self.rows_per_second:.0f} rows/s eta {self.eta_seconds / 60:.0f} min"
        )


class MetricsLog:
    """`metrics.jsonl` of a run folder, and the lines said meanwhile; silent where `writes` is false."""

    def __init__(
        self,
        folder: Path,
        report: Callable[[str], None],
        *,
        writes: bool,
        track: Callable[[Mapping[str, float], int], None] = lambda values, step: None,
    ) -> None:
        self.path, self.report, self.writes = folder / METRICS_NAME, report, writes
        self.track = track

    def step(self, numbers: StepNumbers) -> None:
        """Log a measured step."""
        if self.writes:
            self.report(numbers.line())
            self._append(numbers.to_dict())
            self.track(flat(numbers.to_dict()), numbers.step)

    def evaluation(self, step: int, epoch: int, found: Mapping[str, Any]) -> None:
        """Log a measurement of the draft."""
        if self.writes:
            self._append({"step": step, "epoch": epoch, "eval": dict(found)})
            self.track({f"eval/{name}": value for name, value in flat(found).items()}, step)

    def _append(self, entry: Mapping[str, Any]) -> None:
        with writing(str(self.path)), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def cut(self, step: int) -> None:
        """Drop what a killed run logged after the checkpoint it is resumed from."""
        if not self.writes or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        write_text_atomic(self.path, "".join(line + "\n" for line in kept))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers under names, `greedy/1` for the first of several: what trackers take."""
    found: dict[str, float] = {}
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, Mapping):
            found |= flat(value, key + "/")
        elif isinstance(value, list | tuple):
            found |= {
                f"{key}/{number}": float(item)
                for number, item in enumerate(value, 1)
                if isinstance(item, int | float)
            }
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = float(value)
    return found
