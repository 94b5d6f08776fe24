"""`specdec load-sweep`: adaptive speculation against fixed settings and none, by the number of clients."""

from pathlib import Path
from typing import Annotated

import typer


def load_sweep(
    target: Annotated[str, typer.Argument(help="Folder, or a name that pull knows.")],
    out: Annotated[Path, typer.Option(help="Folder of the results; a second run goes on where it stopped.")],
    draft: Annotated[str, typer.Option(help="ngram, a draft folder, a shipped draft, or ngram+DRAFT.")],
    concurrency: Annotated[str, typer.Option(help="Clients at once.")] = "1,2,4,8,16,32",
    data: Annotated[
        str, typer.Option(help="Prompt sets, or shared-prefix: mt_bench behind one long prefix.")
    ] = "mt_bench,humaneval,shared-prefix",
    shape: Annotated[str, typer.Option(help="What the adaptive policy may draft at most.")] = "chain:4",
    fixed: Annotated[
        str, typer.Option(help="Shapes drafted always, beside it.")
    ] = "chain:1,chain:2,chain:3,chain:4,tree:4x4:16",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Times each point is measured, with other prompts.")] = 3,
    max_minutes: Annotated[
        float, typer.Option(min=0.0, help="No turn is begun after so long; 0: no limit.")
    ] = 24.0,
    prefix_words: Annotated[int, typer.Option(min=1, help="Words of the shared prefix.")] = 192,
) -> None:
    """Measure adaptive speculation against fixed settings and none, from one client to many.

    All settings answer the same requests side by side, a step of each in turn, on the same weights; every
    client sends its next request when its last is answered. A fixed setting that is clearly the slower one is
    left out of further turns, and of higher loads. Example:

    specdec load-sweep smollm2-135m --draft smollm2-135m --out load-sweep
    """
    from specdec.cli.console import emit_json
    from specdec.cli.load_sweeping.run import LoadSweepOptions, run_load_sweep
    from specdec.cli.loading.plan import parse_concurrency

    loads = [count for count in parse_concurrency(concurrency) if count is not None]
    emit_json(
        run_load_sweep(
            LoadSweepOptions(
                target=target,
                draft=draft,
                clients=loads,
                data=[name.strip() for name in data.split(",") if name.strip()],
                shape=shape,
                fixed=[name.strip() for name in fixed.split(",") if name.strip()],
                max_tokens=max_tokens,
                turns=turns,
                max_minutes=max_minutes,
                prefix_words=prefix_words,
                out=out,
            )
        )
    )
