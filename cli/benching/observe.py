"""What an engine commits, step by step and with its time: what every figure of `specdec bench` is made of.

Owns the watching: which tokens came in which step, when, and out of how many drafts. Reads counters that the
engine keeps anyway (`Sequence.stats`, `Engine.times`) between two steps; nothing in the engine is changed or
slowed by more than that. Knows no figures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from specdec.cli.benching.energy import EnergyMeter
from specdec.engine import Engine
from specdec.requests import GenerationResult, result_of
from specdec.sequence import SamplingParams, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What one step added to one answer.

    Attributes:
        at_s: when, after its batch was asked for.
        position: tokens of the answer before it.
        context: tokens of the text before it, the prompt's included.
        tokens: how many it added.
        is_verify: whether it was a verify step; else it ended the reading of the prompt.
        drafted: nodes proposed.
        depths: how deep the tree was.
        accepted: nodes accepted.
    """

    at_s: float
    position: int
    context: int
    tokens: int
    is_verify: bool
    drafted: int
    depths: int
    accepted: int


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of a batch by part of the engine's loop; `host` is what no part accounts for.

    Attributes:
        draft: proposing.
        verify: passes of the target, prompts included.
        sample: rules, laws and draws.
        commit: moving rows, writing tokens down.
        host: scheduling and everything else.
        steps: turns of the loop.
        joules: energy of the cards, None where none tells.
    """

    draft: float
    verify: float
    sample: float
    commit: float
    host: float
    steps: float
    joules: float | None


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A batch that was decoded under watch: results, and what each step added, in order of the prompts."""

    results: list[GenerationResult]
    commits: list[list[Commit]]
    seconds: float
    parts: PartTimes


class _Watch:
    """One sequence's counters as they were after the last step."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.commits: list[Commit] = []
        self._counts = self._read()

    def look(self, at_s: float) -> None:
        """Note what has come since the last look."""
        before, now = self._counts, self._read()
        length, steps, drafted, depths, accepted = (new - old for new, old in zip(now, before, strict=True))
        self._counts = now
        if not length and not steps:
            return
        self.commits.append(
            Commit(
                at_s=at_s,
                position=before[0] - self.seq.prompt_len,
                context=before[0],
                tokens=length,
                is_verify=steps > 0,
                drafted=drafted,
                depths=depths,
                accepted=accepted,
            )
        )

    def _read(self) -> tuple[int, int, int, int, int]:
        stats = self.seq.stats
        return (
            len(self.seq.token_ids),
            stats.verify_steps,
            stats.drafted,
            sum(stats.steps_per_depth),
            stats.accepted,
        )


def observe(
    engine: Engine,
    prompts: SequenceOf[SequenceOf[int]],
    params: SequenceOf[SamplingParams],
    meter: EnergyMeter | None = None,
) -> Observed:
    """Decode prompts together, as `Engine.generate` does, and note every step.

    Args:
        engine: idle.
        prompts: token ids of each.
        params: of each.
        meter: reads the cards' energy.

    Raises:
        SpecdecError: a prompt that cannot be decoded; nothing is generated then.
    """
    before = replace(engine.times)
    joules_before = meter.joules() if meter else None
    watches: list[_Watch] = []
    started = time.perf_counter()
    try:
        for token_ids, chosen in zip(prompts, params, strict=True):
            watches.append(_Watch(engine.add(list(token_ids), chosen)))
        running = list(watches)
        while running:
            engine.step()
            now = time.perf_counter() - started
            for watch in running:
                watch.look(now)
            running = [watch for watch in running if not watch.seq.is_finished]
    finally:
        engine.abort([watch.seq for watch in watches])
    seconds = time.perf_counter() - started
    joules = meter.joules() if meter else None
    spent = engine.times
    draft, verify = spent.propose - before.propose, spent.target - before.target
    commit = spent.commit - before.commit
    sample = spent.verify - before.verify - commit
    return Observed(
        results=[result_of(watch.seq) for watch in watches],
        commits=[watch.commits for watch in watches],
        seconds=seconds,
        parts=PartTimes(
            draft=draft,
            verify=verify,
            sample=sample,
            commit=commit,
            host=max(0.0, seconds - draft - verify - sample - commit),
            steps=spent.steps - before.steps,
            joules=None if joules is None or joules_before is None else joules - joules_before,
        ),
    )
