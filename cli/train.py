"""`specdec train`: train a draft head on the target's own answers.

Owns the command line of training: options, the run record, the table and the JSON line. Does not know how a
head is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.cli.datasets import require_training_data
from specdec.cli.option_file import take_options
from specdec.cli.usage import flags_of, named_flags, usage_errors
from specdec.errors import OtherRunError, SpecdecError, StoppedError, UsageError
from specdec.train.config import TrainConfig

DEFAULT = TrainConfig()
# what a run is resumed by, and the fields whose flag is spelled otherwise
FLAGS = flags_of(
    vars(DEFAULT),
    {
        "num_kv_heads": "--kv-heads",
        "batch_rows": "--batch-tokens",
        "micro_batch_rows": "--micro-batch-tokens",
        "keep_checkpoints": "--keep",
        "learning_rate": "--lr",
        "compute_dtype": "--dtype",
        "boundaries": "--layers",
        "data_hash": "--data",
        "init_from": "--init-from",
        "target_fingerprint": "target",
    },
)


def train(
    target: Annotated[str, typer.Argument(help="Folder, or a name that pull knows.")],
    layers: Annotated[str, typer.Option(help="selection.json, or boundaries like 2,15,29.")],
    data: Annotated[
        Path,
        typer.Option(
            help="JSONL of the target's answers (specdec regenerate), of chats or texts; a .txt; or "
            "hf:NAME[,config=C][,split=S][,limit=N] of the datasets library."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Draft folder to write; checkpoints go there too.")],
    states_cache: Annotated[
        str, typer.Option(help="Folder that keeps target states over epochs and runs, or online.")
    ] = "online",
    init_from: Annotated[
        Path | None, typer.Option(help="Draft folder to go on from; keeps its vocabulary, moves to --layers.")
    ] = None,
    draft_vocab_size: Annotated[
        int, typer.Option(help="Tokens the head can say.")
    ] = DEFAULT.draft_vocab_size,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Feed-forward width (default: the target's).")
    ] = DEFAULT.intermediate_size,
    kv_heads: Annotated[
        int | None, typer.Option(help="KV heads (default: the target's).")
    ] = DEFAULT.num_kv_heads,
    lm_head: Annotated[str, typer.Option(help="target_rows (frozen, not shipped) or own.")] = DEFAULT.lm_head,
    embed: Annotated[str, typer.Option(help="target (frozen, not shipped) or own.")] = DEFAULT.embed,
    hidden_size: Annotated[
        int | None, typer.Option(help="Width of the head (default: the target's); with --init random.")
    ] = DEFAULT.hidden_size,
    fc_norm: Annotated[bool, typer.Option(help="RMSNorm on each tap (EAGLE-3.1).")] = DEFAULT.fc_norm,
    norm_output: Annotated[
        bool, typer.Option(help="Feed back the normed output (EAGLE-3.1).")
    ] = DEFAULT.norm_output,
    norm_before_residual: Annotated[
        bool, typer.Option(help="Add the normed feature, not the feature, to the layer's output.")
    ] = DEFAULT.norm_before_residual,
    norm_before_fc: Annotated[
        bool, typer.Option(help="One RMSNorm over all taps; with --no-fc-norm.")
    ] = DEFAULT.norm_before_fc,
    attention_bias: Annotated[bool, typer.Option(help="Biases on attention.")] = DEFAULT.attention_bias,
    qk_norm: Annotated[bool, typer.Option(help="RMSNorm on queries and keys (Qwen3).")] = DEFAULT.qk_norm,
    init: Annotated[
        str, typer.Option(help="ridge (closed form), random, or last-layer (of the target).")
    ] = DEFAULT.init,
    self_attending: Annotated[
        bool, typer.Option(help="Start with queries equal to keys.")
    ] = DEFAULT.self_attending,
    unroll: Annotated[int, typer.Option(help="Unroll steps of the training-time test.")] = DEFAULT.unroll,
    step_weight: Annotated[
        float, typer.Option(help="Weight of unroll step j is this to the power j.")
    ] = DEFAULT.step_weight,
    loss: Annotated[str, typer.Option(help="kl, lk or lk-mix.")] = DEFAULT.loss,
    distill_top_k: Annotated[
        int | None, typer.Option(help="Count only the target's so many most probable tokens (default: all).")
    ] = DEFAULT.distill_top_k,
    prompt_rows: Annotated[
        bool, typer.Option(help="Also train on prompt positions, against the target's own law there.")
    ] = DEFAULT.prompt_rows,
    depth_sampling: Annotated[
        bool, typer.Option(help="Drop deep steps at random instead of weighing them down.")
    ] = DEFAULT.depth_sampling,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = DEFAULT.epochs,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, in place of --epochs.")] = DEFAULT.steps,
    max_hours: Annotated[
        float | None,
        typer.Option(
            help="Shorten the run to about this much training time; states and measurements not counted."
        ),
    ] = DEFAULT.max_hours,
    batch_tokens: Annotated[int, typer.Option(help="Rows of an optimiser step.")] = DEFAULT.batch_rows,
    micro_batch_tokens: Annotated[
        int, typer.Option(help="Rows that a process takes at once; a batch is as many passes as needed.")
    ] = DEFAULT.micro_batch_rows,
    learning_rate: Annotated[
        float, typer.Option("--lr", help="Largest learning rate.")
    ] = DEFAULT.learning_rate,
    schedule: Annotated[
        str, typer.Option(help="cosine, or wsd: warm-up, stable, then a line down.")
    ] = DEFAULT.schedule,
    decay_ratio: Annotated[
        float, typer.Option(help="Share of the steps in which wsd falls.")
    ] = DEFAULT.decay_ratio,
    warmup_ratio: Annotated[
        float, typer.Option(help="Share of the steps in which the rate rises.")
    ] = DEFAULT.warmup_ratio,
    clip_norm: Annotated[float, typer.Option(help="Largest norm of a gradient.")] = DEFAULT.clip_norm,
    ema: Annotated[
        float | None,
        typer.Option(help="Measure and save averaged weights: this share of the average stays each step."),
    ] = DEFAULT.ema,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = DEFAULT.seed,
    dtype: Annotated[
        str,
        typer.Option(
            help="Precision of products: bfloat16, float32, or auto for bfloat16 where the device has it."
        ),
    ] = DEFAULT.compute_dtype,
    save_dtype: Annotated[
        str, typer.Option(help="Precision of the saved draft: float16 or bfloat16.")
    ] = DEFAULT.save_dtype,
    target_dtype: Annotated[
        str, typer.Option(help="Precision of the target that gives states.")
    ] = DEFAULT.target_dtype,
    device_map: Annotated[
        str | None, typer.Option(help="Spread the target over devices: auto, balanced, sequential.")
    ] = DEFAULT.device_map,
    shard_weights: Annotated[
        bool, typer.Option(help="Weights, gradients and optimiser in shards over the processes (FSDP).")
    ] = DEFAULT.shard_weights,
    max_length: Annotated[int, typer.Option(help="Longer conversations are cut.")] = DEFAULT.max_length,
    eval_sequences: Annotated[
        int, typer.Option(help="Most conversations held out to measure acceptance.")
    ] = DEFAULT.eval_sequences,
    eval_depth: Annotated[int, typer.Option(help="Chain length of offline acceptance.")] = DEFAULT.eval_depth,
    eval_every: Annotated[
        int, typer.Option(help="Steps between measurements and saved drafts.")
    ] = DEFAULT.eval_every,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = DEFAULT.save_every,
    keep: Annotated[int, typer.Option(help="Checkpoints that stay.")] = DEFAULT.keep_checkpoints,
    accept_every: Annotated[
        int,
        typer.Option(help="Also decode held-out prompts in the engine after so many steps; 0: never."),
    ] = DEFAULT.accept_every,
    accept_prompts: Annotated[int, typer.Option(help="Prompts of it.")] = DEFAULT.accept_prompts,
    accept_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = DEFAULT.accept_tokens,
    tracker: Annotated[
        str | None, typer.Option(help="Log to tensorboard, trackio, wandb, ... as well.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in --out.")] = True,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, time a few steps, print the plan; write nothing."),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(is_eager=True, callback=take_options, help="TOML file of these options."),
    ] = None,
) -> None:
    """Train a draft head on the target's own answers; resumable."""
    from typing import cast

    from specdec.loading import require_loading

    with usage_errors(FLAGS):
        options = TrainConfig(
            draft_vocab_size=draft_vocab_size,
            intermediate_size=intermediate_size,
            num_kv_heads=kv_heads,
            lm_head=cast(Any, lm_head),
            embed=cast(Any, embed),
            hidden_size=hidden_size,
            fc_norm=fc_norm,
            norm_output=norm_output,
            norm_before_residual=norm_before_residual,
            norm_before_fc=norm_before_fc,
            attention_bias=attention_bias,
            qk_norm=qk_norm,
            init=cast(Any, init),
            self_attending=self_attending,
            unroll=unroll,
            step_weight=step_weight,
            loss=cast(Any, loss),
            distill_top_k=distill_top_k,
            prompt_rows=prompt_rows,
            depth_sampling=depth_sampling,
            epochs=epochs,
            steps=steps,
            max_hours=max_hours,
            batch_rows=batch_tokens,
            micro_batch_rows=micro_batch_tokens,
            learning_rate=learning_rate,
            schedule=cast(Any, schedule),
            decay_ratio=decay_ratio,
            warmup_ratio=warmup_ratio,
            clip_norm=clip_norm,
            ema=ema,
            seed=seed,
            compute_dtype=dtype,
            save_dtype=save_dtype,
            target_dtype=target_dtype,
            device_map=device_map,
            shard_weights=shard_weights,
            max_length=max_length,
            eval_sequences=eval_sequences,
            eval_depth=eval_depth,
            eval_every=eval_every,
            save_every=save_every,
            keep_checkpoints=keep,
            accept_every=accept_every,
            accept_prompts=accept_prompts,
            accept_tokens=accept_tokens,
        )
        require_loading(target_dtype, device_map)
    require_training_data(data)
    if init_from is not None and not (init_from / "config.json").is_file():
        raise UsageError(f"--init-from ({init_from}) is no draft folder; name one that specdec train wrote")

    from dataclasses import asdict, replace

    from specdec.cli.console import emit_json, resumable, say
    from specdec.cli.layers import read_layers
    from specdec.cli.train_show import show_plan, show_result, step_bar
    from specdec.hub import resolve_target
    from specdec.provenance import RunRecord, folder_fingerprint, sha256_file
    from specdec.train.records import data_file
    from specdec.train.run import TrainRun, check_out_folder

    check_out_folder(out)
    folder = resolve_target(target)
    fingerprint = folder_fingerprint(folder)
    boundaries = read_layers(layers, fingerprint)
    _require_own_answers(data, fingerprint)
    run = TrainRun(
        target=folder,
        boundaries=boundaries,
        data=data,
        out=out,
        config=options,
        states_cache=states_cache,
        init_from=init_from,
        resume=resume,
        tracker=tracker,
        report=say,
    )
    in_range = named_flags({"boundary": "--layers", "boundaries": "--layers", "tracker": "--tracker"})
    if dry_run:
        with in_range, named_flags(FLAGS, OtherRunError):
            plan = run.plan()
        show_plan(plan)
        emit_json(plan.to_dict())
        return
    kept = resumable(f"checkpoints, if there are any, are in {out}")
    with in_range, named_flags(FLAGS, OtherRunError), kept, step_bar() as on_step:
        result = replace(run, on_step=on_step).train()
    if not result.main:
        return
    summary = dict(result.summary)
    if not result.outcome.new_steps:
        # the record of the run that trained says more than one of having nothing to do
        before = _recorded(out / "run.json")
        if before.get("complete") is True and before.get("steps") == result.outcome.steps:
            show_result(result)
            emit_json({**before, "out": str(out)})
            return
    RunRecord.collect(
        dtype=result.config.compute_dtype,
        seeds={"seed": seed},
        template_hash=summary["template_hash"],
        data_hash=sha256_file(data_file(data)),
        defaults=asdict(result.config),
        extra=summary,
    ).write(out / "run.json")
    show_result(result)
    emit_json({**summary, "out": str(out)})
    if not result.outcome.complete:
        raise StoppedError(
            f"stopped by a signal at step {result.outcome.steps} of {result.outcome.total_steps}; the same "
            "command goes on"
        )


def _recorded(path: Path) -> dict[str, Any]:
    """What a command wrote of itself into a run record; empty without a readable one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["extra"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _require_own_answers(data: Path, fingerprint: str) -> None:
    """Refuse answers that another target wrote; those without a run record are taken on trust."""
    written_by = _recorded(data.with_suffix(".run.json")).get("target_fingerprint")
    if written_by not in (None, fingerprint):
        raise SpecdecError(
            f"--data ({data}) was written by another target (fingerprint {str(written_by)[:12]}, not "
            f"{fingerprint[:12]}); run specdec regenerate with this one"
        )
