"""The reduced vocabulary of a draft head.

Owns which target tokens a head can say and the two maps between the vocabularies. d2t holds offsets
(target id = i + d2t[i]) and t2d is a membership mask: the spelling all four EAGLE-3 ecosystems share. Ids are
ascending, so slicing target logits by the mask gives draft order. Knows nothing of how a head is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafts.config import check_draft_vocab_size
from specdec.errors import SpecdecError


@dataclass(frozen=True)
class DraftVocab:
    """Target ids a draft can say, ascending: `ids` int64 [draft_vocab]."""

    ids: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        check_draft_vocab_size(len(self.ids), self.vocab_size)
        if self.ids.dtype != torch.int64:
            raise SpecdecError(f"draft vocabulary ids ({self.ids.dtype}) must be int64")
        if bool((self.ids[1:] <= self.ids[:-1]).any()):
            raise SpecdecError(
                "d2t must give strictly increasing target ids; the map is not one of a draft vocabulary"
            )
        low, high = int(self.ids[0]), int(self.ids[-1])
        if low < 0 or high >= self.vocab_size:
            raise SpecdecError(
                f"d2t maps to target id {low if low < 0 else high}, outside 0..{self.vocab_size - 1}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def d2t(self) -> Tensor:
        """Offsets int64 [draft_vocab]: target id = i + d2t[i]."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """Membership bool [vocab]: whether the draft can say a target id."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    def draft_ids(self) -> Tensor:
        """Inverse map int64 [vocab]: draft id of each target id, -1 where the draft cannot say it."""
        inverse = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        inverse[self.ids] = torch.arange(len(self.ids))
        return inverse

    def coverage(self, counts: Tensor) -> float:
        """Share of counted tokens the draft can say; `counts` [vocab]."""
        total = int(counts.sum())
        return float(counts[self.ids].sum()) / total if total else 0.0

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocab:
        """Every target token; such a head carries no maps."""
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_d2t(cls, d2t: Tensor, t2d: Tensor, vocab_size: int) -> DraftVocab:
        """Rebuild from the two stored maps, refusing a pair that does not agree."""
        vocab = cls(d2t + torch.arange(len(d2t)), vocab_size)
        if t2d.shape != (vocab_size,) or not torch.equal(vocab.t2d, t2d):
            raise SpecdecError(f"t2d must be true at exactly the {len(vocab)} target ids that d2t gives")
        return vocab


def token_counts(sequences: Iterable[Iterable[int]], vocab_size: int) -> Tensor:
    """Count token ids, int64 [vocab]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in sequences:
        row = torch.as_tensor(list(ids), dtype=torch.int64)
        if len(row) and (int(row.min()) < 0 or int(row.max()) >= vocab_size):
            raise SpecdecError(
                f"token id ({int(row.max())}) must be below {vocab_size}, the target's vocabulary"
            )
        counts += torch.bincount(row, minlength=vocab_size)
    return counts


def build_draft_vocab(
    counts: Tensor | Mapping[int, int], *, size: int, vocab_size: int, keep: Iterable[int] = ()
) -> DraftVocab:
    """Choose the draft vocabulary from the counts of answer tokens.

    `keep` (end of turn and other special tokens) is always in. Then the most frequent tokens, ties to the
    lower id, so that data order never changes the map. With fewer distinct tokens than `size`, the lowest
    unused ids fill it.

    Args:
        counts: occurrences of each target id in answers, [vocab] or a mapping.
        size: number of tokens the draft can say.
        vocab_size: number of target tokens.
        keep: target ids that must be in.
    """
    check_draft_vocab_size(size, vocab_size)
    if size == vocab_size:
        return DraftVocab.full(vocab_size)
    if not isinstance(counts, Tensor):
        table = torch.zeros(vocab_size, dtype=torch.int64)
        for token, count in counts.items():
            table[token] = count
        counts = table
    kept = sorted(set(keep))
    if len(kept) > size:
        raise SpecdecError(
            f"draft_vocab_size ({size}) must be at least {len(kept)}, the special tokens always kept"
        )
    # special tokens first, then by count, then by id; a stable sort leaves ids ascending inside a tie, and
    # tokens never seen (count 0) follow as the padding, lowest id first.
    rank = counts.clone().to(torch.int64)
    rank[kept] = torch.iinfo(torch.int64).max
    order = torch.sort(rank, descending=True, stable=True).indices
    return DraftVocab(order[:size].sort().values, vocab_size)
