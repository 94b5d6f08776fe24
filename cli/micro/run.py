"""`specdec bench --micro`: kernels, steps and the cost of verifying, beside what the machine can do at best.

Owns the plan by device, the tables and the record. The limits (copy bandwidth, matrix rate) are measured
before and after everything else in the same process; a figure's share of them is of the better of both.
Random weights and simulated acceptance serve as well as real ones: `specdec bench random:llama-3.1-8b
--micro --device cuda`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.cli.console import print_table, progress, say
from specdec.cli.micro.attention import attention_case
from specdec.cli.micro.kernels import kernel_cases
from specdec.cli.micro.shapes import OURS, KernelCase, MicroShape
from specdec.cli.micro.steps import StepPlan, decode_steps, step_engine, step_shares, verify_curve
from specdec.cli.micro.timing import Clock, Limits, Timing, measure_limits
from specdec.cli.outputs import require_own_result, require_writable
from specdec.cli.usage import flags_of, usage_errors
from specdec.config import EngineConfig, ModelConfig
from specdec.device.selection import device_operations
from specdec.engine import Engine
from specdec.engine_setup import DTYPES
from specdec.errors import UsageError
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, write_json_atomic
from specdec.random_target import is_random

SCHEMA = "specdec.micro/1"
DEFINITIONS = {
    "gb_per_s": "bytes that must be read and written at least / median time",
    "bandwidth_share": "gb_per_s over the copy bandwidth of this machine, measured in this run",
    "tflop_per_s": "operations of matrix products / median time",
    "matrix_share": "tflop_per_s over the rate of a large matrix product in this dtype, measured in this run",
    "speedup": "median time of a baseline over ours; below 1 the baseline is faster",
    "shares": "of a step's wall time, by the host's clock; on a card launches are asynchronous, so the wait "
    "for the target's logits falls to sample",
    "host_share": "share of a profiled run of steps in which the host works alone: on a card 1 - its "
    "kernels' time / wall time; on a processor 1 - time inside torch's operators / wall time, with the "
    "profiler's own cost",
    "relative": "median time of a pass over m rows a sequence over that of one row, T(m)/T(1)",
    "weight_streaming_share": "time of reading the weights once at copy bandwidth over a plain step's time",
}


@dataclass(frozen=True, kw_only=True)
class MicroPlan:
    """What to measure; the fields are the options of `specdec bench --micro`."""

    target: str
    device: str
    dtype: str
    deterministic: bool
    rounds: int
    trace: Path | None
    out: Path | None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """(sequences, rows of context, nodes) of the attention cases, and of the other kernels' one case."""

    attention: tuple[tuple[int, int, int], ...]
    prefill: tuple[int, int, int]
    kernels: tuple[int, int, int]


# on a card the sizes that issue 5 sets targets for; on a processor what two cores do in milliseconds
SIZES = {
    "cuda": Sizes(
        attention=((1, 8192, 1), (8, 8192, 1), (1, 8192, 64), (8, 8192, 64), (1, 32768, 64)),
        prefill=(1, 8192, 1024),
        kernels=(8, 8192, 64),
    ),
    "cpu": Sizes(
        attention=((1, 1024, 1), (1, 1024, 8), (1, 1024, 16), (8, 1024, 1)),
        prefill=(1, 512, 256),
        kernels=(1, 1024, 8),
    ),
}


def run_micro(plan: MicroPlan) -> dict[str, Any]:
    """Measure, print the tables, write `--out` and `--trace`; returns the summary for the JSON line."""
    for option, path in (("--out", plan.out), ("--trace", plan.trace)):
        if path is not None:
            require_writable(option, path)
    if plan.out is not None:
        require_own_result("--out", plan.out, "micro")
    if plan.out is not None and plan.trace is not None and plan.out.resolve() == plan.trace.resolve():
        raise UsageError(f"--trace ({plan.trace}) is the file that --out writes; name another file")
    with usage_errors(flags_of({"device": 0, "dtype": 0}, {})):
        config = EngineConfig(
            device=plan.device, dtype=plan.dtype, deterministic=plan.deterministic, kv_tokens=1024
        )
    # a card or kernels that are not there, before anything is made on them
    device_operations(config, DTYPES[plan.dtype])
    folder = resolve_target(plan.target)
    model = ModelConfig.from_folder(folder)
    clock = Clock(plan.device, rounds=plan.rounds)
    dtype = DTYPES[plan.dtype]
    before = measure_limits(clock, dtype)
    kernels = [_measure(clock, case) for case in _cases(plan, model)]
    plain = Engine(str(folder), config=config)
    steps_plan = StepPlan(target=plan.target, config=config, rounds=plan.rounds)
    say("steps")
    shares = step_shares(steps_plan, plain, before)
    say("verify cost")
    curve, left_out = verify_curve(steps_plan, plain)
    limits = _better(before, measure_limits(clock, dtype))
    for one in kernels:
        one |= _against(one, limits)
    if plan.trace is not None:
        write_trace(steps_plan, plain, plan.trace)
        say(f"written: {plan.trace}")
    summary = {
        "schema": SCHEMA,
        "target": plan.target,
        "device": _device_name(plan.device),
        "dtype": plan.dtype,
        "random_weights": is_random(folder),
        # the steps' acceptance is drawn: their text means nothing
        "simulated": True,
        "limits": limits.to_dict(),
        "kernels": kernels,
        "steps": shares,
        "verify_cost": curve,
        "left_out": left_out,
    }
    _print(plan, summary)
    if plan.out is not None:
        record = RunRecord.collect(
            dtype=plan.dtype,
            defaults={
                "rounds": plan.rounds,
                "threads": torch.get_num_threads(),
                "block_size": config.block_size,
                "deterministic": plan.deterministic,
            },
        )
        write_json_atomic(plan.out, {**summary, "run": record.to_dict(), "definitions": DEFINITIONS})
        say(f"written: {plan.out}")
    return summary


def _cases(plan: MicroPlan, model: ModelConfig) -> Iterator[KernelCase]:
    """One case after the other, so that only one's tensors are alive."""
    sizes = SIZES[torch.device(plan.device).type]

    def shape(size: tuple[int, int, int]) -> MicroShape:
        batch, context, nodes = size
        return MicroShape(
            model=model,
            device=plan.device,
            dtype=DTYPES[plan.dtype],
            batch=batch,
            context=min(context, model.max_position_embeddings),
            nodes=nodes,
        )

    for size in sizes.attention:
        yield attention_case(shape(size))
    yield attention_case(shape(sizes.prefill), prefill=True)
    yield from kernel_cases(shape(sizes.kernels))


def _measure(clock: Clock, case: KernelCase) -> dict[str, Any]:
    with progress(case.name) as bar:
        timings = clock.compare(case.runs)
        bar.update(len(timings))
    ours = timings[OURS]
    return {
        "kernel": case.name,
        "size": case.size,
        "bytes": case.bytes,
        "flop": case.flop,
        **ours.to_dict(),
        "baselines": {
            name: {**timing.to_dict(), "speedup": timing.median / ours.median}
            for name, timing in timings.items()
            if name != OURS
        },
        "left_out": case.left_out,
    }


def _better(one: Limits, other: Limits) -> Limits:
    """The higher rate of each: what disturbed one measurement is not the machine's limit."""
    copy, matrix = (
        max(one.copy_bytes_per_s, other.copy_bytes_per_s),
        max(one.matrix_flop_per_s, other.matrix_flop_per_s),
    )
    timings = {
        name: Timing(seconds=one.timings[name].seconds + other.timings[name].seconds) for name in one.timings
    }
    return Limits(copy_bytes_per_s=copy, matrix_flop_per_s=matrix, timings=timings)


def _against(figure: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """A kernel's rates and their shares of the limits."""
    seconds = figure["ms"] / 1e3
    bytes_per_s, flop_per_s = figure["bytes"] / seconds, figure["flop"] / seconds
    return {
        "gb_per_s": bytes_per_s / 1e9,
        "bandwidth_share": bytes_per_s / limits.copy_bytes_per_s,
        "tflop_per_s": flop_per_s / 1e12 if figure["flop"] else None,
        "matrix_share": flop_per_s / limits.matrix_flop_per_s if figure["flop"] else None,
    }


def write_trace(plan: StepPlan, plain: Engine, path: Path) -> None:
    """Speculative steps at batch 1 as a Chrome trace (chrome://tracing, Perfetto)."""
    from torch.profiler import ProfilerActivity, profile

    engine = step_engine(plan, plain, 1)
    decode_steps(engine, 1)
    activities = [ProfilerActivity.CPU]
    if torch.device(plan.config.device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        decode_steps(engine, 1)
    recorded.export_chrome_trace(str(path))


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def _print(plan: MicroPlan, summary: dict[str, Any]) -> None:
    where = f"{plan.target}, {summary['device']}, {plan.dtype}"
    limits = summary["limits"]
    print_table(
        f"kernels, {where}; copy {limits['copy_gb_per_s']:.1f} GB/s, matrix product "
        f"{limits['matrix_tflop_per_s']:.3f} TFLOP/s in this run; medians of {plan.rounds} interleaved "
        "rounds; baselines: their time over ours",
        ["kernel", "size", "ms", "lowest", "highest", "GB/s", "of copy", "TFLOP/s", "of matrix", "baselines"],
        [
            [
                *(one[key] for key in ("kernel", "size", "ms", "ms_lowest", "ms_highest", "gb_per_s")),
                *(one[key] for key in ("bandwidth_share", "tflop_per_s", "matrix_share")),
                ", ".join(f"{name} x{base['speedup']:.2f}" for name, base in one["baselines"].items())
                or None,
            ]
            for one in summary["kernels"]
        ],
    )
    steps = summary["steps"]
    parts = list(steps[0]["shares"])
    print_table(
        f"speculative steps, SIMULATED acceptance, random head of {where}; shares of a step, medians of "
        f"{plan.rounds}",
        [
            "batch",
            "step ms",
            "lowest",
            "highest",
            *parts,
            "draft / verify",
            "host",
            "plain step ms",
            "of weight streaming",
        ],
        [
            [
                *(one[key] for key in ("batch", "step_ms", "step_ms_lowest", "step_ms_highest")),
                *(one["shares"][part] for part in parts),
                *(
                    one[key]
                    for key in ("draft_over_verify", "host_share", "plain_step_ms", "weight_streaming_share")
                ),
            ]
            for one in steps
        ],
    )
    print_table(
        f"target pass over m rows a sequence, {where}; medians of {plan.rounds} interleaved rounds",
        ["B", "L", "m", "ms", "lowest", "highest", "T(m)/T(1)"],
        [
            [one[key] for key in ("batch", "context", "rows", "ms", "ms_lowest", "ms_highest", "relative")]
            for one in summary["verify_cost"]
        ],
    )
    for reason in summary["left_out"]:
        say(f"left out: {reason}")
