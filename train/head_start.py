"""A head ready to train: its vocabulary from the answers, its weights fitted, drawn or taken over.

Owns which tokens a head can say and which start it gets. Knows nothing of the loop or of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec.drafts.checkpoint import load_draft
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab, build_draft_vocab, token_counts
from specdec.train.config import TrainConfig
from specdec.train.head_init import build_head, final_norm_weight, head_weight
from specdec.train.ridge_init import RidgeSums, ridge_start
from specdec.train.sequences import TrainSequence
from specdec.train.states import StateSource
from specdec.train.tap_transfer import move_head

RMS_SEQUENCES = 8
# rows that the start of a head is fitted on: past these a linear fit of a few thousand inputs gains nothing.
START_ROWS = 400_000
FIT_SEQUENCES = 16
FIT_MIN_TOKENS = 4


def choose_vocab(
    sequences: Sequence[TrainSequence], tokenizer: Any, model: Any, vocab_size: int, config: TrainConfig
) -> DraftVocab:
    """The draft vocabulary of the answers; end and special tokens are always in."""
    answers = ([t for t, on in zip(s.token_ids, s.assistant_mask, strict=True) if on] for s in sequences)
    counts = token_counts(answers, vocab_size)
    keep = set(tokenizer.all_special_ids)
    keep |= {
        token
        for token, entry in tokenizer.added_tokens_decoder.items()
        if entry.special and token < vocab_size and counts[token] > 0
    }
    for eos in (
        model.config.get_text_config(decoder=True).eos_token_id,
        model.generation_config.eos_token_id,
    ):
        keep |= set(eos) if isinstance(eos, list) else {eos}
    kept = {token for token in keep if token is not None and token < vocab_size}
    return build_draft_vocab(counts, size=config.draft_vocab_size, vocab_size=vocab_size, keep=kept)


def continued_head(
    model: Any,
    boundaries: tuple[int, ...],
    draft: str | Path,
    fingerprint: str,
    training: Sequence[TrainSequence],
    report: Callable[[str], None],
) -> Eagle3Head:
    """The head of an existing draft folder, to be trained further, moved to `boundaries` if it reads others.

    Raises:
        SpecdecError: it belongs to another target.
    """
    embed = model.get_input_embeddings().weight.detach().cpu()
    weight = head_weight(model).float().cpu()
    head = load_draft(draft, embed, weight, target_fingerprint=fingerprint).head
    if head.config.boundaries != boundaries:
        old = list(head.config.boundaries)
        head, explained = move_head(head, boundaries, model, weight, training)
        report(
            f"head moved from boundaries {old} to {list(boundaries)}: the new taps explain {explained:.1%} "
            "of the old feature's variance"
        )
    return head.requires_grad_(True)


@dataclass(frozen=True, kw_only=True)
class HeadStart:
    """A head, and how much of the next state's variance its closed-form start explains (None without one)."""

    head: Eagle3Head
    explained: float | None


def start_head(
    model: Any,
    boundaries: tuple[int, ...],
    vocab: DraftVocab,
    training: Sequence[TrainSequence],
    source: StateSource,
    config: TrainConfig,
) -> HeadStart:
    """A new fp32 head as `config.init` says.

    Args:
        model: Hugging Face target.
        boundaries: taps, ascending.
        vocab: tokens the head can say.
        training: conversations a fitted start is fitted on.
        source: their target states.
        config: training options.
    """
    taps = torch.cat([item.taps[1:] for item in source.fetch(training[:RMS_SEQUENCES])]).float()
    # the median: the first position of many targets is a sink with a norm hundreds of times the others'.
    tap_rms = taps.pow(2).mean(-1).sqrt().median(0).values
    head = build_head(model, boundaries, vocab, config, tap_rms)
    if config.init != "ridge":
        return HeadStart(head=head, explained=None)
    sums = RidgeSums(head, final_norm_weight(model))
    for low in range(0, len(training), FIT_SEQUENCES):
        group = [s for s in training[low : low + FIT_SEQUENCES] if len(s.token_ids) > FIT_MIN_TOKENS]
        if group and sums.rows < START_ROWS:
            sums.add(group, source.fetch(group))
    return HeadStart(head=head, explained=ridge_start(head, sums, source.output_rows(vocab.ids)))
