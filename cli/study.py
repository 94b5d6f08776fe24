"""`specdec study`: does the choice of layers, or of a recipe, show in acceptance after training?

Owns the command line of the study: options, which sets are named, the files. Does not know how arms are
trained or compared.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.datasets import require_training_data
from specdec.cli.usage import flags_of, usage_errors
from specdec.errors import SpecdecError, UsageError
from specdec.train.study_config import STUDY_TRAINING, StudyConfig
from specdec.train.study_recipes import Recipe, check_recipes, parse_recipe

DEFAULT = StudyConfig()
FLAGS = flags_of({**vars(DEFAULT), **vars(STUDY_TRAINING)}, {"learning_rate": "--lr", "max_depth": "--chain"})


def study(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Folder, or a name that pull knows.")],
    data: Annotated[
        Path,
        typer.Option(
            help="JSONL of the target's answers (specdec regenerate), or hf:NAME[,config=C][,split=S]"
            "[,limit=N] of the datasets library."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the study; run again to go on.")],
    layers: Annotated[
        list[str] | None, typer.Option(help="A set to compare, NAME=11,18,27 or NAME=selection.json; repeat.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare ways to train on one --layers instead: NAME:option=value,..., such as kl:loss=kl "
            "or plain:init=random,fc_norm=false; repeat."
        ),
    ] = None,
    k: Annotated[str, typer.Option(help="Numbers of taps that get baselines, the first also random.")] = "3",
    seeds: Annotated[str, typer.Option(help="Seeds for each K; the last counts for the rest.")] = "3",
    random_sets: Annotated[int, typer.Option(help="Random tap sets of the first K.")] = 5,
    random_seed: Annotated[int, typer.Option(help="Seed of their draw.")] = 0,
    scores: Annotated[
        Path | None, typer.Option(help="selection.json whose scores are held against what was measured.")
    ] = None,
    probe_tokens: Annotated[
        int, typer.Option(help="Positions a ridge probe of every set is fitted on; 0 leaves it out.")
    ] = 8192,
    train_tokens: Annotated[
        int, typer.Option(help="Answer tokens every head is trained on.")
    ] = DEFAULT.train_tokens,
    epochs: Annotated[float, typer.Option(help="Passes over them.")] = STUDY_TRAINING.epochs,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Tokens a head can say.")
    ] = STUDY_TRAINING.draft_vocab_size,
    learning_rate: Annotated[
        float, typer.Option("--lr", help="Largest learning rate.")
    ] = STUDY_TRAINING.learning_rate,
    held_out: Annotated[int, typer.Option(help="Conversations that measure acceptance.")] = DEFAULT.held_out,
    served: Annotated[
        int, typer.Option(help="Of these, prompts also answered in the engine.")
    ] = DEFAULT.served,
    served_tokens: Annotated[int, typer.Option(help="Tokens of such an answer.")] = DEFAULT.served_tokens,
    chain: Annotated[int, typer.Option(help="Drafted tokens of a verify step.")] = DEFAULT.chain,
    max_hours: Annotated[float | None, typer.Option(help="Start no arm after this time.")] = None,
    states_cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps target states (default: in --out).")
    ] = None,
    keep_heads: Annotated[bool, typer.Option(help="Keep the trained heads.")] = DEFAULT.keep_heads,
    picture: Annotated[Path | None, typer.Option(help="PNG of the comparison.")] = None,
) -> None:
    """Train heads on many tap sets, or by many recipes, with equal budget and compare their acceptance."""
    recipes = _recipes(context, recipe or [], layers or [])
    counts, per_count = _numbers("--k", k), _numbers("--seeds", seeds)
    require_training_data(data)
    if scores is not None and not scores.is_file():
        raise UsageError(f"--scores ({scores}) is not a file; write one with specdec select-layers")
    if random_sets < 0 or probe_tokens < 0:
        option, value = (
            ("--random-sets", random_sets) if random_sets < 0 else ("--probe-tokens", probe_tokens)
        )
        raise UsageError(f"{option} ({value}) must be at least 0")
    if max_hours is not None and not max_hours >= 0:
        raise UsageError(f"--max-hours ({max_hours}) must be a number of at least 0")
    with usage_errors(FLAGS):
        config = StudyConfig(
            train_tokens=train_tokens,
            held_out=held_out,
            served=served,
            served_tokens=served_tokens,
            chain=chain,
            keep_heads=keep_heads,
            training=replace(
                STUDY_TRAINING, epochs=epochs, draft_vocab_size=draft_vocab_size, learning_rate=learning_rate
            ),
        )
    check_recipes(recipes, config.training)
    _require_outputs(out, picture, {"--data": data, "--scores": scores})

    from specdec.cli.studying.run import StudyOptions, run_study

    run_study(
        StudyOptions(
            config=config,
            target=target,
            data=data,
            out=out,
            named=[_named(text) for text in layers or []],
            counts=counts,
            seeds=per_count,
            random_sets=random_sets,
            random_seed=random_seed,
            scores=scores,
            probe_tokens=0 if recipes else probe_tokens,
            max_hours=max_hours,
            states_cache=states_cache,
            picture=picture,
            recipes=recipes,
        )
    )


def _recipes(context: typer.Context, texts: list[str], layers: list[str]) -> list[Recipe]:
    """The recipes; refuses what only a study of layers takes beside them."""
    recipes = [parse_recipe(text) for text in texts]
    if not recipes:
        return []
    if len(layers) != 1:
        raise UsageError(
            f"--recipe needs one tap set for all, --layers NAME=21,25,29; {len(layers)} were given"
        )
    for name in ("k", "random_sets", "random_seed", "scores", "probe_tokens"):
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} and --recipe exclude each other: recipes are compared on one tap set")
    return recipes


def _require_outputs(out: Path, picture: Path | None, inputs: dict[str, Path | None]) -> None:
    """Refuse places that cannot be written or that are read."""
    from specdec.cli.outputs import require_not_input, require_own_result, require_writable

    report = out / "study.json"
    require_writable("--out", report)
    require_not_input("--out", report, inputs)
    require_own_result("--out", report, "study")
    if picture is not None:
        if picture.suffix != ".png":
            raise UsageError(f"--picture ({picture}) must end in .png; pictures are PNG files")
        require_writable("--picture", picture)
        require_not_input("--picture", picture, inputs)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} ({text}) must be whole numbers above 0, like 3 or 3,1,5")
    numbers = [int(part) for part in parts]
    if option == "--k" and len(set(numbers)) != len(numbers):
        raise UsageError(f"{option} ({text}) names a number of taps twice")
    return numbers


def _named(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip() or not value.strip():
        raise SpecdecError(f"--layers ({text}) must be NAME=11,18,27 or NAME=selection.json")
    return name.strip(), value.strip()
