"""What attention needs to know of a ragged batch: the one description for prefill, decode and trees.

Every sequence of a batch brings `num_queries` new rows. A query sees all `context_len` committed
rows of its sequence, and among the sequence's `num_new` uncommitted rows those its mask allows:
itself and its ancestors. A prompt chunk is a chain, plain decoding a tree of one node, so all
three take one path (and stay numerically alike). Trees come from `specdec.tree`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceAttention:
    """One sequence's share of a batch.

    Attributes:
        query_start: first row of this sequence in the batch.
        num_queries: its rows in the batch.
        context_len: committed rows, visible to every query (inside the window).
        num_new: uncommitted rows stored after them (query rows included).
        slots: slots of the context_len + num_new rows, a slice when they are consecutive.
        mask: bool [num_queries, num_new], None when every query sees every new row.
        query_positions: absolute positions of the queries.
        new_positions: absolute positions of the new rows.
    """

    query_start: int
    num_queries: int
    context_len: int
    num_new: int
    slots: slice | Tensor
    mask: Tensor | None
    query_positions: list[int]
    new_positions: list[int]
    _bias: dict[int | None, Tensor | None] = field(default_factory=dict, repr=False, compare=False)

    def tail_bias(self) -> Tensor | None:
        """Additive mask over the new rows [num_queries, num_new]; None when nothing is hidden."""
        if None not in self._bias:
            self._bias[None] = None if self.mask is None else _tail_bias(self.mask)
        return self._bias[None]

    def window_bias(self, window: int) -> Tensor | None:
        """Additive mask over all rows [num_queries, context_len + num_new] for a sliding window.

        A query at position t sees positions t - window + 1 .. t. None when the window hides nothing
        that the tail mask does not.
        """
        if window not in self._bias:
            longest = max(self.query_positions)
            if longest < window:
                self._bias[window] = None
            else:
                keys = torch.cat((torch.arange(self.context_len), torch.tensor(self.new_positions)))
                visible = torch.tensor(self.query_positions)[:, None] - keys[None, :] < window
                if self.mask is not None:
                    visible[:, self.context_len :] &= self.mask.cpu()
                self._bias[window] = _additive(visible)
        return self._bias[window]


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def _tail_bias(mask: Tensor) -> Tensor:
    """Additive form of a mask; those of short chains are kept, since nearly every step asks for one."""
    length = len(mask)
    if length >= len(_short_masks) or mask is not _short_masks[length]:
        return _additive(mask)
    if (bias := _short_biases.get(length)) is None:
        bias = _short_biases[length] = _additive(mask)
    return bias


def block_slots(block_table: list[int], block_size: int, num_rows: int) -> slice | Tensor:
    """Index of a sequence's first `num_rows` rows, by blocks rather than row by row."""
    blocks = block_table[: -(-num_rows // block_size)]
    first = blocks[0]
    if all(block == first + offset for offset, block in enumerate(blocks)):
        return slice(first * block_size, first * block_size + num_rows)
    starts = torch.tensor(blocks)[:, None] * block_size
    return (starts + torch.arange(block_size)).flatten()[:num_rows]


def are_consecutive(numbers: list[int]) -> bool:
    """Whether each number is one more than the one before it."""
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


SHORT_CHAIN = 64  # rows of the largest tree
_short_masks = [torch.ones(length, length, dtype=torch.bool).tril_() for length in range(SHORT_CHAIN + 1)]
_short_biases: dict[int, Tensor] = {}


def causal_mask(length: int) -> Tensor | None:
    """Bool [length, length] of a chain, not to be written to; None for one row, which sees itself."""
    if length == 1:
        return None
    if length <= SHORT_CHAIN:
        return _short_masks[length]
    return torch.ones(length, length, dtype=torch.bool).tril_()
