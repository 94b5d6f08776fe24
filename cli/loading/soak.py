"""A load that goes on for a time: is the server at its end what it was at its beginning?

Owns the order of the work: an idle server's counters, the clients and the samples of its memory beside them,
its counters when it is idle again. The arithmetic is `loading.windows`', the comparison `loading.counters`'.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specdec.cli.console import print_table, progress, say
from specdec.cli.datasets import Prompt
from specdec.cli.loading.client import LoadClient
from specdec.cli.loading.counters import Counters, reconcile
from specdec.cli.loading.drive import Asking, Load, keep_busy
from specdec.cli.loading.figures import figures_of
from specdec.cli.loading.plan import LoadPlan
from specdec.cli.loading.traffic import Conversation, make_traffic
from specdec.cli.loading.windows import (
    WARM_WINDOWS,
    MemorySample,
    memory_by_window,
    throughput_by_window,
    verdict,
)
from specdec.errors import SpecdecError

SCHEMA = "specdec.soak/1"
_SAMPLES = 400  # of memory, over the whole duration
_IDLE_S = 30.0
_RESIDENT = "process_resident_memory_bytes"


async def soak(
    client: LoadClient, plan: LoadPlan, asking: Asking, prompts: Sequence[Prompt], model: str
) -> tuple[dict[str, Any], Load]:
    """Keep a server busy and say what became of it; its warm-up is done.

    Raises:
        SpecdecError: a process that is not there, or a server that others use too.
    """
    seconds, clients = plan.duration, plan.concurrency[0]
    assert seconds is not None, "a soak has a duration"
    assert clients is not None, "and clients"
    before = await _idle_counters(client)
    samples: list[MemorySample] = []
    sampling = asyncio.create_task(_sample(client, plan.server_pid, seconds, samples))
    with progress("seconds", seconds) as bar:
        loop = asyncio.get_running_loop()
        start = loop.time()
        load = await keep_busy(
            client,
            _dealt(plan, asking, prompts),
            clients=clients,
            seconds=seconds,
            on_answer=lambda record: bar.update(min(seconds, round(loop.time() - start))),
        )
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    after = await _idle_counters(client)
    figures = figures_of(load, requests=len(load.records), goodput=plan.goodput)
    counters = None
    if before is not None and after is not None:
        counters = reconcile(before, after, load.records, f"/v1/{asking.path}")
    rates = throughput_by_window(load.records, seconds)
    memory = memory_by_window(samples, seconds)
    summary = {
        "schema": SCHEMA,
        "url": plan.url,
        "model": model,
        "data": plan.data,
        "clients": clients,
        "asked_for_s": seconds,
        **figures,
        "windows": [
            {"tokens_per_second": rate, "resident_bytes": size}
            for rate, size in zip(rates, memory, strict=True)
        ],
        "counters": counters,
        "verdict": verdict(rates, memory, counters, figures["errors"]),
    }
    return {**summary, "memory_samples": [asdict(sample) for sample in samples]}, load


def _dealt(
    plan: LoadPlan, asking: Asking, prompts: Sequence[Prompt]
) -> Iterator[tuple[Conversation, Asking]]:
    """Conversations for ever: all prompts in turn, each time with other seeds; with --cold, another salt."""
    count = 0
    while True:
        salted = {**asking.common, "cache_salt": secrets.token_hex(8)} if plan.cold else asking.common
        for conversation in make_traffic(
            prompts,
            turns=plan.turns,
            prefixes=[],
            request_rate=plan.request_rate,
            think_time=plan.think_time,
            seed=plan.seed + count,
        ):
            yield conversation, replace(asking, common=salted)
        count += len(prompts)


async def _sample(client: LoadClient, pid: int | None, seconds: float, samples: list[MemorySample]) -> None:
    """Note the server's memory until cancelled."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while True:
        text = await client.metrics() if pid is None else None
        counters = Counters(text) if text is not None else None
        size = None
        if pid is not None:
            size = resident_bytes(pid)
        elif counters is not None and counters.has(_RESIDENT):
            size = int(counters.total(_RESIDENT))
        if size is not None:
            samples.append(MemorySample(loop.time() - start, size))
        await asyncio.sleep(max(seconds / _SAMPLES, 0.05))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process.

    Raises:
        SpecdecError: there is none, or the system does not say.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    except (OSError, StopIteration) as error:
        raise SpecdecError(
            f"--server-pid ({pid}) is no process of this machine that shows its memory"
        ) from error


async def _idle_counters(client: LoadClient) -> Counters | None:
    """The counters of a server once it has nothing to do; None when it shows none we know.

    Raises:
        SpecdecError: it does not become idle.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _IDLE_S
    while True:
        text = await client.metrics()
        counters = Counters(text) if text is not None else None
        if counters is None or counters.prefix is None:
            return None
        if not counters.num_here:
            return counters
        if loop.time() > deadline:
            raise SpecdecError(
                f"the server is still busy {_IDLE_S:g} s after our last request; a soak needs it for itself"
            )
        await asyncio.sleep(0.2)


def print_soak(summary: dict[str, Any]) -> None:
    """The windows and the verdict, for people."""
    rows = [
        [
            number + 1,
            "warm-up" if number < WARM_WINDOWS else "",
            window["tokens_per_second"],
            None if window["resident_bytes"] is None else window["resident_bytes"] / 1e6,
        ]
        for number, window in enumerate(summary["windows"])
    ]
    title = f"{summary['model']}: {summary['clients']} clients for {summary['asked_for_s']:g} s, "
    title += f"{summary['completed']} whole answers, {sum(summary['errors'].values())} errors"
    print_table(title, ["window", "", "tokens/s", "resident MB"], rows)
    for name, count in ((summary["counters"] or {}).get("counts") or {}).items():
        if not count["equal"]:
            say(f"{name}: the server counts {count['server']:g}, the clients {count['clients']:g}")
    found = summary["verdict"]
    for part in ("memory", "throughput", "counters", "answers"):
        said = {True: "holds", False: "does not hold", None: "was not to be seen"}[found[part]]
        say(f"{part}: {said}")
