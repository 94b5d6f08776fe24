"""`specdec audit`: is speculation lossless, by which criterion, in which precision; what does a rule cost.

Owns the options; the audit is :mod:`specdec.audit`'s, the report :mod:`specdec.cli.audit_run`'s.
"""

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.datasets import SETS_HELP
from specdec.cli.usage import check_exact
from specdec.errors import UsageError

FULL = "C0,C1,C2,C3,C4,C5"
# a lossy rule keeps no text of plain decoding
LOSSY = "C0,C1,C4"


def audit(
    target: Annotated[str, typer.Argument(help="Folder, a name that pull knows, or random:SHAPE.")],
    draft: Annotated[
        str, typer.Option(help="ngram, a draft folder, a shipped draft, or ngram+DRAFT.")
    ] = "ngram",
    levels: Annotated[
        str | None, typer.Option(help=f"Levels to run [default: {FULL}, with --lossy {LOSSY}].")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Exact rule to audit [default: all, and exact as served].")
    ] = None,
    lossy: Annotated[str | None, typer.Option(help="Lossy rule to price against its four baselines.")] = None,
    knob: Annotated[list[str] | None, typer.Option(help="NAME=VALUE of the rule; may be repeated.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Promise that nothing lossy runs.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    weights: Annotated[
        str, typer.Option(help="auto, fp16-packed, plain, or (rounded) bf16-packed, int8.")
    ] = "auto",
    shape: Annotated[
        str | None,
        typer.Option(help="chain:DEPTH or tree:DEPTHxTOP_K:NODES [default: tree:4x4:15, lossy chain:3]."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests decoded at once.")] = 4,
    data: Annotated[str, typer.Option(help=f"Prompts of C1 to C4: {SETS_HELP}.")] = "mt_bench",
    limit: Annotated[int, typer.Option(min=1, help="Prompts used.")] = 16,
    tasks: Annotated[str, typer.Option(help="Exact-match tasks: easy, gsm8k.")] = "easy,gsm8k",
    task_limit: Annotated[int, typer.Option(min=1, help="Tasks used of each set.")] = 24,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer of C2 to C4.")] = 64,
    task_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer to a task.")] = 160,
    draws: Annotated[int, typer.Option(min=100, help="Draws of each rule on tensors (C1).")] = 10000,
    engine_draws: Annotated[
        int, typer.Option(min=0, help="Answers through the engine (C1); 0 leaves it out.")
    ] = 1000,
    temperature: Annotated[float, typer.Option(help="Of a lossy rule's runs.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampled text.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for audit.json, audit.md and audit.html.")] = None,
) -> None:
    """Check that speculation is lossless, level by level, or price a lossy rule; exit 1 when it fails.

    Example: specdec audit smollm2-135m --draft smollm2-135m --dtype bfloat16 --out audit
    """
    for option, text in (("--levels", levels), ("--rule", rule), ("--lossy", lossy)):
        if text is not None and not text.strip():
            raise UsageError(f"{option} ({text!r}) must name something; leave it out for the default")
    if lossy is not None and exact:
        raise UsageError(f"--exact promises that nothing lossy runs; drop it, or --lossy {lossy}")
    check_exact(exact, {"--weights": weights})
    if lossy is not None and rule is not None:
        raise UsageError("--rule audits an exact rule and --lossy prices a lossy one; give one of them")
    if knob and lossy is None and rule is None:
        raise UsageError("--knob needs --lossy or --rule")

    from specdec.cli.audit_run import AuditOptions, run_audit
    from specdec.cli.console import emit_json

    summary = run_audit(
        AuditOptions(
            target=target,
            draft=draft,
            levels=levels or (FULL if lossy is None else LOSSY),
            rule=rule,
            lossy=lossy,
            knobs=knob or [],
            dtype=dtype,
            weights=weights,
            shape=shape or ("tree:4x4:15" if lossy is None else "chain:3"),
            batch_size=batch_size,
            data=data,
            limit=limit,
            tasks=[name.strip() for name in tasks.split(",") if name.strip()],
            task_limit=task_limit,
            max_tokens=max_tokens,
            task_tokens=task_tokens,
            draws=draws,
            engine_draws=engine_draws,
            temperature=temperature,
            seed=seed,
            out=out,
        )
    )
    emit_json(summary)
    if not summary["passed"]:
        raise typer.Exit(1)
