"""The grid of a load sweep: prompts, turns in order, what is left out, the record and the picture.

Turns go over the whole grid one after another, so that a sweep cut short by its time has whole turns of every
point; every point's turn is written down when it is done, and a second run goes on behind the last. Which
fixed settings are left out where is decided from what was written down, so a run that goes on decides alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.cli.benching.measure import BenchPrompt
from specdec.cli.benching.points import bench_data
from specdec.cli.console import counted, format_interval, print_table, progress, say
from specdec.cli.datasets import load_prompts, prompt_file
from specdec.cli.load_sweeping.figures import DEFINITIONS, is_slower, point_figures
from specdec.cli.load_sweeping.picture import draw_load_sweep
from specdec.cli.load_sweeping.turns import (
    ADAPTIVE,
    OFF,
    ClosedLoop,
    LoadEngines,
    TurnSetting,
    run_side_by_side,
)
from specdec.cli.loading.traffic import prefix_texts
from specdec.cli.outputs import require_own_beside, require_own_result, require_writable
from specdec.cli.shapes import parse_shape
from specdec.config import SpecConfig
from specdec.drafts import check_spelling
from specdec.errors import SpecdecError, UsageError
from specdec.hub import resolve_target
from specdec.provenance import RunRecord, folder_fingerprint, sha256_text, write_json_atomic
from specdec.requests import PromptEncoder

SCHEMA = "specdec.load_sweep/1"
SHARED_PREFIX, BEHIND_PREFIX = "shared-prefix", "mt_bench"
# longer prompts measure reading, not writing
MOST_PROMPT_TOKENS = 320
FEWEST_REQUESTS = 6
# a fixed setting with less than this of the best one's speed gets no further turn at its point ...
HOPELESS = 0.85
# ... and with less than this none at higher loads, where rows are dearer
HOPELESS_ABOVE = 0.8


@dataclass(frozen=True, kw_only=True)
class LoadSweepOptions:
    """The options of `specdec load-sweep`."""

    target: str
    draft: str
    clients: list[int]
    data: list[str]
    shape: str
    fixed: list[str]
    max_tokens: int
    turns: int
    max_minutes: float
    prefix_words: int
    out: Path


@dataclass(frozen=True)
class _Key:
    """A turn's place in the grid."""

    data: str
    clients: int
    setting: str
    turn: int


def requests_of(clients: int) -> int:
    """Requests of a turn: every client has one, and some have more, so that ends and beginnings mix."""
    return max(FEWEST_REQUESTS, clients + 2)


def settings_of(options: LoadSweepOptions) -> list[TurnSetting]:
    """Off, adaptive and the fixed ones.

    Raises:
        UsageError: no shape, or one named twice.
    """
    if len(set(options.fixed)) != len(options.fixed):
        raise UsageError("--fixed must not name the same shape twice")
    fixed = [
        TurnSetting(name=shape, spec=parse_shape(shape, SpecConfig(adaptive=False), option="--fixed"))
        for shape in options.fixed
    ]
    adaptive = TurnSetting(name=ADAPTIVE, spec=parse_shape(options.shape, SpecConfig(adaptive=True)))
    return [TurnSetting(name=OFF, spec=None), adaptive, *fixed]


def run_load_sweep(options: LoadSweepOptions) -> dict[str, Any]:
    """Measure what is missing, write the folder; returns the JSON line.

    Raises:
        SpecdecError: an option that is wrong, a folder of another sweep, a request that fails.
    """
    settings = settings_of(options)
    check_spelling(options.draft)
    for name in ("load_sweep.json", "turns.jsonl"):
        require_writable("--out", options.out / name)
    require_own_result("--out", options.out / "load_sweep.json", "load_sweep")
    require_own_beside("--out", options.out / "turns.jsonl", options.out / "load_sweep.png")
    folder = resolve_target(options.target)
    encoder = PromptEncoder(folder)
    prompts = {name: sweep_prompts(encoder, name, options.prefix_words) for name in options.data}
    shared = _shared(options, folder, prompts)
    done = _read_turns(options.out / "turns.jsonl", shared)
    _measure(options, settings, prompts, folder, done)
    if not any(key.turn == 0 for key in done):
        raise SpecdecError("--max-minutes ended the sweep before its first turn; give it more")
    points = [
        {"data": data, "clients": clients, **point_figures(_by_setting(done, data, clients, settings))}
        for data in options.data
        for clients in sorted(options.clients)
        if any((key.data, key.clients, key.setting) == (data, clients, ADAPTIVE) for key in done)
    ]
    summary = {"schema": SCHEMA, "target": options.target, "draft": options.draft, "points": points}
    title = (
        f"{options.target}, draft {options.draft}, adaptive up to {options.shape}, {options.max_tokens} "
        f"tokens an answer, greedy, float32, {counted(torch.get_num_threads(), 'thread')}"
    )
    _print(title, points)
    draw_load_sweep(points, options.out / "load_sweep.png", title=title)
    record = RunRecord.collect(
        dtype="float32",
        template_hash=encoder.template_hash,
        data_hash=shared["prompts_hash"],
        defaults={**shared, "max_minutes": options.max_minutes, "turns": options.turns},
    )
    record.write(options.out / "run.json")
    write_json_atomic(
        options.out / "load_sweep.json", {**summary, "run": record.to_dict(), "definitions": DEFINITIONS}
    )
    say(f"written: {options.out}")
    return {**summary, "points": [_line(point) for point in points]}


def sweep_prompts(encoder: PromptEncoder, name: str, prefix_words: int) -> list[BenchPrompt]:
    """First turns of a set, the long ones left out; `shared-prefix` puts one long text before each."""
    found = bench_data(encoder, BEHIND_PREFIX if name == SHARED_PREFIX else name, None).first
    kept = [prompt for prompt in found if len(prompt.token_ids) <= MOST_PROMPT_TOKENS]
    if not kept:
        raise SpecdecError(f"--data ({name}) has no prompt of at most {MOST_PROMPT_TOKENS} tokens")
    if name != SHARED_PREFIX:
        return kept
    [prefix] = prefix_texts(prefix_words, 1)
    texts = {prompt.id: prompt.turns[0] for prompt in load_prompts(BEHIND_PREFIX)}
    return [
        BenchPrompt(
            id=prompt.id,
            category=prompt.category,
            token_ids=encoder.encode([{"role": "user", "content": f"{prefix}\n\n{texts[prompt.id]}"}]),
        )
        for prompt in kept
    ]


def _measure(
    options: LoadSweepOptions,
    settings: Sequence[TurnSetting],
    prompts: dict[str, list[BenchPrompt]],
    folder: Path,
    done: dict[_Key, dict[str, Any]],
) -> None:
    """Do the turns that are missing, as far as time allows."""
    started = time.monotonic()
    longest = max(len(prompt.token_ids) for each in prompts.values() for prompt in each)
    engines: LoadEngines | None = None
    grid = [
        (turn, data, clients)
        for turn in range(options.turns)
        for clients in sorted(options.clients)
        for data in options.data
    ]
    path = options.out / "turns.jsonl"
    with progress("points", len(grid)) as bar:
        for number, (turn, data, clients) in enumerate(grid):
            keys = [_Key(data, clients, setting.name, turn) for setting in settings]
            missing = [
                setting
                for setting, key in zip(settings, keys, strict=True)
                if key not in done and not _left_out(done, key, settings, options)
            ]
            if missing and options.max_minutes and time.monotonic() - started > 60 * options.max_minutes:
                say(f"--max-minutes ({options.max_minutes:g}) reached in turn {turn + 1}")
                return
            if missing and engines is None:
                # weights are read only when something is left to do
                engines = LoadEngines(
                    folder,
                    options.draft,
                    settings,
                    most_clients=max(options.clients),
                    longest=longest + options.max_tokens,
                )
                warm_up = prompts[data][:2]
                run_side_by_side(_loops(engines, missing, warm_up, 2, min(16, options.max_tokens), "none"))
            if missing:
                assert engines is not None, "engines were just made"
                requests = list(_turn_prompts(prompts[data], requests_of(clients), turn))
                salt = f"{data} {clients} {turn}"
                loops = _loops(engines, missing, requests, clients, options.max_tokens, salt)
                run_side_by_side(loops)
                with path.open("a", encoding="utf-8") as file:
                    for loop in loops:
                        key = _Key(data, clients, loop.setting.name, turn)
                        done[key] = loop.record()
                        file.write(json.dumps({**asdict(key), "record": done[key]}) + "\n")
            bar.update(number + 1, f"({data}, {clients} clients, turn {turn + 1})")


def _loops(
    engines: LoadEngines,
    settings: Sequence[TurnSetting],
    requests: list[BenchPrompt],
    clients: int,
    max_tokens: int,
    salt: str,
) -> list[ClosedLoop]:
    return [
        ClosedLoop(engines.of(setting), setting, requests, clients=clients, max_tokens=max_tokens, salt=salt)
        for setting in settings
    ]


def _turn_prompts(prompts: list[BenchPrompt], count: int, turn: int) -> Iterator[BenchPrompt]:
    """Other prompts in every turn; a small set comes round again, each request under a name of its own."""
    for index in range(count):
        at = turn * count + index
        prompt = prompts[at % len(prompts)]
        yield BenchPrompt(id=f"{prompt.id} {index}", category=prompt.category, token_ids=prompt.token_ids)


def _left_out(
    done: dict[_Key, dict[str, Any]],
    key: _Key,
    settings: Sequence[TurnSetting],
    options: LoadSweepOptions,
) -> bool:
    """Whether a fixed setting is known to be among the slower ones here, or at a lower load."""
    if key.setting in (OFF, ADAPTIVE):
        return False
    lower = [clients for clients in options.clients if clients < key.clients]
    for clients in [*lower, key.clients]:
        others = _by_setting(done, key.data, clients, settings)
        mine = others.pop(key.setting)
        factor = HOPELESS if clients == key.clients else HOPELESS_ABOVE
        if mine and is_slower(mine, [turns for turns in others.values() if turns], factor):
            return True
    return False


def _by_setting(
    done: dict[_Key, dict[str, Any]], data: str, clients: int, settings: Sequence[TurnSetting]
) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {setting.name: {} for setting in settings}
    for key, record in done.items():
        if (key.data, key.clients) == (data, clients):
            found[key.setting][key.turn] = record
    return found


def _shared(options: LoadSweepOptions, folder: Path, prompts: dict[str, list[BenchPrompt]]) -> dict[str, Any]:
    """What all turns of a folder have in common."""
    ids = {name: [prompt.token_ids for prompt in each] for name, each in prompts.items()}
    return {
        "target_fingerprint": folder_fingerprint(folder),
        "prompts_hash": sha256_text(repr(ids)),
        "data_files": [
            prompt_file(BEHIND_PREFIX if name == SHARED_PREFIX else name).name for name in options.data
        ],
        "draft": options.draft,
        "adaptive_shape": options.shape,
        "fixed": options.fixed,
        "clients": sorted(options.clients),
        "requests": {str(clients): requests_of(clients) for clients in sorted(options.clients)},
        "max_tokens": options.max_tokens,
        "most_prompt_tokens": MOST_PROMPT_TOKENS,
        "prefix_words": options.prefix_words,
        "left_out_below": HOPELESS,
        "left_out_above_below": HOPELESS_ABOVE,
        "threads": torch.get_num_threads(),
    }


def _read_turns(path: Path, shared: dict[str, Any]) -> dict[_Key, dict[str, Any]]:
    """Turns that were done before; the file's first line says what they have in common.

    Raises:
        SpecdecError: it is another sweep's.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines:
        path.write_text(json.dumps(shared) + "\n", encoding="utf-8")
        return {}
    try:
        begun = json.loads(lines[0])
        rows = [json.loads(line) for line in lines[1:]]
        done = {_Key(row["data"], row["clients"], row["setting"], row["turn"]): row["record"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        raise SpecdecError(f"{path} is damaged ({error}); name another folder, or remove it") from error
    if begun != shared:
        raise SpecdecError(f"--out ({path.parent}) holds a sweep with other settings; name another folder")
    return done


def _line(point: dict[str, Any]) -> dict[str, Any]:
    """A point in few words, for the last line of stdout."""
    return {
        "data": point["data"],
        "clients": point["clients"],
        "best_fixed": point["best_fixed"],
        **{
            name: None if point[name] is None else round(point[name]["value"], 4)
            for name in ("adaptive_over_off", "adaptive_over_best_fixed")
        },
    }


def _print(title: str, points: Sequence[dict[str, Any]]) -> None:
    columns = ["data", "clients", "turns", "off tokens/s", "adaptive/off", "interval", "by cpu time"]
    columns += ["drafted/step", "best fixed", "adaptive/best", "interval", "identical"]
    rows = []
    for point in points:
        adaptive, off = point["settings"][ADAPTIVE], point["settings"][OFF]
        over, best = point["adaptive_over_off"], point["adaptive_over_best_fixed"]
        rows.append(
            [
                point["data"],
                point["clients"],
                adaptive["turns"],
                off["tokens_per_second"],
                over["value"] if over else None,
                format_interval(over["interval"]) if over else None,
                (adaptive["cpu_over_off"] or {}).get("value"),
                adaptive["drafted_per_verify_step"],
                point["best_fixed"],
                best["value"] if best else None,
                format_interval(best["interval"]) if best else None,
                f"{adaptive['identical']}/{adaptive['compared']}",
            ]
        )
    print_table(f"{title}; 95 % intervals over turns", columns, rows)
