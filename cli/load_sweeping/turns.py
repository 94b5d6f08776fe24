"""Turns of a load sweep: closed loops of clients on engines in this process, one step of each in turn.

Owns the engines (one set of weights, an engine of its own for every setting, so that the adaptive policy
learns from its own steps alone) and the loops. All settings of a point work side by side, step by step: a
machine that slows down slows all of them, and each counts the seconds of its own steps. Every turn has a
cache salt of its own, so that it finds no other turn's prompts in the prefix cache.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.cli.benching.measure import BenchPrompt
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.request_options import RequestOptions
from specdec.sampling_params import SamplingParams
from specdec.stats import SpecStats

OFF, ADAPTIVE = "off", "adaptive"


@dataclass(frozen=True, kw_only=True)
class TurnSetting:
    """A way of decoding: its name and what may be drafted; None for nothing."""

    name: str
    spec: SpecConfig | None


class LoadEngines:
    """The engines of a sweep, made when they are first asked for.

    Args:
        folder: of the target.
        draft: a drafter's spelling.
        settings: all of them.
        most_clients: at once.
        longest: tokens of the longest text, prompt and answer.
    """

    def __init__(
        self, folder: Path, draft: str, settings: Sequence[TurnSetting], *, most_clients: int, longest: int
    ) -> None:
        specs = [setting.spec for setting in settings if setting.spec is not None]
        behind = max((max(spec.max_nodes, spec.top_k * spec.max_depth) for spec in specs), default=0)
        base = EngineConfig(max_num_seqs=most_clients)
        rows = longest + behind + 2 * base.block_size
        self._config = replace(base, kv_tokens=(most_clients + 1) * rows)
        self._draft = draft
        self._plain = Engine(folder, config=self._config)
        self._drafting: dict[str, Engine] = {}

    def of(self, setting: TurnSetting) -> Engine:
        """The engine that a setting runs on; the one without speculation has no drafter at all."""
        if setting.spec is None:
            return self._plain
        if setting.name not in self._drafting:
            self._drafting[setting.name] = Engine(self._plain, draft=self._draft, config=self._config)
        return self._drafting[setting.name]


class ClosedLoop:
    """Some requests under one setting, so many at once, greedily; what they took.

    Args:
        engine: which works on nothing else.
        setting: what is drafted.
        requests: in order.
        clients: requests at once.
        max_tokens: of each answer.
        salt: of the prefix cache.
    """

    def __init__(
        self,
        engine: Engine,
        setting: TurnSetting,
        requests: Sequence[BenchPrompt],
        *,
        clients: int,
        max_tokens: int,
        salt: str,
    ) -> None:
        self.setting = setting
        self._engine = engine
        self._params = SamplingParams(
            max_tokens=max_tokens, spec=setting.spec, speculate=setting.spec is not None
        )
        self._options = RequestOptions(cache_salt=salt)
        self._clients = clients
        self._waiting, self._live = deque(requests), dict[int, BenchPrompt]()
        self._count = len(requests)
        self._total, self._hashes = SpecStats(), dict[str, str]()
        self._seconds = self._cpu_seconds = 0.0
        self._steps, self._probes = engine.times.steps, engine.budget.probes

    @property
    def is_open(self) -> bool:
        return bool(self._waiting or self._live)

    def step(self) -> None:
        """Let clients ask whose last request was answered, and take one step.

        Raises:
            SpecdecError: a request fails.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        while self._waiting and len(self._live) < self._clients:
            seq = self._engine.add(self._waiting[0].token_ids, self._params, self._options)
            self._live[seq.seq_id] = self._waiting.popleft()
        finished = self._engine.step()
        self._seconds += time.perf_counter() - wall
        self._cpu_seconds += time.process_time() - cpu
        for seq in finished:
            prompt = self._live.pop(seq.seq_id)
            if seq.error:
                raise SpecdecError(f"prompt {prompt.id}: {seq.error}; nothing was measured")
            self._total.add(seq.stats)
            self._hashes[prompt.id] = hashlib.sha256(repr(seq.output_ids).encode()).hexdigest()[:16]

    def record(self) -> dict[str, Any]:
        """What it took, as plain values."""
        return {
            "seconds": self._seconds,
            "cpu_seconds": self._cpu_seconds,
            "requests": self._count,
            # the first token of each answer comes out of its prompt's pass
            "tokens": self._total.committed + self._count,
            "steps": self._engine.times.steps - self._steps,
            "verify_steps": self._total.verify_steps,
            "drafted": self._total.drafted,
            "accepted": self._total.accepted,
            "probes": self._engine.budget.probes - self._probes,
            "text_hashes": self._hashes,
        }


def run_side_by_side(loops: Sequence[ClosedLoop]) -> None:
    """Run loops to their ends, one step of each in turn, the first one another in every round."""
    turn = 0
    while working := [loop for loop in loops if loop.is_open]:
        first = turn % len(working)
        for loop in [*working[first:], *working[:first]]:
            loop.step()
        turn += 1
