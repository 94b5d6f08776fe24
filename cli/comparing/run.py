"""One comparison: our engine and its peers on the same prompts, taking turns batch by batch.

What makes it fair: every engine gets the same token ids (the target's template, rendered once), as many
prompts at once, writes the same number of new tokens greedily without an end before, starts each prompt from
nothing (no prefix cache), and has the same number of threads. Tokens are counted as ids. Seconds are those of
each engine's own call, its prompt passes included; a server's include HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from specdec.cli.benching.figures import answer_records, batches_of, grouped
from specdec.cli.benching.measure import (
    PLAIN,
    BenchPrompt,
    Decode,
    Measured,
    forget_estimates,
    make_decoders,
    make_engines,
    run_interleaved,
)
from specdec.cli.benching.points import bench_data, check_drafts, settings_of
from specdec.cli.bootstrap import ratio_interval, speedup_interval
from specdec.cli.comparing.peer_servers import PeerServer
from specdec.cli.comparing.peers import Peer, PeerProcess, parse_peer, setup_of
from specdec.cli.console import counted, format_interval, print_table, progress, say
from specdec.cli.datasets import prompt_file, require_shorter
from specdec.cli.outputs import require_not_input, require_own_result, require_writable
from specdec.cli.usage import flags_of, usage_errors
from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, sha256_file, versions, write_json_atomic
from specdec.random_target import is_random
from specdec.requests import PromptEncoder
from specdec.sequence import SamplingParams
from specdec.stats import SpecStats

SCHEMA = "specdec.compare/1"
OURS = "specdec"
# threads of the engine before keep their cores awake this long (OpenMP's block time is 0.2 s)
SETTLE_S = 0.3
DEFINITIONS = {
    "tokens_per_second": "new tokens / seconds of the engine's own calls, prompt passes included, medians "
    "over repeats; interval: 95 % bootstrap over batches, at batch 1 prompts",
    "relative": "tokens per second over those of specdec without speculation, paired by prompt",
    "speedup": "tokens per second over those of the same engine without speculation, paired by prompt",
    "identical": "prompts whose tokens are, one by one, those of specdec without speculation: of ours, plain "
    "text of what engine_facts.settings.exact_against says",
    "common_prefix": "tokens before the first that differs from specdec without speculation, mean",
    "acceptance_length": "committed tokens a verify step; only of our engine, whose steps are counted",
}


@dataclass(frozen=True, kw_only=True)
class ComparePlan:
    """What to compare; the fields are the options of `specdec compare`."""

    target: str
    peers: list[str]
    drafts: list[str]
    shapes: list[str]
    data: str
    limit: int | None
    max_tokens: int
    repeats: int
    warm_up: int
    adaptive: bool
    out: Path | None
    batch_size: int = 1
    device: str = "cpu"
    dtype: str = "float32"

    def engine_config(self) -> EngineConfig:
        """Of our own engine.

        Raises:
            UsageError: a device or dtype that this machine or version lacks.
        """
        with usage_errors(flags_of({"device": 0, "dtype": 0}, {})):
            return EngineConfig(device=self.device, dtype=self.dtype)


def run_compare(plan: ComparePlan) -> dict[str, Any]:
    """Start the engines, measure, print the table, write `--out`; returns the summary for the JSON line.

    Raises:
        SpecdecError: an engine that does not start, fails, or writes another number of tokens.
    """
    peers = [parse_peer(text) for text in plan.peers]
    settings = settings_of(plan.drafts, plan.shapes, [], {}, SpecConfig(adaptive=plan.adaptive))
    check_drafts(settings)
    engine_config = plan.engine_config()
    for peer in peers:
        if plan.batch_size > 1 and not peer.takes_batches:
            raise UsageError(
                f"--peer ({peer.name}) decodes one prompt at a time; leave --batch-size at 1, or drop it"
            )
    if len({peer.name for peer in peers}) != len(peers):
        raise UsageError("--peer must not name the same engine twice")
    if plan.out is not None:
        require_writable("--out", plan.out)
        require_not_input("--out", plan.out, {"--data": prompt_file(plan.data)})
        require_own_result("--out", plan.out, "compare")
    folder = resolve_target(plan.target)
    if is_random(folder):
        raise UsageError(f"TARGET ({plan.target}) has no weights that another engine could read")
    encoder = PromptEncoder(folder)
    prompts = bench_data(encoder, plan.data, plan.limit).first
    longest = max(len(prompt.token_ids) for prompt in prompts)
    context = ModelConfig.from_folder(folder).max_position_embeddings
    lengths = {prompt.id: len(prompt.token_ids) + plan.max_tokens - 1 for prompt in prompts}
    require_shorter("--data", plan.data, lengths, context)
    setups = {
        peer.name: setup_of(
            peer,
            target=plan.target,
            folder=folder,
            max_model_len=min(context, longest + plan.max_tokens + 16),
            threads=torch.get_num_threads(),
            dtype=plan.dtype,
            device=plan.device,
            batch_size=plan.batch_size,
        )
        for peer in peers
        if peer.kind != "url"
    }
    engines = make_engines(
        str(folder),
        settings,
        batch_size=plan.batch_size,
        longest=longest + plan.max_tokens,
        engine_config=engine_config,
    )
    params = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens, ignore_eos=True)
    ours = make_decoders(engines, settings, params)
    decoders = {f"{OURS} {name}": settled(decode) for name, decode in ours.items()}
    facts: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        for peer in peers:
            say(f"starting {peer.name}")
            engine = _start(peer, setups.get(peer.name), encoder, plan.device)
            stack.callback(engine.close)
            facts[peer.name] = engine.facts
            decoders[peer.name] = settled(peer_decoder(engine, plan.max_tokens))
        with progress("prompts", plan.repeats * len(prompts)) as bar:
            run = run_interleaved(
                decoders,
                prompts,
                batch_size=plan.batch_size,
                repeats=plan.repeats,
                warm_up=plan.warm_up,
                on_progress=bar.update,
                reference=f"{OURS} {PLAIN}",
                before_repeat=partial(forget_estimates, engines),
            )
    results = run.results
    bases = {f"{OURS} {one.name}": f"{OURS} {PLAIN}" for one in settings} | bases_of(peers)
    batches = batches_of(run)
    figures = [summarise(name, results, plan.max_tokens, bases.get(name), batches) for name in decoders]
    for one in figures:
        one["engine_facts"] = facts.get(one["engine"]) or our_facts(engines[PLAIN])
    _print(plan, figures, len(prompts))
    summary = {
        "schema": SCHEMA,
        "target": plan.target,
        "data": plan.data,
        "batch_size": plan.batch_size,
        "engines": figures,
    }
    if plan.out is not None:
        record = RunRecord.collect(
            dtype=plan.dtype,
            template_hash=encoder.template_hash,
            data_hash=sha256_file(prompt_file(plan.data)),
            defaults={
                "max_tokens": plan.max_tokens,
                "batch_size": plan.batch_size,
                "device": plan.device,
                "repeats": plan.repeats,
                "warm_up_prompts": plan.warm_up,
                "adaptive": plan.adaptive,
                "shapes": plan.shapes,
                "settle_seconds": SETTLE_S,
                "threads": torch.get_num_threads(),
            },
        )
        details = {name: answer_records(name, run) for name in decoders}
        write_json_atomic(
            plan.out,
            {**summary, "run": record.to_dict(), "definitions": DEFINITIONS, "per_prompt": details},
        )
        say(f"written: {plan.out}")
    return summary


def peer_decoder(engine: PeerProcess | PeerServer, max_tokens: int) -> Decode:
    """Decode with another engine, all prompts of a batch at once."""

    def decode(batch: Sequence[BenchPrompt]) -> list[Measured]:
        answers, seconds = engine.answer(
            [prompt.id for prompt in batch], [prompt.token_ids for prompt in batch], max_tokens
        )
        return [Measured(token_ids=new, seconds=seconds / len(batch), stats=SpecStats()) for new in answers]

    return decode


def settled(decode: Decode) -> Decode:
    """The same, after the threads of the engine before it have gone to sleep."""

    def waiting(batch: Sequence[BenchPrompt]) -> list[Measured]:
        time.sleep(SETTLE_S)
        return decode(batch)

    return waiting


def _start(
    peer: Peer, setup: dict[str, Any] | None, encoder: PromptEncoder, device: str
) -> PeerProcess | PeerServer:
    if setup is None:
        return PeerServer(peer, lambda text: output_ids(encoder, text))
    return PeerProcess(peer, setup, threads=torch.get_num_threads(), device=device)


def bases_of(peers: Sequence[Peer]) -> dict[str, str]:
    """For each peer the one that differs from it in speculation alone, if it is among them."""
    plain = {peer.without_speculation: peer.name for peer in peers if peer.is_plain}
    return {peer.name: plain[peer.without_speculation] for peer in peers if peer.without_speculation in plain}


def output_ids(encoder: PromptEncoder, text: str) -> list[int]:
    """Token ids of what a model wrote: nothing of what a tokenizer puts before a prompt."""
    return encoder.encode(text)[len(encoder.encode("")) :]


def our_facts(engine: Engine) -> dict[str, Any]:
    """What peers say of themselves, of our engine."""
    packed, matrices = engine.decoder.num_packed, engine.decoder.num_packed + engine.decoder.num_plain
    return {
        "engine": f"specdec {versions()['specdec']}",
        "versions": {"torch": torch.__version__},
        "weights": f"{engine.config.dtype}, {packed} of {matrices} matrices held in fp16",
        "settings": {"threads": torch.get_num_threads(), "exact_against": engine.admission.exact_against},
    }


def summarise(
    name: str,
    results: dict[str, list[list[Measured]]],
    max_tokens: int,
    base: str | None,
    batches: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Figures of one engine.

    Args:
        name: which.
        results: of all.
        max_tokens: that each wrote for every prompt.
        base: the same engine without speculation, if measured.
        batches: numbers of the prompts that were decoded together.
    """
    seconds = _seconds(results[name])
    tokens = [float(max_tokens)] * len(seconds)
    reference = f"{OURS} {PLAIN}"
    first = [repeats[0] for repeats in results[name]]
    expected = [repeats[0].token_ids for repeats in results[reference]]
    steps = SpecStats()
    for one in first:
        steps.add(one.stats)
    figures: dict[str, Any] = {
        "engine": name,
        "prompts": len(first),
        "tokens": max_tokens * len(first),
        "tokens_per_second": sum(tokens) / sum(seconds),
        "tokens_per_second_interval": ratio_interval(grouped(tokens, batches), grouped(seconds, batches)),
        "relative": None,
        "relative_interval": None,
        "speedup": None,
        "speedup_interval": None,
        "identical": sum(one.token_ids == ids for one, ids in zip(first, expected, strict=True)),
        "common_prefix": mean(
            common_prefix(one.token_ids, ids) for one, ids in zip(first, expected, strict=True)
        ),
        "acceptance_length": steps.acceptance_length,
    }
    for key, other in (("relative", reference), ("speedup", base)):
        if other is not None and other != name:
            theirs = _seconds(results[other])
            figures[key] = sum(theirs) / sum(seconds)
            columns = (tokens, seconds, tokens, theirs)
            figures[f"{key}_interval"] = speedup_interval(*(grouped(column, batches) for column in columns))
    return figures


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts share from the beginning."""
    pairs = zip(left, right, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right))
    )


def _seconds(repeated: list[list[Measured]]) -> list[float]:
    return [median(one.seconds for one in repeats) for repeats in repeated]


def _print(plan: ComparePlan, figures: list[dict[str, Any]], count: int) -> None:
    title = (
        f"{plan.target}, {plan.data}, {count} prompts x {plan.max_tokens} tokens, greedy, "
        f"batch {plan.batch_size}, {plan.dtype}, {counted(torch.get_num_threads(), 'thread')}, "
        f"{plan.repeats} interleaved repeats; relative and identical: against {OURS} {PLAIN}; speedup: "
        "against the same engine without speculation; 95 % intervals over batches"
    )
    columns = ["engine", "weights", "tokens/s", "interval", "relative", "interval", "speedup", "interval"]
    rows = [
        [
            one["engine"],
            one["engine_facts"]["weights"],
            one["tokens_per_second"],
            format_interval(one["tokens_per_second_interval"]),
            one["relative"],
            format_interval(one["relative_interval"]),
            one["speedup"],
            format_interval(one["speedup_interval"]),
            f"{one['identical']}/{count}",
            one["common_prefix"],
            one["acceptance_length"],
        ]
        for one in figures
    ]
    print_table(title, [*columns, "identical", "common prefix", "accept length"], rows)
