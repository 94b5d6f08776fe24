"""The plain pass an audit compares with: a whole text, causal mask, positions in order, a cache of its own.

Uses the target's weights and nothing of scheduler, runner or trees, so that a fault there cannot agree with
itself. Also measures how far harmless changes (the number of rows in a pass, the dtype) move logits, which is
what a near tie is judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention import SequenceAttention, causal_mask
from specdec.models.decoder import Decoder, ForwardBatch
from specdec.models.layers import ROW_MULTIPLE
from specdec.paged_kv import PagedKVCache

BLOCK = 16
# rows of a pass; several, so that the texts of a benchmark cross a border
CHUNK = 256
# the other ways of cutting the same text: as decoding does, and as a tree of a few nodes does
RERUN_CHUNKS = (1, 5)
# only the leading tokens can win
LEADING = 8
# some hundred positions do not show the largest value there is; rows are spread wider than margins, and what
# a wrong position does to one is ten times their noise
MARGIN_SAFETY, ROW_SAFETY = 2.0, 4.0


class PlainReference:
    """Logits of a text by plain passes over it.

    Args:
        decoder: the target's weights, in the dtype of the reference.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._cache: PagedKVCache | None = None

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], first: int = 0, chunk: int = CHUNK) -> Tensor:
        """Logits after each token from number `first` on: fp32 `[len - first, vocab]`.

        Args:
            token_ids: the text.
            first: number of the first token whose successor is asked for.
            chunk: rows of a pass from there on.
        """
        cache = self._cache_of(len(token_ids))
        rows: list[Tensor] = []
        starts = [*range(0, first, CHUNK), *range(first, len(token_ids), chunk)]
        for start, end in zip(starts, [*starts[1:], len(token_ids)], strict=True):
            hidden = self._pass(list(token_ids[start:end]), start, cache)[: end - start]
            if start >= first:
                rows.append(self._head(hidden))
        return torch.cat(rows)

    def _pass(self, part: list[int], start: int, cache: PagedKVCache) -> Tensor:
        count, padding = len(part), -len(part) % ROW_MULTIPLE
        positions = list(range(start, start + count))
        share = SequenceAttention(
            query_start=0,
            num_queries=count,
            context_len=start,
            num_new=count,
            slots=slice(0, start + count),
            mask=causal_mask(count),
            query_positions=positions,
            new_positions=positions,
        )
        batch = ForwardBatch(
            token_ids=torch.tensor(part + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            longest=start + count,
            slots=torch.arange(start, start + count),
            attention=[share],
        )
        return self.decoder.forward(batch, cache, ())[0]

    def _head(self, hidden: Tensor) -> Tensor:
        padding = -len(hidden) % ROW_MULTIPLE
        padded = torch.cat((hidden, hidden[-1:].expand(padding, -1))) if padding else hidden
        return self.decoder.logits(padded)[: len(hidden)]

    def _cache_of(self, rows: int) -> PagedKVCache:
        if self._cache is None or self._cache.num_blocks * BLOCK < rows:
            config = self.decoder.config
            self._cache = PagedKVCache(
                num_layers=config.num_layers,
                num_blocks=-(-rows // BLOCK) + CHUNK // BLOCK,
                block_size=BLOCK,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=self.decoder.dtype,
                device=self.decoder.device,
            )
        return self._cache


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far harmless changes move the logits of this target in this dtype.

    Attributes:
        margin: largest change of a leading token's distance to the best one, against the reference.
        relative: largest root mean square move of a row, in units of the row's own spread.
        positions: rows looked at.
        scale: largest logit met.
        epsilon: the dtype's.
    """

    margin: float
    relative: float
    positions: int
    scale: float
    epsilon: float

    @property
    def near_tie(self) -> float:
        """Largest distance in reference logits at which two tokens may change places without a bug."""
        # two logits that round to the same number are a tie, whatever was measured
        return max(MARGIN_SAFETY * self.margin, self.epsilon * self.scale)

    @property
    def same_row(self) -> float:
        """Largest relative difference of two rows that are the same but for rounding."""
        return max(ROW_SAFETY * self.relative, self.epsilon)


def measure_noise(
    used: PlainReference, reference: PlainReference, texts: Sequence[Sequence[int]], first: Sequence[int]
) -> Noise:
    """Run the same texts in other cuts and compare.

    Args:
        used: the target in the dtype that is audited.
        reference: the target in fp32.
        texts: token ids.
        first: for each text, the number of the first token whose successor counts.
    """
    margin = relative = scale = 0.0
    positions = 0
    for text, start in zip(texts, first, strict=True):
        expected = reference.logits(text, start)
        whole = used.logits(text, start)
        for chunk in RERUN_CHUNKS:
            rerun = used.logits(text, start, chunk)
            leading = expected.topk(min(LEADING, expected.shape[1]), dim=1).indices
            moved = rerun.gather(1, leading) - expected.gather(1, leading)
            margin = max(margin, float((moved - moved[:, :1]).abs().max()))
            relative = max(relative, float(row_difference(rerun, whole).max()))
        scale = max(scale, float(expected.abs().max()))
        positions += len(expected)
    return Noise(
        margin=margin,
        relative=relative,
        positions=positions,
        scale=scale,
        epsilon=torch.finfo(used.decoder.dtype).eps,
    )


def row_difference(rows: Tensor, expected: Tensor) -> Tensor:
    """Root mean square difference of each row, in units of the expected row's spread: `[rows]`.

    A constant added to a row changes no law and does not count.
    """
    difference = rows - expected
    difference = difference - difference.mean(dim=1, keepdim=True)
    spread = expected.std(dim=1, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    return difference.square().mean(dim=1).sqrt() / spread
