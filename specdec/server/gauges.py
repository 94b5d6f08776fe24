"""What is read from the engine when Prometheus asks: gauges, and counters the engine keeps itself.

Runs on the event loop while the engine's thread works; it reads single numbers and copies of lists only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import specdec
from specdec.server.engine_loop import EngineLoop
from specdec.server.metrics import PREFIX
from specdec.server.speculation_gauges import speculation_gauges


class EngineGauges(Collector):
    """Collects from one engine's loop."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """All of it, now."""
        loop, engine = self._loop, self._loop.engine
        running = list(engine.scheduler.running)
        yield _gauge("num_requests_running", "Sequences being decoded.", len(running))
        yield _gauge("num_requests_waiting", "Sequences waiting for a place.", loop.num_waiting)
        yield _gauge("max_requests", "Sequences that may be here, running or waiting.", loop.capacity)
        used = 1 - engine.blocks.num_free / engine.blocks.num_blocks
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", used)
        yield _gauge("engine_alive", "1 while the engine's thread lives.", float(loop.fault is None))
        states = Counter(
            "off" if seq.spec is None else "drafting" if seq.controller.drafting else "paused"
            for seq in running
        )
        speculation = GaugeMetricFamily(
            f"{PREFIX}speculation_state", "Running sequences by whether they draft.", labels=["state"]
        )
        for state in ("drafting", "paused", "off"):
            speculation.add_metric([state], states[state])
        yield speculation
        yield from speculation_gauges(engine.budget)
        yield _counter("num_preemptions", "Sequences that gave way.", engine.scheduler.num_preemptions)
        yield _counter("engine_steps", "Steps of the engine.", engine.times.steps)
        if engine.prefixes is not None:
            counts = engine.prefixes.counts
            yield _counter("prefix_cache_queries", "Prompt tokens looked up.", counts.queries)
            yield _counter("prefix_cache_hits", "Prompt tokens found.", counts.hits)
            yield _counter("prefix_cache_evicted_blocks", "Idle blocks given up.", counts.evicted)
            yield _counter("prefix_cache_fetched_blocks", "Blocks back from colder memory.", counts.fetched)
            tiers = engine.prefixes.tiers
            yield _gauge(
                "prefix_cache_cold_bytes", "In colder memory.", sum(tiers.sizes_bytes) if tiers else 0
            )
        times = CounterMetricFamily(
            f"{PREFIX}engine_step_seconds", "Time in steps, by part.", labels=["part"]
        )
        for part in ("propose", "target", "verify"):
            times.add_metric([part], getattr(engine.times, part))
        yield times
        info = GaugeMetricFamily(
            f"{PREFIX}info", "What runs here.", labels=["version", "model", "draft", "dtype", "device"]
        )
        draft = engine.drafter.name if engine.drafter else "none"
        model = loop.config.model_names[0]
        info.add_metric([specdec.__version__, model, draft, engine.config.dtype, engine.config.device], 1)
        yield info


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)
