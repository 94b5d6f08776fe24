"""One training run from a target folder to a draft folder.

Owns the wiring: target, data, held-out split, vocabulary, states, head, loop, draft. Each part is its own
module. Knows nothing of the command line.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.drafts.checkpoint import CONFIG_NAME, DraftContract, cast_head, save_draft
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import token_counts
from specdec.errors import SpecdecError, writing
from specdec.hf import (
    check_boundaries,
    load_hf_model,
    load_tokenizer,
    num_decoder_layers,
    template_hash,
)
from specdec.provenance import folder_fingerprint, held_alone, sha256_file
from specdec.train.chat_data import ChatData, load_chat_data
from specdec.train.checkpoint import FOLDER
from specdec.train.config import TrainConfig
from specdec.train.evaluate import OfflineAcceptance, offline_acceptance
from specdec.train.head_init import head_weight
from specdec.train.head_start import choose_vocab, continued_head, start_head
from specdec.train.sequences import TrainSequence
from specdec.train.states import StateSource, StoredStates, TargetStates
from specdec.train.trainer import METRICS_NAME, Trainer, TrainOutcome

ONLINE = "online"
LOCK_NAME = ".lock"
# options that change neither the weights nor the order of batches, so a resumed run may change them.
FREE_OPTIONS = frozenset(
    {"max_hours", "log_every", "save_every", "eval_every", "keep_checkpoints", "eval_depth", "save_dtype"}
)
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run gave: where the draft is, how the loop ended, what it reaches offline, and its record."""

    folder: Path
    outcome: TrainOutcome
    acceptance: OfflineAcceptance | None
    summary: Mapping[str, Any]


def check_out_folder(out: Path) -> None:
    """Refuse a folder that is in use for something else."""
    if out.exists() and not out.is_dir():
        raise SpecdecError(f"--out ({out}) is a file; name a folder")
    known = (FOLDER, METRICS_NAME, CONFIG_NAME, "run.json", LOCK_NAME)
    if out.is_dir() and any(out.iterdir()) and not any((out / name).exists() for name in known):
        raise SpecdecError(f"--out ({out}) is not empty and is no draft or run folder; name another")
    if (out / CONFIG_NAME).exists() and '"specdec"' not in (out / CONFIG_NAME).read_text(errors="replace"):
        raise SpecdecError(f"--out ({out}) holds another model; name another folder")


@contextmanager
def own_folder(out: Path) -> Iterator[None]:
    """Keep a run folder to this run; one that stays without content is taken away again.

    Raises:
        SpecdecError: another run writes there, or the folder cannot be made.
    """
    with writing(f"--out ({out})"):
        out.mkdir(parents=True, exist_ok=True)
    with held_alone(out / LOCK_NAME, f"--out ({out})"):
        try:
            yield
        finally:
            (out / LOCK_NAME).unlink(missing_ok=True)
            if out.is_dir() and not any(out.iterdir()):
                out.rmdir()


def split_held_out(
    sequences: Sequence[TrainSequence], config: TrainConfig
) -> tuple[list[TrainSequence], list[TrainSequence]]:
    """Training and held-out conversations, by a hash of the id: the split barely moves when data is added."""
    wanted = min(config.eval_sequences, round(len(sequences) * config.eval_fraction))
    ranked = sorted(sequences, key=lambda s: hashlib.sha256(s.id.encode()).digest())
    held = {id(sequence) for sequence in ranked[:wanted]}
    return [s for s in sequences if id(s) not in held], ranked[:wanted]


def train_draft(
    target: str | Path,
    *,
    boundaries: Sequence[int],
    data: str | Path,
    out: str | Path,
    config: TrainConfig | None = None,
    states_cache: str = ONLINE,
    init_from: str | Path | None = None,
    resume: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> TrainResult:
    """Train a draft head for a target and write its folder.

    Args:
        target: Hugging Face folder.
        boundaries: taps, ascending.
        data: JSONL of the target's answers.
        out: draft folder; checkpoints and `metrics.jsonl` go there too.
        config: options; defaults of `TrainConfig`.
        states_cache: a folder that keeps target states over epochs and runs, or "online".
        init_from: a draft folder to go on from; its vocabulary and shape are kept, and if its boundaries
            are others its fusion is fitted to the new ones.
        resume: go on from the newest checkpoint in `out`.
        report: called with one line of progress.

    Raises:
        SpecdecError: anything wrong with the options, the data or the folders.
    """
    folder = Path(out)
    check_out_folder(folder)
    with own_folder(folder):
        return _train(
            target,
            tuple(boundaries),
            data,
            folder,
            config or TrainConfig(),
            states_cache,
            init_from,
            resume,
            report,
        )


def _train(
    target: str | Path,
    boundaries: tuple[int, ...],
    data: str | Path,
    folder: Path,
    config: TrainConfig,
    states_cache: str,
    init_from: str | Path | None,
    resume: bool,
    report: Callable[[str], None],
) -> TrainResult:
    model = load_hf_model(target, dtype=config.target_dtype)
    check_boundaries(boundaries, num_decoder_layers(model))
    tokenizer = load_tokenizer(target)
    vocab_size = head_weight(model).shape[0]
    chats = load_chat_data(data, tokenizer, max_length=config.max_length, vocab_size=vocab_size)
    report(_describe(chats))
    training, held_out = split_held_out(chats.sequences, config)
    fingerprint = folder_fingerprint(target)
    targets = TargetStates(model, boundaries)
    source: StateSource = targets
    if states_cache != ONLINE:
        stored = StoredStates(
            states_cache, targets, target_fingerprint=fingerprint, dtype=config.target_dtype
        )
        size = stored.check_disk(chats.sequences)
        report(
            f"states cache {stored.folder}: {size / 1e9:.2f} GB to be added, {stored.row_bytes} bytes a token"
        )
        stored.fill(chats.sequences, fill_progress(report))
        source = stored
    if init_from is not None:
        head = continued_head(model, boundaries, init_from, fingerprint, training, report)
    else:
        vocab = choose_vocab(training, tokenizer, model, vocab_size, config)
        start = start_head(model, boundaries, vocab, training, source, config)
        head = start.head
        if start.explained is not None:
            report(f"ridge start: {start.explained:.1%} of the next state's variance explained")
    coverage = head.vocab.coverage(_answer_counts(held_out or training, vocab_size))
    report(
        f"{len(training)} training and {len(held_out)} held-out conversations; draft vocabulary of "
        f"{len(head.vocab)} "
        f"covers {coverage:.1%} of {'held-out' if held_out else 'training'} answer tokens; "
        f"{sum(p.numel() for p in head.parameters()):,} trained weights"
    )
    contract = {key: value for key, value in asdict(config).items() if key not in FREE_OPTIONS}
    contract |= {
        "adam_betas": list(config.adam_betas),
        "boundaries": list(boundaries),
        "data_hash": _data_hash(chats),
        "target_fingerprint": fingerprint,
        "init_from": None if init_from is None else sha256_file(Path(init_from) / "model.safetensors"),
    }
    progress: dict[str, Any] = {}

    def on_evaluate(step: int) -> Mapping[str, Any]:
        result, numbers = _publish(
            folder, head, source, held_out, config, fingerprint, tokenizer, chats, step
        )
        progress["acceptance"] = result
        if result is not None:
            report(
                f"step {step}: offline acceptance length {result.acceptance_length or 0:.3f}, "
                f"conditional {[round(x, 3) if x is not None else None for x in result.conditional]}"
            )
        return numbers

    trainer = Trainer(
        head, training, source, config, folder, contract=contract, report=report, on_evaluate=on_evaluate
    )
    if resume:
        path = trainer.resume()
        if path is not None:
            report(f"resuming from {path} at step {trainer.step} of {trainer.total_steps}")
    else:
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        (folder / METRICS_NAME).unlink(missing_ok=True)
    outcome = trainer.run()
    if isinstance(source, StoredStates):
        source.close()
    acceptance = progress.get("acceptance")
    summary = {
        "target_fingerprint": fingerprint,
        "template_hash": template_hash(tokenizer),
        "data": str(data),
        "boundaries": list(boundaries),
        "steps": outcome.steps,
        "complete": outcome.complete,
        "epochs": round(outcome.epochs, 3),
        "conversations": len(training),
        "answer_tokens": sum(s.num_answer_tokens for s in training),
        "dropped": chats.dropped_reasons(),
        "draft_vocab_coverage": round(coverage, 4),
        "rows_per_second": _rounded(outcome.rows_per_second, 1),
        "seconds": round(outcome.seconds, 1),
        "loss": _rounded(outcome.last_loss, 4),
        "acceptance": acceptance.to_dict() if acceptance else None,
    }
    return TrainResult(folder=folder, outcome=outcome, acceptance=acceptance, summary=summary)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _publish(
    folder: Path,
    head: Eagle3Head,
    source: StateSource,
    held_out: Sequence[TrainSequence],
    config: TrainConfig,
    fingerprint: str,
    tokenizer: Any,
    chats: ChatData,
    step: int,
) -> tuple[OfflineAcceptance | None, Mapping[str, Any]]:
    """Measure the head as it will be served, after the cast, and write the draft; the fp32 weights go on."""
    kept = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    try:
        cast_head(head, config.save_dtype)
        result = offline_acceptance(head, source, held_out, config.eval_depth) if held_out else None
        training = {
            "step": step,
            "conversations": len(chats.sequences) - len(held_out),
            "answer_tokens": chats.num_answer_tokens - sum(s.num_answer_tokens for s in held_out),
            "offline_acceptance": result.to_dict() if result else None,
        }
        contract = DraftContract(
            target_fingerprint=fingerprint, template_hash=template_hash(tokenizer), training=training
        )
        save_draft(folder, head, contract, dtype=config.save_dtype)
    finally:
        head.load_state_dict(kept)
    return result, training


def fill_progress(report: Callable[[str], None]) -> Callable[[int, int], None]:
    """Lines of progress for the filling of a states cache, at most one in `PROGRESS_SECONDS`."""
    begun = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PROGRESS_SECONDS and done < total:
            return
        last = now
        rate = done / max(now - begun, 1e-9)
        left = (total - done) / rate / 60
        report(f"target states: {done:,} of {total:,} tokens, {rate:.0f} tokens/s, eta {left:.0f} min")

    return show


def _answer_counts(sequences: Sequence[TrainSequence], vocab_size: int) -> torch.Tensor:
    return token_counts(
        ([t for t, on in zip(s.token_ids, s.assistant_mask, strict=True) if on] for s in sequences),
        vocab_size,
    )


def _data_hash(chats: ChatData) -> str:
    digest = hashlib.sha256()
    for sequence in chats.sequences:
        digest.update(sequence.content_hash.encode())
        digest.update(bytes(sequence.assistant_mask))
    return digest.hexdigest()


def _describe(chats: ChatData) -> str:
    total = len(chats.sequences) + len(chats.dropped)
    text = f"{len(chats.sequences)} of {total} records used, {chats.num_answer_tokens:,} answer tokens"
    for reason, count in chats.dropped_reasons().items():
        text += f"; {count} dropped: {reason}"
    return text
