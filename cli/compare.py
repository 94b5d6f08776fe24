"""`specdec compare`: this engine beside others, on the same prompts in one run."""

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.datasets import SETS_HELP
from specdec.errors import UsageError


def compare(
    target: Annotated[str, typer.Argument(help="Folder, a name that pull knows, or random:SHAPE.")],
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="transformers, transformers-lookup, transformers-assisted,assistant=FOLDER (or "
            "early_exit=LAYER), vllm[:PYTHON][,method=ngram,k=3], sglang[:PYTHON][,method=ngram,k=3], "
            "llama.cpp[:PYTHON][,gguf=FILE], or url:http://HOST:PORT of a server; may be repeated."
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Also decode speculatively with this draft, as in bench (DRAFT@SHAPE too); may be repeated."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="chain:DEPTH or tree:DEPTHxTOP_K:NODES; may be repeated [default: chain:3]."),
    ] = None,
    data: Annotated[str, typer.Option(help=f"Prompts: {SETS_HELP}.")] = "mt_bench",
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens every engine writes for each prompt.")] = 128,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts given to every engine at once; a server gets as many clients.")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Times every prompt is decoded; medians are used.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Uncounted batches before the first.")] = 1,
    adaptive: Annotated[
        bool, typer.Option(help="Let a sequence stop speculating while it does not pay, as served.")
    ] = True,
    device: Annotated[str, typer.Option(help="cpu, or cuda with a card.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    out: Annotated[
        Path | None, typer.Option(help="Write the whole result (JSON), with one record a prompt.")
    ] = None,
) -> None:
    """Measure this engine and others on the same prompts: greedy, equal batches, equal numbers of tokens.

    Each engine runs in an environment of its own (`make peers` makes them; SPECDEC_PEERS names their folder)
    and gets the same token ids; engines take turns batch by batch. Example:

    specdec compare smollm2-135m --draft smollm2-135m --peer transformers --peer vllm --peer llama.cpp
    """
    from specdec.cli.comparing.run import ComparePlan, run_compare
    from specdec.cli.console import emit_json

    if not peer:
        raise UsageError("--peer is needed: name an engine to compare with, such as --peer transformers")
    if shape and not draft:
        raise UsageError("--shape needs --draft: without one nothing is drafted")
    plan = ComparePlan(
        target=target,
        peers=peer,
        drafts=draft or [],
        shapes=shape or ["chain:3"],
        data=data,
        limit=limit,
        max_tokens=max_tokens,
        repeats=repeats,
        warm_up=warm_up,
        adaptive=adaptive,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        out=out,
    )
    emit_json(run_compare(plan))
