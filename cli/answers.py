"""Answers of a target to many prompts: order, batching, resuming. The work behind `specdec regenerate`.

The output file is only ever appended to, one whole line at a time, by one run at a time; a line cut short
by a crash is dropped at the next start, if the file is known to hold answers.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.cli.console import progress
from specdec.cli.datasets import Prompt, load_prompts, prompt_file
from specdec.cli.outputs import is_run_record, require_not_input, require_own_record, require_writable
from specdec.cli.usage import flags_of, named_flags, usage_errors
from specdec.config import EngineConfig, ModelConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hub import resolve_target
from specdec.provenance import (
    RUN_SCHEMA,
    RunRecord,
    folder_fingerprint,
    held_alone,
    read_json,
    sha256_file,
    write_json_atomic,
)
from specdec.sequence import SamplingParams, Sequence

# what every answer record begins with
_FIRST_BYTES = b'{"id": '


@dataclass(frozen=True, kw_only=True)
class AnswerPlan:
    """What to answer and how; the fields are the options of `specdec regenerate`."""

    sources: list[str]
    target: str
    out: Path
    params: SamplingParams
    max_tokens: int
    max_prompt_tokens: int
    total_tokens: int | None
    limit: int | None
    seed: int
    order: str
    batch_size: int
    device: str
    dtype: str
    weights: str


def ordered_prompts(prompts: list[Prompt], order: str, seed: int) -> list[Prompt]:
    """The prompts in file order, shuffled, or shuffled with categories taking turns."""
    if order == "file":
        return list(prompts)
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    if order == "shuffled":
        return shuffled
    queues: dict[str, deque[Prompt]] = {}
    for prompt in shuffled:
        queues.setdefault(prompt.category, deque()).append(prompt)
    turns: list[Prompt] = []
    while queues:
        for category in list(queues):
            turns.append(queues[category].popleft())
            if not queues[category]:
                del queues[category]
    return turns


def finished_answers(path: Path) -> tuple[set[str], int]:
    """Ids and answer tokens already in the file; an incomplete last line is cut off.

    Raises:
        SpecdecError: the file holds something else than answers; it is left as it was.
    """
    if not path.exists():
        return set(), 0
    ids: set[str] = set()
    tokens = whole = 0
    rest = b""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                rest = line
                break
            try:
                record = json.loads(line)
                ids.add(record["id"])
                tokens += len(record["response_token_ids"])
            except (ValueError, KeyError, TypeError) as error:
                raise SpecdecError(
                    f"--out ({path}) line {number} is not an answer record; choose another file"
                ) from error
            whole += len(line)
    if rest:
        # without a whole answer only the run record tells a first one cut short from somebody's own file
        claimed = is_run_record(_record_path(path)) and _FIRST_BYTES.startswith(rest[: len(_FIRST_BYTES)])
        if not whole and not claimed:
            raise SpecdecError(f"--out ({path}) does not hold answer records; choose another file")
        with path.open("r+b") as file:
            file.truncate(whole)
    return ids, tokens


def write_answers(plan: AnswerPlan) -> dict[str, Any]:
    """Answer the prompts and return a summary (counts, tokens, tokens/s)."""
    prompts = [prompt for source in plan.sources for prompt in load_prompts(source, "PROMPTS")]
    prompts = ordered_prompts(prompts, plan.order, plan.seed)[: plan.limit]
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise SpecdecError("the prompt sets share ids; give sets with distinct ids")
    require_writable("--out", plan.out)
    for source in plan.sources:
        require_not_input("--out", plan.out, {f"the prompt set ({source})": prompt_file(source)})
    require_own_record("--out", plan.out, _record_path(plan.out))
    # two runs on one file would answer the same prompts and mix their lines
    with held_alone(_lock_path(plan.out), f"--out ({plan.out})"):
        return _write(plan, prompts)


def _write(plan: AnswerPlan, prompts: list[Prompt]) -> dict[str, Any]:
    folder = resolve_target(plan.target)
    origin = _origin(plan, folder)
    done, tokens_before = finished_answers(plan.out)
    if done:
        _require_same_origin(plan.out, origin)
    context = ModelConfig.from_folder(folder).max_position_embeddings
    with usage_errors(flags_of({"device": 0, "dtype": 0, "weights": 0}, {"max_num_seqs": "--batch-size"})):
        config = EngineConfig(
            device=plan.device,
            dtype=plan.dtype,
            weights=plan.weights,
            max_num_seqs=plan.batch_size,
            max_model_len=min(context, plan.max_prompt_tokens + plan.max_tokens),
        )
    with named_flags({"device": "--device"}):
        engine = Engine(folder, config=config)
    if not done:
        # whose answers the file holds, before the first one
        write_json_atomic(_record_path(plan.out), {"schema": RUN_SCHEMA, "extra": origin})
    longest_prompt = min(plan.max_prompt_tokens, engine.max_model_len - 1)
    todo = deque(prompt for prompt in prompts if prompt.id not in done)
    running: dict[int, tuple[Prompt, Sequence]] = {}
    written = tokens = too_long = 0
    goal = plan.total_tokens - tokens_before if plan.total_tokens is not None else None
    started = time.perf_counter()
    with plan.out.open("a", encoding="utf-8") as file, progress("answers", len(todo)) as bar:
        while (todo or running) and (goal is None or tokens < goal):
            while todo and len(running) < plan.batch_size:
                prompt = todo.popleft()
                messages = [{"role": "user", "content": prompt.turns[0]}]
                token_ids = engine.encoder.encode(messages)
                if len(token_ids) > longest_prompt:
                    too_long += 1
                    bar.advance(1)
                    continue
                # each answer has its own random stream: a function of the run's seed and the prompt
                seed = random.Random(f"{plan.seed}/{prompt.id}").getrandbits(63)
                seq = engine.add(token_ids, replace(plan.params, seed=seed))
                running[seq.seq_id] = (prompt, seq)
            if not running:
                break
            for seq in engine.step():
                prompt, _ = running.pop(seq.seq_id)
                if seq.error:
                    raise SpecdecError(
                        f"prompt {prompt.id}: {seq.error}; the answers so far are in {plan.out}"
                    )
                file.write(json.dumps(_record(prompt, seq), ensure_ascii=False) + "\n")
                file.flush()
                written += 1
                tokens += seq.num_output
                rate = tokens / (time.perf_counter() - started)
                bar.advance(1, f"{rate:.0f} tokens/s, {tokens_before + tokens} tokens")
    seconds = time.perf_counter() - started
    summary = {
        "out": str(plan.out),
        "answers": len(done) + written,
        "answer_tokens": tokens_before + tokens,
        "new_answers": written,
        "new_answer_tokens": tokens,
        "left_out_too_long": too_long,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds, 1) if tokens else None,
    }
    RunRecord.collect(
        dtype=engine.config.dtype,
        seeds={"run": plan.seed},
        template_hash=engine.encoder.template_hash,
        data_hash=sha256_file(plan.out),
        defaults={**vars(plan.params), "order": plan.order, "batch_size": plan.batch_size},
        extra={**summary, **origin},
    ).write(_record_path(plan.out))
    return summary


def _lock_path(out: Path) -> Path:
    path = out.resolve()
    return path.with_name(f".{path.name}.lock")


def _record_path(out: Path) -> Path:
    return out.with_suffix(".run.json")


def _origin(plan: AnswerPlan, folder: Path) -> dict[str, Any]:
    """What every answer of one file must have in common."""
    return {
        "target_fingerprint": folder_fingerprint(folder),
        "max_tokens": plan.max_tokens,
        "temperature": plan.params.temperature,
        "top_p": plan.params.top_p,
        "dtype": plan.dtype,
        "weights": plan.weights,
    }


def _require_same_origin(out: Path, origin: dict[str, Any]) -> None:
    """Refuse to go on with answers of another kind.

    Raises:
        SpecdecError: the file was begun with another target, other sampling, another dtype or other weights.
    """
    record = _record_path(out)
    # records from before there was a choice name neither
    before = {
        "dtype": "float32",
        "weights": "auto",
        **(read_json(record).get("extra", {}) if record.exists() else {}),
    }
    for name, value in origin.items():
        if before.get(name) != value:
            raise SpecdecError(
                f"--out ({out}) holds answers with {name} {before.get(name)!r}, not {value!r}; "
                "choose another file"
            )


def _record(prompt: Prompt, seq: Sequence) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "category": prompt.category,
        "messages": [
            {"role": "user", "content": prompt.turns[0]},
            {"role": "assistant", "content": seq.detokenizer.text},
        ],
        "prompt_token_ids": seq.token_ids[: seq.prompt_len],
        "response_token_ids": seq.output_ids,
        "finish_reason": seq.finish_reason,
    }
