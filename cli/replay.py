"""`specdec replay`: what the prefix cache is worth when conversations go on, turn by turn."""

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.datasets import SETS_HELP


def replay(
    target: Annotated[str, typer.Argument(help="Folder, a name that pull knows, or random:SHAPE.")],
    draft: Annotated[
        str, typer.Option(help="ngram, a draft folder, a shipped draft, or ngram+DRAFT.")
    ] = "ngram",
    shape: Annotated[str, typer.Option(help="chain:DEPTH or tree:DEPTHxTOP_K:NODES.")] = "chain:3",
    data: Annotated[str, typer.Option(help=f"Prompts: {SETS_HELP}.")] = "mt_bench",
    limit: Annotated[int, typer.Option(min=1, help="Conversations.")] = 50,
    turns: Annotated[
        int,
        typer.Option(
            min=2, help="Turns of each; beyond its own it asks what other conversations of the set ask next."
        ),
    ] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 48,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations answered at once.")] = 4,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first answer of sampled text.")] = 0,
    adaptive: Annotated[
        bool, typer.Option(help="Let a sequence stop speculating while it does not pay, as served.")
    ] = False,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block: 4, 8, 16, 32 or 64.")] = 16,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV pool of the warm engine in tokens; a small one gives blocks up."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the whole result (JSON), with one record a turn.")
    ] = None,
) -> None:
    """Replay conversations with the prefix cache and without: what is computed again, acceptance, latency.

    All conversations take their first turn, then all their second, so that each comes back after the others;
    the history is what the engine with the cache answered, and both answer the same prompts. Example:

    specdec replay smollm2-135m --draft ngram+smollm2-135m --limit 50 --turns 3 --out replay.json
    """
    from specdec.cli.console import emit_json
    from specdec.cli.replaying.run import ReplayPlan, run_replay

    emit_json(
        run_replay(
            ReplayPlan(
                target=target,
                draft=draft,
                shape=shape,
                data=data,
                limit=limit,
                turns=turns,
                max_tokens=max_tokens,
                batch_size=batch_size,
                temperature=temperature,
                seed=seed,
                adaptive=adaptive,
                block_size=block_size,
                kv_tokens=kv_tokens,
                out=out,
            )
        )
    )
