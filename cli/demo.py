"""`specdec demo`: the whole chain on SmolLM2-135M, small."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    train: Annotated[
        bool, typer.Option(help="Train a small draft from scratch (about 15 minutes on 2 cores).")
    ] = False,
    work: Annotated[
        Path, typer.Option(help="Folder for the layer selection, answers and trained draft.")
    ] = Path("specdec-demo"),
    prompts: Annotated[int, typer.Option(min=1, help="MT-bench prompts to decode.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to write for each prompt.")] = 96,
) -> None:
    """Pull SmolLM2-135M, choose layers, and decode with and without the shipped draft.

    Ends with a table and one JSON line: boundaries read by the draft, acceptance length, tokens per
    second plain and speculative, speedup, and how many outputs are identical.
    """
    from specdec.cli.console import emit_json
    from specdec.cli.demo_run import run_demo

    emit_json(run_demo(train=train, work=work, num_prompts=prompts, max_tokens=max_tokens))
