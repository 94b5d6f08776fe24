"""The steps of `specdec demo`, each of them the command a user would run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.cli.benching.measure import PLAIN
from specdec.cli.benching.run import BenchPlan, run_bench
from specdec.cli.console import say
from specdec.errors import SpecdecError
from specdec.hub import pull

TARGET = "smollm2-135m"
SHAPE = "chain:3"  # four rows a step: what a CPU verifies in the time of one
LAYER_TOKENS = 4096
TRAIN_TOKENS = 12_000
TRAIN_HOURS = 0.15


def run_demo(*, train: bool, work: Path, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    """Run all steps; returns the closing JSON object."""
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecdecError(f"--work ({work}) cannot be made: {error.strerror}") from error
    say(f"1. target {TARGET}")
    folder = pull(TARGET)
    say("2. layers: entropy and CKA of every boundary")
    selection = _select_layers(folder, work)
    if train:
        say("3. the target answers training prompts, and a draft is trained on them")
        draft = str(_train(folder, work))
    else:
        say("3. the shipped draft (train one from scratch with --train)")
        draft = TARGET
    say("4. decoding with and without speculation")
    spelling = f"ngram+{draft}"
    summary = run_bench(
        BenchPlan(
            target=TARGET,
            drafts=[spelling],
            shapes=[SHAPE],
            rules=[],
            knobs={},
            lossy=False,
            data=["mt_bench"],
            # from all of its categories, evenly
            limit=num_prompts,
            spread=True,
            max_tokens=max_tokens,
            batch_sizes=[1],
            temperatures=[0.0],
            seed=0,
            repeats=1,
            warm_up=1,
            adaptive=True,
            transformers=False,
            out=work / "bench.json",
        )
    )
    by_name = {one["setting"]: one for one in summary["settings"]}
    plain, spoken = by_name[PLAIN], by_name[f"{spelling} {SHAPE}"]
    return {
        "target": TARGET,
        "boundaries": _draft_boundaries(draft),
        "boundaries_selected_now": selection,
        "draft": spelling,
        "acceptance_length": spoken["acceptance"]["acceptance_length"],
        "acceptance_length_interval": spoken["acceptance"]["acceptance_length_interval"],
        "tokens_per_second_plain": plain["tokens_per_second"],
        "tokens_per_second_speculative": spoken["tokens_per_second"],
        "speedup": spoken["speedup"],
        "speedup_interval": spoken["speedup_interval"],
        "identical": spoken["identical"],
        "prompts": spoken["prompts"],
        "tokens": spoken["tokens"],
    }


def _select_layers(folder: Path, work: Path) -> list[int]:
    from specdec.cli.select_layers import select_layers

    out = work / "selection.json"
    select_layers(
        str(folder),
        tokens=LAYER_TOKENS,
        out=out,
        picture=work / "selection.png",
        data="train",
        # a demo measures what its choice rests on and no more
        estimators="matrix_entropy",
        probe=False,
    )
    boundaries: list[int] = json.loads(out.read_text(encoding="utf-8"))["boundaries"]
    return boundaries


def _train(folder: Path, work: Path) -> Path:
    from specdec.cli.regenerate import regenerate
    from specdec.cli.train import train

    answers, draft = work / "responses.jsonl", work / "draft"
    regenerate(
        ["train"],
        target=str(folder),
        out=answers,
        max_tokens=128,
        total_tokens=TRAIN_TOKENS,
        order="balanced",
    )
    train(
        str(folder),
        layers=str(work / "selection.json"),
        data=answers,
        out=draft,
        states_cache=str(work / "states"),
        max_hours=TRAIN_HOURS,
    )
    return draft


def _draft_boundaries(draft: str) -> list[int]:
    from specdec.drafts import draft_folder
    from specdec.drafts.checkpoint import read_draft_config

    config, _ = read_draft_config(draft_folder(draft))
    return list(config.boundaries)
