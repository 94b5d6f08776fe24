"""Everything a training run starts from: target, conversations, states, and a head.

Owns the order in which they are made and what is said about them. Each part is its own module. Knows nothing
of the loop.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import token_counts
from specdec.hf import check_boundaries, load_hf_model, load_tokenizer, num_decoder_layers
from specdec.models.layers import SLOW_BF16, multiplies_bf16
from specdec.provenance import folder_fingerprint
from specdec.train.chat_data import ChatData, load_chat_data
from specdec.train.config import TrainConfig
from specdec.train.head_init import head_weight
from specdec.train.head_start import choose_vocab, continued_head, start_head
from specdec.train.processes import Processes
from specdec.train.sequences import TrainSequence
from specdec.train.states import StateSource, StoredStates, TargetStates

ONLINE = "online"
PROGRESS_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """`coverage` is the share of held-out answer tokens that the head can say."""

    model: Any
    tokenizer: Any
    chats: ChatData
    training: Sequence[TrainSequence]
    held_out: Sequence[TrainSequence]
    target_fingerprint: str
    source: StateSource
    head: Eagle3Head
    coverage: float
    states_bytes: int

    @property
    def target_parameters(self) -> int:
        """Numbers of the target, its embeddings left out unless they are its output head too."""
        total = sum(parameter.numel() for parameter in self.model.parameters())
        embed, output = self.model.get_input_embeddings().weight, head_weight(self.model)
        return int(total if embed.data_ptr() == output.data_ptr() else total - embed.numel())

    @property
    def target_bytes(self) -> int:
        """Bytes of the target's weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def close(self) -> None:
        """Give a store of states to the next run."""
        if isinstance(self.source, StoredStates):
            self.source.close()


def prepare(
    target: str | Path,
    boundaries: tuple[int, ...],
    data: str | Path,
    config: TrainConfig,
    *,
    states_cache: str,
    init_from: str | Path | None,
    processes: Processes,
    report: Callable[[str], None],
    plan_only: bool = False,
) -> Prepared:
    """Load, split, fill and start.

    Args:
        target: Hugging Face folder.
        boundaries: taps, ascending.
        data: JSONL of the target's answers.
        config: training options.
        states_cache: a folder that keeps target states, or "online".
        init_from: a draft folder to go on from.
        processes: those of the run; the main one fills a store and fits a start.
        report: called with one line of progress.
        plan_only: fill no store and fit no start: for a plan.
    """
    model = load_hf_model(target, dtype=config.target_dtype, device_map=config.device_map)
    if config.device_map is None and processes.device.type != "cpu":
        model = model.to(processes.device)
    if model.device.type == "cpu" and config.target_dtype == "bfloat16" and not multiplies_bf16():
        report(f"target dtype bfloat16: {SLOW_BF16}")
    check_boundaries(boundaries, num_decoder_layers(model))
    tokenizer = load_tokenizer(target)
    vocab_size = head_weight(model).shape[0]
    chats = load_chat_data(data, tokenizer, max_length=config.max_length, vocab_size=vocab_size)
    report(_describe(chats))
    training, held_out = split_held_out(chats.sequences, config)
    fingerprint = folder_fingerprint(target)
    targets = TargetStates(model, boundaries)
    source: StateSource = targets
    size = 0
    if states_cache != ONLINE and plan_only:
        size = sum(len(s.token_ids) - 1 for s in chats.sequences) * targets.row_bytes
    elif states_cache != ONLINE:
        source = _stored(states_cache, targets, fingerprint, config, chats, processes, report)
    if init_from is not None:
        head = continued_head(model, boundaries, init_from, fingerprint, training, report)
    else:
        vocab = choose_vocab(training, tokenizer, model, vocab_size, config)
        # the other processes are given the main one's weights
        fitted = config if processes.main and not plan_only else replace(config, init="random")
        start = start_head(model, boundaries, vocab, training, source, fitted)
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
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        chats=chats,
        training=training,
        held_out=held_out,
        target_fingerprint=fingerprint,
        source=source,
        head=head,
        coverage=coverage,
        states_bytes=size,
    )


def _stored(
    folder: str,
    targets: TargetStates,
    fingerprint: str,
    config: TrainConfig,
    chats: ChatData,
    processes: Processes,
    report: Callable[[str], None],
) -> StoredStates:
    """A store with all states: filled by the main process, read by all."""
    stored: StoredStates | None = None
    if processes.main:
        stored = StoredStates(folder, targets, target_fingerprint=fingerprint, dtype=config.target_dtype)
        size = stored.check_disk(chats.sequences)
        report(
            f"states cache {stored.folder}: {size / 1e9:.2f} GB to be added, {stored.row_bytes} bytes a token"
        )
        stored.fill(chats.sequences, fill_progress(report))
        if processes.world > 1:
            stored.release()
    processes.wait()
    return stored or StoredStates(
        folder, targets, target_fingerprint=fingerprint, dtype=config.target_dtype, writes=False
    )


def split_held_out(
    sequences: Sequence[TrainSequence], config: TrainConfig
) -> tuple[list[TrainSequence], list[TrainSequence]]:
    """Training and held-out conversations, by a hash of the id: the split barely moves when data is added."""
    wanted = min(config.eval_sequences, round(len(sequences) * config.eval_fraction))
    ranked = sorted(sequences, key=lambda s: hashlib.sha256(s.id.encode()).digest())
    held = {id(sequence) for sequence in ranked[:wanted]}
    return [s for s in sequences if id(s) not in held], ranked[:wanted]


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


def _answer_counts(sequences: Sequence[TrainSequence], vocab_size: int) -> Tensor:
    return token_counts(
        ([t for t, on in zip(s.token_ids, s.assistant_mask, strict=True) if on] for s in sequences),
        vocab_size,
    )


def data_hash(chats: ChatData) -> str:
    """A hash of all ids and masks."""
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
    if chats.partly_trained:
        text += (
            f"; {chats.partly_trained} chats trained on their last answer alone: the template rewrites "
            "earlier ones"
        )
    return text
