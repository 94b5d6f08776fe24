"""Several ways of decoding on the same prompts, interleaved. The work behind `specdec bench` and `compare`.

Every batch of prompts is decoded by every setting before the next batch, in an order that turns
round from batch to batch, so that a machine whose speed drifts treats all settings alike. The plain
setting (no speculation, same engine, same weights) is always measured beside the others. Figures are made
elsewhere (`bench_figures.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.cli.benching.energy import EnergyMeter
from specdec.cli.benching.observe import Commit, Observed, PartTimes, observe
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.sequence import SamplingParams
from specdec.stats import SpecStats

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """One prompt as token ids, with its name in the data set.

    `turn` counts the turns of its conversation from 0; `seed` is that of its sampled answer.
    """

    id: str
    category: str
    token_ids: list[int]
    turn: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way of decoding: a drafter's spelling and how it speculates; None is plain decoding.

    `rule` None verifies by the exact rule that suits.
    """

    name: str
    draft: str | None
    spec: SpecConfig | None
    shape: str | None = None
    rule: str | None = None
    knobs: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One prompt under one setting. `seconds` is the batch's time divided by its number of prompts.

    `rule` verified the drafts; not `lossless`: the text does not have the target's law; `simulated`: it means
    nothing, accepted lengths were drawn. What other engines do not tell is empty.

    Attributes:
        commits: what every step added.
        decode_tokens: tokens added after every prompt of the batch had its first one.
        decode_seconds: this answer's share of the time since then.
        parts: this answer's share of the batch's time by part.
    """

    token_ids: list[int]
    seconds: float
    stats: SpecStats
    rule: str = "none"
    lossless: bool = True
    simulated: bool = False
    finish_reason: str | None = None
    text: str = ""
    commits: Sequence[Commit] = ()
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    parts: PartTimes | None = None


Decode = Callable[[Sequence[BenchPrompt]], list[Measured]]
# for a row and what the reference wrote: the next turn of its conversation, None after the last
Follow = Callable[[BenchPrompt, Measured], BenchPrompt | None]


@dataclass(frozen=True, kw_only=True)
class Interleaved:
    """What a run gave.

    Attributes:
        rows: every prompt that was decoded, later turns behind the batch of the turn before.
        batches: of each row, the number of the batch that its conversation began in.
        results: per decoder and row one entry a repeat.
        warm_up: per decoder, answers that are in no figure.
    """

    rows: list[BenchPrompt]
    batches: list[int]
    results: dict[str, list[list[Measured]]]
    warm_up: dict[str, list[Measured]]


def engine_decoder(
    engine: Engine, params: SamplingParams, meter: EnergyMeter | None = None, most_tokens: int | None = None
) -> Decode:
    """Decode a batch with an engine; `most_tokens` cuts answers short (a warm-up)."""
    if most_tokens is not None:
        params = replace(params, max_tokens=min(most_tokens, params.max_tokens or most_tokens))

    def decode(batch: Sequence[BenchPrompt]) -> list[Measured]:
        chosen = [replace(params, seed=prompt.seed) for prompt in batch]
        seen = observe(engine, [prompt.token_ids for prompt in batch], chosen, meter)
        for prompt, result in zip(batch, seen.results, strict=True):
            if result.error:
                raise SpecdecError(f"prompt {prompt.id}: {result.error}; nothing was measured")
        return _measured(seen)

    return decode


def _measured(seen: Observed) -> list[Measured]:
    count = len(seen.results)
    # the last prompt's first token: what comes later is decoding alone
    ready = max(commits[0].at_s for commits in seen.commits)
    end = max(commits[-1].at_s for commits in seen.commits)
    parts = seen.parts
    share = PartTimes(
        draft=parts.draft / count,
        verify=parts.verify / count,
        sample=parts.sample / count,
        commit=parts.commit / count,
        host=parts.host / count,
        steps=parts.steps / count,
        joules=None if parts.joules is None else parts.joules / count,
    )
    return [
        Measured(
            token_ids=result.token_ids,
            seconds=seen.seconds / count,
            stats=result.stats,
            rule=result.rule,
            lossless=result.lossless,
            simulated=result.simulated,
            finish_reason=result.finish_reason,
            text=result.text,
            commits=tuple(commits),
            decode_tokens=sum(commit.tokens for commit in commits if commit.at_s > ready),
            decode_seconds=(end - ready) / count,
            parts=share,
        )
        for result, commits in zip(seen.results, seen.commits, strict=True)
    ]


def transformers_decoder(folder: str, max_tokens: int) -> Decode:
    """Decode prompts one after the other with `transformers` `generate` (fp32, eager, greedy)."""
    import torch

    from specdec.hf import load_hf_model

    model = load_hf_model(folder)

    def decode(batch: Sequence[BenchPrompt]) -> list[Measured]:
        measured = []
        for prompt in batch:
            ids = torch.tensor([prompt.token_ids])
            mask = torch.ones_like(ids)
            started = time.perf_counter()
            output = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
            seconds = time.perf_counter() - started
            tokens = output[0, len(prompt.token_ids) :].tolist()
            measured.append(Measured(token_ids=tokens, seconds=seconds, stats=SpecStats()))
        return measured

    return decode


def run_interleaved(
    decoders: Mapping[str, Decode],
    prompts: Sequence[BenchPrompt],
    *,
    batch_size: int,
    repeats: int,
    warm_up: int,
    on_progress: Callable[[int, str], None],
    warm_up_decoders: Mapping[str, Decode] | None = None,
    follow: Follow | None = None,
    reference: str = PLAIN,
    before_repeat: Callable[[], None] = lambda: None,
) -> Interleaved:
    """Decode every prompt with every decoder, `repeats` times.

    Args:
        decoders: by name.
        prompts: first turns.
        batch_size: prompts given to a decoder at once.
        repeats: times every prompt is decoded by each.
        warm_up: batches that each decodes uncounted before the first.
        on_progress: is told how many prompts are done.
        warm_up_decoders: what decodes these instead, shorter.
        follow: makes later turns out of what `reference` wrote in the first repeat, for all decoders alike.
        reference: whose answers conversations go on with.
        before_repeat: called before each, so that all begin alike.
    """
    names = list(decoders)
    run = Interleaved(
        rows=[],
        batches=[],
        results={name: [] for name in names},
        warm_up={name: [] for name in names},
    )
    batches = [list(prompts[i : i + batch_size]) for i in range(0, len(prompts), batch_size)]
    for _ in range(warm_up):
        for name in names:
            run.warm_up[name] += (warm_up_decoders or decoders)[name](batches[0])
    batch_of = {prompt.id: number for number, batch in enumerate(batches) for prompt in batch}
    rounds: list[list[BenchPrompt]] = []
    done = turn = 0
    for repeat in range(repeats):
        before_repeat()
        todo = deque(rounds if repeat else batches)
        row = 0
        while todo:
            batch = todo.popleft()
            shift = turn % len(names)
            turn += 1
            if not repeat:
                rounds.append(batch)
                run.rows.extend(batch)
                run.batches.extend(batch_of[prompt.id] for prompt in batch)
                for name in names:
                    run.results[name] += [[] for _ in batch]
            for name in names[shift:] + names[:shift]:
                for index, one in enumerate(decoders[name](batch)):
                    run.results[name][row + index].append(one)
            if not repeat and follow is not None:
                written = [run.results[reference][row + index][0] for index in range(len(batch))]
                later = [follow(prompt, one) for prompt, one in zip(batch, written, strict=True)]
                if known := [prompt for prompt in later if prompt is not None]:
                    todo.appendleft(known)
            row += len(batch)
            done += len(batch)
            on_progress(done, f"repeat {repeat + 1} of {repeats}")
        turn = repeat + 1
    return run


def make_engines(
    target: str,
    settings: Sequence[Setting],
    *,
    batch_size: int,
    longest: int,
    engine_config: EngineConfig,
    simulate: float | None = None,
) -> dict[str, Engine]:
    """Engines for every setting, by name, all on one set of target weights.

    Args:
        target: a folder, or what else names a target.
        settings: the first one is plain decoding.
        batch_size: most prompts decoded at once.
        longest: tokens of the longest text, prompt and answer.
        engine_config: everything but sizes and speculation.
        simulate: acceptance length to simulate in the settings that draft.
    """
    # rows a proposal may write behind the text: a tree, or the nodes grown on the way to it
    behind = max(
        (max(s.spec.max_nodes, s.spec.top_k * s.spec.max_depth) for s in settings if s.spec), default=0
    )
    config = replace(
        engine_config,
        max_num_seqs=batch_size,
        # every answer pays for its own prompt, in every repeat
        prefix_cache=False,
        kv_tokens=batch_size * (longest + behind + 2 * engine_config.block_size),
    )
    plain = Engine(target, config=config)
    engines: dict[str, Engine] = {}
    for setting in settings:
        if setting.draft is None:
            engines[setting.name] = plain
            continue
        assert setting.spec is not None, "a drafter needs speculation settings"
        engines[setting.name] = Engine(
            plain,
            draft=setting.draft,
            config=replace(config, spec=setting.spec, simulate_acceptance=simulate),
        )
    return engines


def forget_estimates(engines: Mapping[str, Engine]) -> None:
    """Let every engine speculate as when it was made: nothing of one repeat decides in the next."""
    for engine in engines.values():
        engine.forget_estimates()


def make_decoders(
    engines: Mapping[str, Engine],
    settings: Sequence[Setting],
    params: SamplingParams,
    *,
    meter: EnergyMeter | None = None,
    most_tokens: int | None = None,
) -> dict[str, Decode]:
    """Decoders for every setting: its engine, and its rule where it drafts."""
    return {
        setting.name: engine_decoder(
            engines[setting.name],
            params if setting.draft is None else replace(params, rule=setting.rule, rule_knobs=setting.knobs),
            meter,
            most_tokens,
        )
        for setting in settings
    }
