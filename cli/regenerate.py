"""`specdec regenerate`: the target writes its own training answers."""

from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.datasets import SETS_HELP
from specdec.errors import UsageError

ORDERS = ("balanced", "shuffled", "file")


def regenerate(
    prompts: Annotated[list[str], typer.Argument(help=f"Prompts to answer, each {SETS_HELP}.")],
    target: Annotated[str, typer.Option(help="Folder, or a name that pull knows.")],
    out: Annotated[
        Path, typer.Option(help="Answers, one JSON object a line; an existing file is continued.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Longer prompts are left out, and counted.")
    ] = 512,
    total_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many answer tokens.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many prompts.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass, with a temperature above 0.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Order of the prompts, and sampling.")] = 0,
    order: Annotated[str, typer.Option(help="balanced (categories in turn), shuffled or file.")] = "shuffled",
    batch_size: Annotated[int, typer.Option(min=1, help="Answers written at once.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    weights: Annotated[
        str, typer.Option(help="On the cpu: auto, fp16-packed, plain, or (rounded) bf16-packed, int8.")
    ] = "auto",
) -> None:
    """Let the target answer prompts, for training a draft on its own text.

    Batched; each answer is appended when it is finished, so an interrupted run loses only the answers
    under way and goes on where it stopped.
    """
    from specdec.cli.answers import AnswerPlan, write_answers
    from specdec.cli.console import emit_json, resumable
    from specdec.cli.usage import flags_of, usage_errors
    from specdec.sampling_params import SamplingParams

    if order not in ORDERS:
        raise UsageError(f"--order ({order}) must be one of {', '.join(ORDERS)}")
    with usage_errors(flags_of(SamplingParams.__dataclass_fields__, {})):
        params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    with resumable(f"the finished answers are in {out}"):
        summary = write_answers(
            AnswerPlan(
                sources=prompts,
                target=target,
                out=out,
                params=params,
                max_tokens=max_tokens,
                max_prompt_tokens=max_prompt_tokens,
                total_tokens=total_tokens,
                limit=limit,
                seed=seed,
                order=order,
                batch_size=batch_size,
                device=device,
                dtype=dtype,
                weights=weights,
            )
        )
    emit_json(summary)
