"""What batched verification does to laws: gather, normalise, draw; the twin of `laws.py` in torch.

For graph-captured serving, which the engine does not do yet. Owns the one way a batch draws a token. A batch
of laws is float64 `[batch, vocab]`, on any device. Nothing here reads a value on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_at(laws: Tensor, nodes: Tensor) -> Tensor:
    """Law of one node of each sequence, float64 `[batch, vocab]`, summing to 1 (or 0 for an empty row)."""
    index = nodes.view(-1, 1, 1).expand(-1, 1, laws.shape[2])
    return normalised(laws.gather(1, index).squeeze(1).double())


def normalised(laws: Tensor) -> Tensor:
    """Divide rows by their sum; rows of zeros stay."""
    mass = laws.sum(-1, keepdim=True)
    return laws / nonzero(mass)


def nonzero(values: Tensor) -> Tensor:
    """Replace what is not positive by 1, to divide by.

    `masked_fill`, not `where`: on a card `where` turns its number into a tensor, which waits for a copy.
    """
    return values.masked_fill(values <= 0.0, 1.0)


def draw(laws: Tensor, numbers: Tensor) -> Tensor:
    """Draw from every row by the inverse CDF, as `specdec.sampling.sample` does.

    A scan on a card may round so that an empty id has a step; ids of no mass are kept out by name.

    Args:
        laws: float64 `[batch, vocab]`, not necessarily normalised, each with mass.
        numbers: float64 `[batch]` in [0, 1).
    """
    cdf = laws.cumsum(-1)
    allowed = laws > 0.0
    reached = (numbers.unsqueeze(1) < cdf / cdf[:, -1:]) & allowed
    last_allowed = laws.shape[1] - 1 - allowed.flip(-1).byte().argmax(-1)
    return torch.where(reached.any(-1), reached.byte().argmax(-1), last_allowed)


def one_hot_like(laws: Tensor, tokens: Tensor) -> Tensor:
    """Laws that are sure of one token each, in the shape of `laws` `[batch, vocab]`."""
    return torch.zeros_like(laws).scatter_(1, tokens.unsqueeze(1), 1.0)


def token_probs(laws: Tensor, tokens: Tensor) -> Tensor:
    """Probability of one token in each row."""
    return laws.gather(1, tokens.unsqueeze(1)).squeeze(1)
