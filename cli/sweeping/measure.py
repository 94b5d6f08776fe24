"""One point of a sweep: answers, acceptance, time by part, the price of its law, and what it costs.

Two passes. Some tasks of all difficulties are decoded under watch, to price the rule's law position by
position, which also warms up; then all tasks are decoded unwatched and timed. Times are of the steps after
every prompt of the batch was read, since prompts cost the same in every setting. Beside wall time stands
processor time, which other load on the machine disturbs less; points are compared by the latter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.audit.baselines import given_knobs
from specdec.audit.parity import Answer, Task, score_table, scores
from specdec.audit.pricing import Prices, emitted_by
from specdec.audit.recording import recording
from specdec.cli.bootstrap import ratio_interval
from specdec.cli.shapes import parse_shape
from specdec.cli.sweeping.cost import draft_cost, flops_per_token
from specdec.cli.sweeping.points import PLAIN, SweepPoint, parse_rule
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.requests import result_of
from specdec.runner import ModelRunner, StepOutput
from specdec.sampling_params import SamplingParams
from specdec.scheduler import ScheduledSequence
from specdec.stats import SpecStats
from specdec.tree import DraftTree

# a row of float64 laws a position; enough for a mean to two digits
PRICED_POSITIONS = 600


class ClockedRunner(ModelRunner):
    """Passes every call on to another runner and counts the processor time of its passes."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner.decoder, inner.cache, inner.boundaries)
        self.inner = inner
        self.cpu_seconds = 0.0

    def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
        """Run the pass under the clock."""
        started = time.process_time()
        output = self.inner.run(plan, trees)
        self.cpu_seconds += time.process_time() - started
        return output

    def commit(self, plan: list[ScheduledSequence], accepted: list[list[int]]) -> None:
        """Pass on."""
        self.inner.commit(plan, accepted)


@dataclass
class Decoded:
    """What one pass over some tasks gave; seconds and tokens are of the steps after the prompts."""

    answers: list[Answer] = field(default_factory=list)
    stats: list[SpecStats] = field(default_factory=list)
    contexts: list[float] = field(default_factory=list)
    propose_seconds: float = 0.0
    target_seconds: float = 0.0
    target_cpu_seconds: float = 0.0
    verify_seconds: float = 0.0
    tokens: int = 0
    rule: str = ""

    @property
    def total(self) -> SpecStats:
        """Counts of all tasks."""
        total = SpecStats()
        for one in self.stats:
            total.add(one)
        return total


def decode(
    engine: Engine,
    tasks: Sequence[Task],
    params: SamplingParams,
    batch_size: int,
    prices: Prices | None = None,
) -> Decoded:
    """Answer tasks batch by batch.

    Args:
        engine: with the drafter of the point.
        tasks: the questions.
        params: the request; the seed of each task is this one and its number.
        batch_size: requests decoded at once.
        prices: the verify steps of each batch are priced by it; None: they are not recorded.

    Raises:
        SpecdecError: a request that cannot be decoded so, or one that failed.
    """
    found = Decoded()
    for start in range(0, len(tasks), batch_size):
        batch = tasks[start : start + batch_size]
        sequences = []
        try:
            for number, task in enumerate(batch):
                seeded = replace(params, seed=(params.seed or 0) + start + number)
                sequences.append(engine.add(task.token_ids, seeded))
        except SpecdecError:
            for seq in sequences:
                engine.scheduler.remove(seq)
            raise
        if prices is None:
            _run(engine, sequences, found)
        else:
            with recording(engine) as steps:
                _run(engine, sequences, found)
                prices.take(steps, share=(start + len(batch)) / len(tasks))
        for task, seq in zip(batch, sequences, strict=True):
            result = result_of(seq)
            if result.error:
                raise SpecdecError(f"task {task.id}: {result.error}")
            found.answers.append(Answer(text=result.text, token_ids=result.token_ids))
            found.stats.append(result.stats)
            found.contexts.append(len(result.prompt_token_ids) + len(result.token_ids) / 2)
            found.rule = result.rule
    return found


def _run(engine: Engine, sequences: Sequence[Any], found: Decoded) -> None:
    while any(not seq.is_finished and seq.num_output == 0 for seq in sequences):
        engine.step()
    inner = engine.runner
    clocked = engine.runner = ClockedRunner(inner)
    times = replace(engine.times)
    before = sum(seq.num_output for seq in sequences)
    try:
        while not all(seq.is_finished for seq in sequences):
            engine.step()
    finally:
        engine.runner = inner
    found.target_cpu_seconds += clocked.cpu_seconds
    found.propose_seconds += engine.times.propose - times.propose
    found.target_seconds += engine.times.target - times.target
    found.verify_seconds += engine.times.verify - times.verify
    found.tokens += sum(seq.num_output for seq in sequences) - before


@dataclass(frozen=True, kw_only=True)
class SweepBench:
    """What all points share.

    Attributes:
        base: an engine whose weights all points use.
        tasks: the questions.
        params: temperature, limits and seed.
        kv_tokens: rows a request may need.
        lossy: whether lossy rules may run.
    """

    base: Engine
    tasks: Sequence[Task]
    params: SamplingParams
    kv_tokens: int
    lossy: bool

    def watched(self, count: int) -> list[Task]:
        """Tasks of all difficulties, for pricing: `count` of them, evenly spaced."""
        count = min(count, len(self.tasks))
        return [self.tasks[index * len(self.tasks) // count] for index in range(count)]

    def engine(self, point: SweepPoint) -> Engine:
        """The engine of a point."""
        spec = SpecConfig() if point.draft == PLAIN else parse_shape(point.shape)
        behind = max(spec.max_nodes, spec.top_k * spec.max_depth)
        config: EngineConfig = replace(
            self.base.config,
            max_num_seqs=point.batch_size,
            kv_tokens=point.batch_size * (self.kv_tokens + behind + 3 * self.base.config.block_size),
            allow_lossy=self.lossy,
            spec=replace(spec, adaptive=False),
            # each repeat reads its prompts, as the first one does
            prefix_cache=False,
        )
        return Engine(self.base, draft=None if point.draft == PLAIN else point.draft, config=config)


def measure(bench: SweepBench, point: SweepPoint) -> dict[str, Any]:
    """Measure a point.

    Raises:
        RuleMismatchError: rule, draft and shape do not go together (a chain rule over trees, a draft without
            a law).
        SpecdecError: the point cannot be run for another reason.
    """
    rule = parse_rule(point.rule)
    params = bench.params
    if rule is not None:
        params = replace(params, rule=rule.rule.name, rule_knobs=given_knobs(rule))
    engine = bench.engine(point)
    lossless = rule is None or rule.rule.is_lossless
    prices = Prices(
        law_at=(lambda p, q: p) if rule is None or lossless else emitted_by(rule),
        params=params,
        bound=1.0 if rule is None else rule.overshoot_bound,
        limit=PRICED_POSITIONS,
    )
    decode(engine, bench.watched(2 * point.batch_size), params, point.batch_size, prices)
    found = decode(engine, bench.tasks, params, point.batch_size)
    return {**_figures(bench, point, found), "exact": lossless, **prices.to_dict()}


def _figures(bench: SweepBench, point: SweepPoint, found: Decoded) -> dict[str, Any]:
    total, cost = found.total, draft_cost(point.draft)
    right = scores(bench.tasks, found.answers)
    context = sum(found.contexts) / len(found.contexts)
    flops = flops_per_token(
        bench.base.model_config,
        cost,
        verify_steps=total.verify_steps,
        drafted=total.drafted,
        committed=total.committed,
        context=context,
    )
    stats = [one for one in found.stats if one.verify_steps]
    tokens = max(1, found.tokens)
    return {
        "label": point.label,
        "draft": point.draft,
        "rule": point.rule,
        "verified_by": found.rule,
        "shape": point.shape,
        "batch_size": point.batch_size,
        "tokens": sum(len(answer.token_ids) for answer in found.answers),
        "acceptance_length": total.acceptance_length,
        "acceptance_length_interval": ratio_interval(
            [one.committed for one in stats], [one.verify_steps for one in stats]
        ),
        "acceptance_rate": total.acceptance_rate,
        "rejection_rate": _rejection_rate(total),
        "verify_steps": total.verify_steps,
        "drafted": total.drafted,
        "committed": total.committed,
        "mean_context": context,
        "verify_gflops_per_token": None if flops is None else flops[0] / 1e9,
        "draft_gflops_per_token": None if flops is None else flops[1] / 1e9,
        "verify_ms_per_token": 1e3 * found.target_seconds / tokens,
        "verify_cpu_ms_per_token": 1e3 * found.target_cpu_seconds / tokens,
        "draft_ms_per_token": 1e3 * found.propose_seconds / tokens,
        "choose_ms_per_token": 1e3 * found.verify_seconds / tokens,
        "right": sum(right),
        "tasks": len(right),
        "right_by_task": [int(one) for one in right],
        "scores": score_table(bench.tasks, right),
    }


def _rejection_rate(total: SpecStats) -> float | None:
    """Share of the drafted depths that were reached and not passed."""
    reached = sum(total.reached_per_depth)
    return 1.0 - sum(total.accepted_per_depth) / reached if reached else None
