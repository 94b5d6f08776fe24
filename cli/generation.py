"""The three ways of `specdec generate`: one answer streamed, a file of answers, a chat."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.cli.console import emit_json, progress, say
from specdec.cli.datasets import load_prompts, prompt_file, require_shorter, require_unicode
from specdec.cli.first_words import first_words
from specdec.cli.outputs import require_own_record, require_writable
from specdec.cli.shapes import simulation_notice
from specdec.cli.usage import flags_of, named_flags, usage_errors, with_flags
from specdec.config import EngineConfig, SpecConfig
from specdec.drafts import check_spelling
from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.exactness import exactness_notice
from specdec.provenance import RunRecord, sha256_file, write_text_atomic
from specdec.requests import GenerationResult, Prompt, verification_fields
from specdec.sampling_params import SamplingParams
from specdec.stats import SpecStats

# what every record of an answer has, and what regenerate writes has not
_ANSWER_KEYS = frozenset({"id", "text", "finish_reason"})


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Target, draft and how to sample; the fields are the options of `specdec generate`."""

    target: str
    draft: str | None
    spec: SpecConfig
    params: SamplingParams
    raw: bool
    lossy: bool
    batch_size: int
    device: str = "cpu"
    dtype: str = "float32"
    kernels: str = "auto"
    weights: str = "auto"
    kv_cache_dtype: str = "auto"
    deterministic: bool = False
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    overlap: bool = True
    prefix_cache: bool = True
    simulate_acceptance: float | None = None

    def engine(self, max_num_seqs: int) -> Engine:
        names = ("device", "dtype", "kernels", "weights", "kv_cache_dtype", "gpu_memory_utilization")
        with usage_errors(flags_of(dict.fromkeys(names), {})):
            config = EngineConfig(
                max_num_seqs=max_num_seqs,
                spec=self.spec,
                allow_lossy=self.lossy,
                simulate_acceptance=self.simulate_acceptance,
                device=self.device,
                dtype=self.dtype,
                kernels=self.kernels,
                weights=self.weights,
                kv_cache_dtype=self.kv_cache_dtype,
                deterministic=self.deterministic,
                prefix_cache=self.prefix_cache,
                gpu_memory_utilization=self.gpu_memory_utilization,
                cuda_graphs=self.cuda_graphs,
                overlap=self.overlap,
            )
        if self.simulate_acceptance is not None:
            say(simulation_notice(self.simulate_acceptance)["simulation"])
        if self.draft is not None:
            check_spelling(self.draft)
        with named_flags(flags_of(dict.fromkeys(names), {})):
            engine = Engine(self.target, draft=self.draft, config=config)
        if notice := exactness_notice(engine.admission.exact_against):
            say(notice)
        return engine

    def as_prompt(self, text: str) -> Prompt:
        return text if self.raw else [{"role": "user", "content": text}]


def answer_one(plan: GenerationPlan, text: str) -> None:
    """Stream one answer to stdout, then the JSON line."""
    result, seconds = _stream(plan.engine(1), plan, plan.as_prompt(text))
    print(flush=True)
    emit_json({**_summary([result], seconds, plan), **_logprobs(result)})


def chat(plan: GenerationPlan) -> None:
    """Talk with the target until end of input, or until the talk fills the target's context."""
    if plan.raw:
        raise SpecdecError("--raw needs --prompt or --prompts: a chat uses the target's template")
    engine = plan.engine(1)
    messages: list[dict[str, str]] = []
    results: list[GenerationResult] = []
    seconds = 0.0
    say("a chat; end with Ctrl-D")
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = _read_line(len(messages) // 2 + 1)
        if not line:
            break
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        token_ids = engine.encoder.encode(messages)
        if len(token_ids) >= engine.max_model_len:
            say(
                f"the chat ends: with this message it has {len(token_ids)} tokens and must be "
                f"shorter than the target's context ({engine.max_model_len} tokens)"
            )
            break
        result, taken = _stream(engine, plan, token_ids)
        print(flush=True)
        length = result.stats.acceptance_length
        speed = len(result.token_ids) / taken
        note = "" if length is None else f", acceptance length {length:.2f}"
        say(f"[{len(result.token_ids)} tokens, {speed:.1f} tokens/s{note}]")
        messages.append({"role": "assistant", "content": result.text})
        results.append(result)
        seconds += taken
    emit_json(_summary(results, seconds, plan))


def answer_file(plan: GenerationPlan, source: str, limit: int | None, out: Path | None) -> None:
    """Answer every prompt of a set; records go to `out`, or as text to stdout."""
    prompts = load_prompts(source, "--prompts")[:limit]
    if out is not None:
        require_writable("--out", out)
        _require_own_answers(out)
        require_own_record("--out", out, _record_path(out))
    engine = plan.engine(plan.batch_size)
    token_ids = {prompt.id: engine.encoder.encode(plan.as_prompt(prompt.turns[0])) for prompt in prompts}
    lengths = {name: len(ids) for name, ids in token_ids.items()}
    require_shorter("--prompts", source, lengths, engine.max_model_len)
    results: list[GenerationResult] = []
    started = time.perf_counter()
    with progress("answers", len(prompts)) as bar:
        for start in range(0, len(prompts), plan.batch_size):
            batch = prompts[start : start + plan.batch_size]
            results += engine.generate([token_ids[prompt.id] for prompt in batch], plan.params)
            bar.update(len(results))
    seconds = time.perf_counter() - started
    for prompt, result in zip(prompts, results, strict=True):
        if result.error:
            raise SpecdecError(f"prompt {prompt.id}: {result.error}")
    records = [
        {
            "id": prompt.id,
            "text": result.text,
            "finish_reason": result.finish_reason,
            **_counts(result),
            **_logprobs(result),
        }
        for prompt, result in zip(prompts, results, strict=True)
    ]
    if out is None:
        for record in records:
            print(f"== {record['id']}\n{record['text']}\n")
    else:
        write_text_atomic(out, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        RunRecord.collect(
            dtype=engine.config.dtype,
            template_hash=None if plan.raw else engine.encoder.template_hash,
            data_hash=sha256_file(prompt_file(source)),
            defaults={**asdict(plan.params), "spec": asdict(plan.spec), "batch_size": plan.batch_size},
            extra=_summary(results, seconds, plan),
        ).write(_record_path(out))
    emit_json(_summary(results, seconds, plan))


def _read_line(number: int) -> str:
    """The next line of a chat; empty at the end of input.

    Raises:
        SpecdecError: it is no text.
    """
    where = f"chat message {number}"
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise SpecdecError(f"{where}: not valid Unicode (byte {error.start} is not UTF-8)") from error
    require_unicode(where, line)
    return line


def _require_own_answers(out: Path) -> None:
    """Refuse a file that answers must not replace: specdec regenerate's took hours, others are foreign.

    Raises:
        UsageError: naming it.
    """
    try:
        with out.open("rb") as file:
            first = file.readline()
    except FileNotFoundError:
        return
    try:
        record = json.loads(first) if first else {}
    except ValueError:
        record = None
    if first and not (isinstance(record, dict) and record.keys() >= _ANSWER_KEYS):
        raise UsageError(
            f"--out ({out}) exists and does not hold answers of specdec generate; name another file"
        )


def _record_path(out: Path) -> Path:
    return out.with_suffix(".run.json")


def _stream(engine: Engine, plan: GenerationPlan, prompt: Prompt) -> tuple[GenerationResult, float]:
    started = time.perf_counter()
    result: GenerationResult | None = None
    for piece in engine.stream([prompt], plan.params):
        first_words.said()
        print(piece.text, end="", flush=True)
        result = piece.result or result
    assert result is not None, "a stream ended without its result"
    if result.error:
        fields = flags_of(SamplingParams.__dataclass_fields__, {"bad_words": "--bad-word"})
        raise SpecdecError(with_flags(result.error, fields))
    return result, time.perf_counter() - started


def _counts(result: GenerationResult) -> dict[str, Any]:
    stats = result.stats
    return {
        "prompt_tokens": len(result.prompt_token_ids),
        "completion_tokens": len(result.token_ids),
        "seed": result.seed,
        "rule": result.rule,
        **({"simulated": True} if result.simulated else {}),
        "verify_steps": stats.verify_steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "committed": stats.committed,
        "acceptance_length": stats.acceptance_length,
    }


def _logprobs(result: GenerationResult) -> dict[str, Any]:
    """Log-probabilities under their own key; nothing when they were not asked for."""
    return {} if result.logprobs is None else {"logprobs": [asdict(entry) for entry in result.logprobs]}


def _summary(results: list[GenerationResult], seconds: float, plan: GenerationPlan) -> dict[str, Any]:
    total = SpecStats()
    for result in results:
        total.add(result.stats)
    tokens = sum(len(result.token_ids) for result in results)
    summary: dict[str, Any] = {
        "target": plan.target,
        "draft": plan.draft,
        "answers": len(results),
        "completion_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        **({} if plan.simulate_acceptance is None else simulation_notice(plan.simulate_acceptance)),
        **verification_fields(results),
        **{key: total.to_dict()[key] for key in ("verify_steps", "drafted", "accepted", "committed")},
        "acceptance_length": total.acceptance_length,
    }
    if len(results) == 1:
        summary["seed"] = results[0].seed
        summary["finish_reason"] = results[0].finish_reason
    return summary
