"""Whole steps: where their time goes, and what verifying m rows costs beside decoding one.

A step's parts are read from the engine's own clock while it speculates with simulated acceptance. The curve
T(m)/T(1) runs the target alone over trees of m rows that stand behind `context - m` rows of a pool nobody
filled: time does not depend on what the rows hold. Sizes that do not fit the memory or would take too long
are left out, and named. Owns both measurements; does not print.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from specdec.cli.micro.shapes import tree_parents
from specdec.cli.micro.timing import Limits
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.sampling_params import SamplingParams
from specdec.scheduler import ScheduledSequence
from specdec.sequence import Sequence
from specdec.step_times import StepTimes
from specdec.tree import DraftTree

CURVE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CURVE_BATCHES = (1, 8, 32)
CURVE_CONTEXTS = (1024, 8192, 32768)
STEP_BATCHES = (1, 8)
STEP_DEPTH = 4
# accepted length of the simulated steps, the length the targets of issue 5 are stated for
STEP_LENGTH = 3.5
STEP_PROMPT = 128
STEP_TOKENS = 48
# share of the free memory that the curve's pool may take
_POOL_SHARE = 0.5
# seconds that one pass of the curve may take; larger ones are left out
_PASS_LIMIT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Where and how often steps are measured; the curve's sizes are those above unless given."""

    target: str
    config: EngineConfig
    rounds: int
    rows: tuple[int, ...] = CURVE_ROWS
    batches: tuple[int, ...] = CURVE_BATCHES
    contexts: tuple[int, ...] = CURVE_CONTEXTS


def wait_for(device: str) -> None:
    """Wait until a card has done what it was given; nothing to wait for on a processor."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def step_engine(plan: StepPlan, plain: Engine, batch: int) -> Engine:
    """An engine that drafts with a random head and commits a simulated length."""
    spec = SpecConfig(max_depth=STEP_DEPTH, max_nodes=STEP_DEPTH, adaptive=False)
    room = STEP_PROMPT + STEP_TOKENS + 64
    config = replace(
        plan.config,
        max_num_seqs=batch,
        kv_tokens=batch * room,
        spec=spec,
        simulate_acceptance=STEP_LENGTH,
        prefix_cache=False,
    )
    return Engine(plain, draft="random", config=config)


def decode_steps(engine: Engine, batch: int, *, speculate: bool = True) -> tuple[StepTimes, float]:
    """Write `STEP_TOKENS` for every prompt: the parts of the steps after the prompts, and their wall time."""
    vocab = engine.model_config.vocab_size
    prompts = [[(7 * place + index) % vocab for place in range(STEP_PROMPT)] for index in range(batch)]
    params = SamplingParams(max_tokens=STEP_TOKENS, ignore_eos=True, seed=0, speculate=speculate)
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while any(seq.num_output == 0 for seq in sequences):
        engine.step()
    wait_for(engine.config.device)
    before, started = replace(engine.times), time.perf_counter()
    while not all(seq.is_finished for seq in sequences):
        engine.step()
    wait_for(engine.config.device)
    wall = time.perf_counter() - started
    after = engine.times
    names = ("propose", "target", "verify", "commit", "steps")
    return StepTimes(**{name: getattr(after, name) - getattr(before, name) for name in names}), wall


def step_shares(plan: StepPlan, plain: Engine, limits: Limits) -> list[dict[str, Any]]:
    """Per batch size: milliseconds of a step and the share of each part, plain decoding beside it."""
    found = []
    for batch in STEP_BATCHES:
        engine = step_engine(plan, plain, batch)
        readings = []
        plain_steps = []
        for turn in range(plan.rounds + 1):
            speculative = decode_steps(engine, batch)
            without = decode_steps(engine, batch, speculate=False)
            if turn:  # the first one warms up
                readings.append(speculative)
                plain_steps.append(without[1] / without[0].steps)
        figures = _shares(batch, readings, plain_steps)
        figures |= _streaming(plain, median(plain_steps), limits)
        found.append(figures | {"host_share": host_share(engine, batch)})
    return found


def host_share(engine: Engine, batch: int) -> float:
    """Share of steps in which the host works alone, from a profile of them.

    On a card: 1 - time of its kernels / wall time. On a processor: 1 - time inside torch's operators / wall
    time, which the profiler's own cost inflates.
    """
    from torch.profiler import ProfilerActivity, profile

    on_card = torch.device(engine.config.device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    with profile(activities=activities) as recorded:
        _, wall = decode_steps(engine, batch)
    events = recorded.key_averages()
    busy = sum(event.self_device_time_total if on_card else event.self_cpu_time_total for event in events)
    return max(0.0, 1.0 - busy / 1e6 / wall)


def _shares(batch: int, readings: list[tuple[StepTimes, float]], plain_steps: list[float]) -> dict[str, Any]:
    steps = [wall / times.steps for times, wall in readings]
    parts: dict[str, Callable[[StepTimes], float]] = {
        "draft": lambda times: times.propose,
        "verify": lambda times: times.target,
        "sample": lambda times: times.verify - times.commit,
        "commit": lambda times: times.commit,
    }
    shares = {name: median(part(times) / wall for times, wall in readings) for name, part in parts.items()}
    return {
        "batch": batch,
        "n": len(readings),
        "step_ms": 1e3 * median(steps),
        "step_ms_lowest": 1e3 * min(steps),
        "step_ms_highest": 1e3 * max(steps),
        "plain_step_ms": 1e3 * median(plain_steps),
        "shares": {**shares, "scheduling": 1.0 - sum(shares.values())},
        "draft_over_verify": median(times.propose / times.target for times, _ in readings),
    }


def _streaming(plain: Engine, step: float, limits: Limits) -> dict[str, Any]:
    """How near plain decoding is to the time that only reading the weights would take."""
    size = weight_bytes(plain)
    return {"weight_bytes": size, "weight_streaming_share": size / (limits.copy_bytes_per_s * step)}


def weight_bytes(engine: Engine) -> int:
    """Bytes of the matrices that a pass reads, the output head once and rows of embeddings not counted."""
    model, decoder = engine.model_config, engine.decoder
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * heads + 2 * kv + 3 * model.intermediate_size)
    numbers = layer * model.num_layers + model.vocab_size * model.hidden_size
    # packed matrices hold two bytes a number
    packed = decoder.num_packed > 0 and decoder.num_plain == 0
    return numbers * (2 if packed else decoder.dtype.itemsize)


def free_bytes(device: str) -> int:
    """Memory that is free where the pool lives."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def verify_curve(plan: StepPlan, plain: Engine) -> tuple[list[dict[str, Any]], list[str]]:
    """T(m) of every size that fits, and what was left out and why."""
    left_out: list[str] = []
    figures: list[dict[str, Any]] = []
    for context, batch in _sizes(plan, plain, left_out):
        config = replace(
            plan.config,
            max_num_seqs=batch,
            kv_tokens=batch * (context + 2 * plan.config.block_size),
            prefix_cache=False,
        )
        engine = Engine(plain, config=config)
        figures += _curve(plan, engine, context, batch, left_out)
        del engine
    return figures, left_out


def _sizes(plan: StepPlan, plain: Engine, left_out: list[str]) -> Iterator[tuple[int, int]]:
    """Contexts and batches that the target and the memory allow."""
    model = plain.model_config
    row_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * plain.decoder.dtype.itemsize
    for context in plan.contexts:
        if context > plain.max_model_len:
            left_out.append(f"L={context}: beyond the target's context of {plain.max_model_len}")
            continue
        for batch in plan.batches:
            needed, free = batch * context * row_bytes, free_bytes(plan.config.device)
            if needed > _POOL_SHARE * free:
                left_out.append(
                    f"B={batch} L={context}: its KV takes {needed / 2**30:.1f} GiB, half of the free memory "
                    f"is {_POOL_SHARE * free / 2**30:.1f} GiB"
                )
                continue
            yield context, batch


def _curve(
    plan: StepPlan, engine: Engine, context: int, batch: int, left_out: list[str]
) -> list[dict[str, Any]]:
    runs: dict[int, Callable[[], float]] = {}
    sequences = [_sequence(engine, context) for _ in range(batch)]
    for rows in (rows for rows in plan.rows if rows < context):
        run = _pass(engine, sequences, context, rows)
        run()
        taken = run()
        if taken > _PASS_LIMIT_S:
            left_out.append(
                f"B={batch} L={context} m>={rows}: one pass takes {taken:.1f} s, more than {_PASS_LIMIT_S:g}"
            )
            break
        runs[rows] = run
    seconds: dict[int, list[float]] = {rows: [] for rows in runs}
    names = list(runs)
    for turn in range(plan.rounds):
        shift = turn % max(1, len(names))
        for rows in names[shift:] + names[:shift]:
            seconds[rows].append(runs[rows]())
    base = median(seconds[names[0]]) if names else 0.0
    return [
        {
            "batch": batch,
            "context": context,
            "rows": rows,
            "ms": 1e3 * median(values),
            "ms_lowest": 1e3 * min(values),
            "ms_highest": 1e3 * max(values),
            "relative": median(values) / base,
            "n": len(values),
        }
        for rows, values in seconds.items()
    ]


def _sequence(engine: Engine, context: int) -> Sequence:
    """A sequence with room for `context` rows, as if its text had been read."""
    vocab = engine.model_config.vocab_size
    # the root is its last token: at least one row less than the context is text
    prompt = [place % vocab for place in range(context - 1)]
    seq = engine.admission.make_sequence(0, prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    engine.blocks.extend(seq.block_table, context)
    return seq


def _pass(engine: Engine, sequences: list[Sequence], context: int, rows: int) -> Callable[[], float]:
    """One target pass over trees of `rows` rows, which end at row `context` of each sequence."""
    parents = tree_parents(rows)
    text = sequences[0].token_ids[: context - rows + 1]

    def run() -> float:
        plan, trees = [], []
        for seq in sequences:
            seq.token_ids = text
            seq.num_computed = len(text) - 1
            plan.append(ScheduledSequence(seq, 1, rows - 1))
            trees.append(DraftTree(token_ids=[text[-1]] * rows, parents=parents))
        wait_for(engine.config.device)
        started = time.perf_counter()
        output = engine.runner.run(plan, trees)
        assert output.logits.shape[0] == rows * len(sequences), "a pass gives a row of logits for each node"
        wait_for(engine.config.device)
        return time.perf_counter() - started

    return run
