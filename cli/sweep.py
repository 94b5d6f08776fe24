"""`specdec sweep`: drafts, rules, shapes and batch sizes on one set of tasks, with what each point costs.

Owns the options; points are :mod:`specdec.cli.sweeping.points`'s, the run :mod:`specdec.cli.sweeping.run`'s.
"""

from pathlib import Path
from typing import Annotated

import typer


def sweep(
    target: Annotated[str, typer.Argument(help="Folder, a name that pull knows, or random:SHAPE.")],
    out: Annotated[Path, typer.Option(help="Folder of the results; a second run goes on where it stopped.")],
    draft: Annotated[
        list[str] | None, typer.Option(help="ngram, a draft folder or a shipped draft; may be repeated.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="exact, a rule, or RULE:KNOB=VALUE,KNOB=VALUE; may be repeated [default: exact]."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="chain:DEPTH or tree:DEPTHxTOP_K:NODES; may be repeated [default: chain:3]."),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests decoded at once; may be repeated [default: 4].")
    ] = None,
    tasks: Annotated[str, typer.Option(help="Exact-match tasks: easy, gsm8k.")] = "easy,gsm8k",
    task_limit: Annotated[int, typer.Option(min=1, help="Tasks used of each set.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 160,
    temperature: Annotated[float, typer.Option(help="0 is greedy, for exact rules only.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    lossy: Annotated[bool, typer.Option("--lossy", help="Allow lossy rules among --rule.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Promise that nothing lossy runs.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampled text.")] = 0,
) -> None:
    """Measure cost, acceptance and fidelity of many settings and mark the dominated ones.

    Example: specdec sweep smollm2-135m --draft smollm2-135m --rule exact --rule lenience:lenience=0.5 --lossy
    --out sweep
    """
    from specdec.cli.console import emit_json
    from specdec.cli.sweeping.run import SweepOptions, run_sweep

    emit_json(
        run_sweep(
            SweepOptions(
                target=target,
                drafts=draft or ["ngram"],
                rules=rule or ["exact"],
                shapes=shape or ["chain:3"],
                batch_sizes=batch_size or [4],
                tasks=[name.strip() for name in tasks.split(",") if name.strip()],
                task_limit=task_limit,
                max_tokens=max_tokens,
                temperature=temperature,
                dtype=dtype,
                lossy=lossy,
                exact=exact,
                seed=seed,
                out=out,
            )
        )
    )
