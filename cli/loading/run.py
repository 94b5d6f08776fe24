"""A load on a running server: traffic, the points of a sweep, the table, the record and the picture.

Owns the order of the work: look at the server, warm it up, measure, report. What makes points comparable: all
of a sweep hold the same conversations, and with --cold none finds another's in the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.cli.console import Bar, print_table, progress, say
from specdec.cli.datasets import Prompt, load_prompts, prompt_file
from specdec.cli.loading.client import LoadClient, base_url
from specdec.cli.loading.drive import Asking, Load, Server, drive
from specdec.cli.loading.figures import DEFINITIONS, figures_of
from specdec.cli.loading.picture import draw_load
from specdec.cli.loading.plan import LoadPlan
from specdec.cli.loading.soak import print_soak, soak
from specdec.cli.loading.traffic import Conversation, make_traffic, prefix_texts, probe_text, warm_up_text
from specdec.cli.loading.windows import DEFINITIONS as SOAK_DEFINITIONS
from specdec.cli.outputs import (
    require_not_input,
    require_own_beside,
    require_own_result,
    require_writable,
)
from specdec.errors import SpecdecError
from specdec.provenance import RunRecord, sha256_file, write_json_atomic

SCHEMA = "specdec.load/1"
# words of the two texts whose difference tells a server's tokens a word
_PROBES = (20, 120)


def run_load(plan: LoadPlan) -> dict[str, Any]:
    """Measure, print the table, write `--out`; returns the summary for the JSON line.

    Raises:
        SpecdecError: no server, or not one whole answer.
    """
    base_url(plan.url)
    picture = None
    if plan.out is not None:
        require_writable("--out", plan.out)
        require_not_input("--out", plan.out, {"--data": prompt_file(plan.data)})
        require_own_result("--out", plan.out, "load", "soak")
        if len(plan.concurrency) > 1:
            picture = plan.out.with_suffix(".png")
            require_own_beside("--out", plan.out, picture)
    prompts = load_prompts(plan.data)[: plan.limit]
    summary, loads = asyncio.run(_measure(plan, prompts))
    if plan.duration is not None:
        print_soak(summary)
    else:
        _print(plan, summary)
    if plan.out is not None:
        record = RunRecord.collect(
            seeds={"traffic": plan.seed},
            data_hash=sha256_file(prompt_file(plan.data)),
            defaults=_settings(plan),
        )
        # those of half an hour would be megabytes
        kept = loads if plan.duration is None else []
        requests = [[asdict(one) for one in load.records] for load in kept]
        definitions = DEFINITIONS if plan.duration is None else {**DEFINITIONS, **SOAK_DEFINITIONS}
        write_json_atomic(
            plan.out,
            {**summary, "run": record.to_dict(), "definitions": definitions, "per_request": requests},
        )
        say(f"written: {plan.out}")
    if picture is not None:
        draw_load(summary["points"], picture, title=_title(plan, summary))
        say(f"written: {picture}")
    summary.pop("memory_samples", None)
    if not any(record.error is None for load in loads for record in load.records):
        kind, detail = next((one.error, one.detail) for load in loads for one in load.records if one.error)
        raise SpecdecError(f"--url ({plan.url}) gave no whole answer; the first: {kind}: {detail}")
    return summary


async def _measure(plan: LoadPlan, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], list[Load]]:
    client = LoadClient(plan.url, plan.request_timeout)
    try:
        model = plan.model or await client.first_model()
        asking = _asking(plan, model)
        if plan.duration is not None:
            await _warm_up(client, asking, plan.warm_up)
            summary, load = await soak(client, plan, asking, prompts, model)
            return summary, [load]
        prefixes: list[str] = []
        per_word = None
        if plan.shared_prefix:
            per_word = await tokens_per_word(client, asking)
            prefixes = prefix_texts(max(1, round(plan.shared_prefix / per_word)), plan.prefix_groups)
        conversations = make_traffic(
            prompts,
            turns=plan.turns,
            prefixes=prefixes,
            request_rate=plan.request_rate,
            think_time=plan.think_time,
            seed=plan.seed,
        )
        requests = len(conversations) * plan.turns
        loads, points = [], []
        with progress("requests", requests * len(plan.concurrency)) as bar:
            for clients in plan.concurrency:
                load = await _point(client, plan, asking, conversations, clients, bar)
                loads.append(load)
                rate = None if math.isinf(plan.request_rate) else plan.request_rate
                figures = figures_of(load, requests=requests, goodput=plan.goodput)
                points.append({"concurrency": clients, "request_rate": rate, **figures})
    finally:
        await client.close()
    summary = {
        "schema": SCHEMA,
        "url": plan.url,
        "model": model,
        "data": plan.data,
        "conversations": len(conversations),
        "tokens_per_prefix_word": per_word,
        "points": points,
    }
    return summary, loads


def _asking(plan: LoadPlan, model: str) -> Asking:
    common: dict[str, Any] = {
        "model": model,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        **({"ignore_eos": True} if plan.ignore_eos else {}),
        **plan.extra_body,
    }
    return Asking(chat=plan.endpoint == "chat", common=common, seeded=plan.temperature > 0)


async def _point(
    server: Server,
    plan: LoadPlan,
    asking: Asking,
    conversations: Sequence[Conversation],
    clients: int | None,
    bar: Bar,
) -> Load:
    """One point: uncounted requests, then the load."""
    await _warm_up(server, asking, plan.warm_up)
    if plan.cold:
        # never used before, also not by an earlier run on the same server
        salted = {**asking.common, "cache_salt": secrets.token_hex(8)}
        asking = Asking(chat=asking.chat, common=salted, seeded=asking.seeded)
    note = "" if clients is None else f"({clients} clients)"
    return await drive(
        server, conversations, asking, clients=clients, on_answer=lambda record: bar.advance(note=note)
    )


async def _warm_up(server: Server, asking: Asking, count: int) -> None:
    """Uncounted requests, one after another.

    Raises:
        SpecdecError: the server refuses even these.
    """
    texts = [warm_up_text(number) for number in range(count)]
    load = await drive(server, [_alone(text) for text in texts], asking, clients=1) if texts else None
    for record in load.records if load else []:
        if record.error is not None:
            raise SpecdecError(f"the server does not answer as asked: {record.error}: {record.detail}")


async def tokens_per_word(server: Server, asking: Asking) -> float:
    """How many tokens of the server's a word of prefix is, by the usage of two short requests.

    Raises:
        SpecdecError: the server does not answer them, or counts no tokens.
    """
    common = {**asking.common, "max_tokens": 1}
    load = await drive(
        server,
        [_alone(probe_text(words)) for words in _PROBES],
        Asking(chat=asking.chat, common=common, seeded=asking.seeded),
        clients=1,
    )
    counts = [record.prompt_tokens for record in load.records]
    failed = next((record for record in load.records if record.error is not None), None)
    if failed is not None or counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        why = f"{failed.error}: {failed.detail}" if failed else f"its usage counts {counts} tokens"
        raise SpecdecError(f"--shared-prefix: the server's tokens cannot be counted; {why}")
    return (counts[1] - counts[0]) / (_PROBES[1] - _PROBES[0])


def _alone(text: str) -> Conversation:
    return Conversation(id="uncounted", turns=(text,), arrives_s=0.0, pauses_s=(), seed=0)


def _settings(plan: LoadPlan) -> dict[str, Any]:
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(plan).items()
        if name not in ("url", "data", "out")
    }
    # JSON has no infinity
    settings["request_rate"] = None if math.isinf(plan.request_rate) else plan.request_rate
    return settings


def _title(plan: LoadPlan, summary: dict[str, Any]) -> str:
    parts = [f"{summary['model']}, {plan.data}, {summary['conversations']} conversations"]
    if plan.turns > 1:
        parts.append(f"{plan.turns} turns, pauses of {plan.think_time:g} s")
    if plan.shared_prefix:
        parts.append(f"prefix of {plan.shared_prefix} tokens in {plan.prefix_groups} groups")
    parts.append(f"at most {plan.max_tokens} tokens, temperature {plan.temperature:g}")
    if not math.isinf(plan.request_rate):
        parts.append(f"{plan.request_rate:g} conversations/s (Poisson)")
    return ", ".join(parts)


def _print(plan: LoadPlan, summary: dict[str, Any]) -> None:
    columns = ["clients", "whole answers", "errors", "requests/s", "tokens/s", "goodput"]
    columns += ["ttft", "p99", "tpot", "p99", "itl", "p99", "e2el", "p99", "accept length"]
    rows = []
    for point in summary["points"]:
        spreads = [point[name] or {} for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")]
        rows.append(
            [
                point["concurrency"],
                f"{point['completed']}/{point['requests']}",
                sum(point["errors"].values()),
                point["request_throughput"],
                point["output_throughput"],
                point["request_goodput"],
                *(spread.get(key) for spread in spreads for key in ("median", "p99")),
                (point["acceptance"] or {}).get("acceptance_length"),
            ]
        )
    print_table(f"{_title(plan, summary)}; latencies in ms, median and p99 over requests", columns, rows)
    for point in summary["points"]:
        for kind, count in point["errors"].items():
            say(f"{count} requests failed: {kind}")
