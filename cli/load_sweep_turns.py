"""One turn of a load sweep: a closed loop of clients on an engine in this process.

Owns the engines (one set of weights; one without a drafter, one for the adaptive policy, which learns from
its own steps alone, one for the fixed settings) and the loop. Every turn has a cache salt of its own, so that
it finds no other turn's prompts in the prefix cache.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.cli.measure import BenchPrompt
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
    """The engines of a sweep.

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
        config = replace(base, kv_tokens=(most_clients + 1) * rows)
        self.plain = Engine(folder, config=config)
        self._drafting = {
            name: Engine(self.plain, draft=draft, config=config) for name in (ADAPTIVE, "fixed")
        }

    def of(self, setting: TurnSetting) -> Engine:
        """The engine that a setting runs on."""
        if setting.spec is None:
            return self.plain
        return self._drafting[ADAPTIVE if setting.name == ADAPTIVE else "fixed"]


def run_turn(
    engine: Engine,
    setting: TurnSetting,
    requests: Sequence[BenchPrompt],
    *,
    clients: int,
    max_tokens: int,
    salt: str,
) -> dict[str, Any]:
    """Answer some requests, so many at once, greedily; what it took, as plain values.

    Raises:
        SpecdecError: a request fails.
    """
    params = SamplingParams(max_tokens=max_tokens, spec=setting.spec, speculate=setting.spec is not None)
    options = RequestOptions(cache_salt=salt)
    waiting, total, hashes = deque(requests), SpecStats(), {}
    live: dict[int, BenchPrompt] = {}
    steps, probes = engine.times.steps, engine.budget.probes
    wall, cpu = time.perf_counter(), time.process_time()
    while waiting or live:
        while waiting and len(live) < clients:
            seq = engine.add(waiting[0].token_ids, params, options)
            live[seq.seq_id] = waiting.popleft()
        for seq in engine.step():
            prompt = live.pop(seq.seq_id)
            if seq.error:
                raise SpecdecError(f"prompt {prompt.id}: {seq.error}; nothing was measured")
            total.add(seq.stats)
            hashes[prompt.id] = hashlib.sha256(repr(seq.output_ids).encode()).hexdigest()[:16]
    seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "requests": len(requests),
        # the first token of each answer comes out of its prompt's pass
        "tokens": total.committed + len(requests),
        "steps": engine.times.steps - steps,
        "verify_steps": total.verify_steps,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "probes": engine.budget.probes - probes,
        "text_hashes": hashes,
    }
