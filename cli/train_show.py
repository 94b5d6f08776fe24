"""What `specdec train` shows: a bar, the plan of a dry run, acceptance and speed at the end.

Owns the tables and the words. Knows nothing of how the numbers came about.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specdec.cli.console import Bar, print_table, say

if TYPE_CHECKING:
    from specdec.train.metrics import StepNumbers
    from specdec.train.plan import TrainPlan
    from specdec.train.run import TrainResult


@contextmanager
def step_bar() -> Iterator[Callable[[StepNumbers], None]]:
    """A bar over optimiser steps on a terminal; a log has the lines of progress instead."""
    bar: Bar | None = None
    measured = ""

    def show(numbers: StepNumbers) -> None:
        nonlocal bar, measured
        if not sys.stderr.isatty():
            return
        if bar is None:
            bar = Bar("training", numbers.total_steps)
        if any(numbers.greedy):
            measured = " accepted " + " ".join(f"{share:.2f}" for share in numbers.greedy)
        bar.update(
            numbers.step,
            f"loss {numbers.loss:.3f}{measured} {numbers.answer_tokens_per_second:.0f} tokens/s",
        )

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def show_plan(plan: TrainPlan) -> None:
    """The tables of a dry run."""
    print_table(
        "Plan of the run; nothing was written",
        ["what", "value"],
        [
            ["trained weights", f"{plan.trained_parameters:,}"],
            ["processes", plan.processes],
            ["conversations, held out", f"{plan.conversations:,}, {plan.held_out:,}"],
            ["answer tokens", f"{plan.answer_tokens:,}"],
            ["rows an epoch", f"{plan.rows_per_epoch:,}"],
            ["optimiser steps", f"{plan.steps:,}"],
            ["draft on disk", _size(plan.draft_bytes)],
            ["checkpoints on disk", f"{plan.checkpoints_kept} x {_size(plan.checkpoint_bytes)}"],
            ["target states on disk", _size(plan.states_bytes)],
            ["disk in all, free", f"{_size(plan.disk_bytes)}, {_size(plan.disk_free_bytes)}"],
            ["seconds a step, measured", f"{plan.seconds_per_step:.3f}"],
            ["training time", f"{plan.seconds / 3600:.2f} h"],
        ],
    )
    print_table(
        f"Memory of a process, estimated: {_size(plan.memory_sum)}",
        ["part", "size"],
        [[part, _size(size)] for part, size in plan.memory.items() if size],
    )


def show_result(result: TrainResult) -> None:
    """Acceptance on held-out text as a table, speed and memory as lines."""
    found, summary = result.acceptance, result.summary
    if "flop_utilisation" in summary:
        say(
            f"{summary['answer_tokens_per_second']:.0f} answer tokens/s; products at "
            f"{summary['flop_per_second'] / 1e9:.0f} GFLOP/s, {summary['flop_utilisation']:.0%} of the "
            f"{summary['matrix_flop_per_second'] / 1e9:.0f} measured for a large one; peak memory "
            f"{_size(summary['peak_bytes'])}, of which {_size(summary['memory_parts_sum'])} are weights, "
            "optimiser, states, activations and the program"
        )
    if found is None:
        return
    rows = [
        [depth + 1, conditional, unconditional]
        for depth, (conditional, unconditional) in enumerate(
            zip(found.conditional, found.unconditional, strict=True)
        )
    ]
    print_table(
        f"Offline acceptance, greedy chain of {found.depth}, n={found.sequences} held-out conversations: "
        f"{found.acceptance_length or 0:.3f} tokens a verify step",
        ["depth", "accepted given the one before", "accepted"],
        rows,
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
