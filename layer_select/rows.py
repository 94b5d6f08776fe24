"""Preparation of state rows before any estimate: centring, scaling, checks.

Pure tensor functions on `[..., rows, hidden]`. Does not know what is estimated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import SpecdecError

# a row of a constant feature is zero after centring but for rounding: a few ulps of the row's own length.
# scaled to unit length that residue would look like rich noise, so it is set to zero.
RESIDUE_ULPS = 32.0


def row_lengths(states: Tensor) -> Tensor:
    """Length of every row `[..., rows, 1]`, also where the squares leave the range of the dtype."""
    length = states.norm(dim=-1, keepdim=True)
    limits = torch.finfo(states.dtype)
    # squares lose digits from well before they vanish.
    extreme = (length > limits.max**0.5) | (length < (limits.tiny / limits.eps) ** 0.5)
    if bool(extreme.any()):
        rows = extreme.squeeze(-1)
        length[rows] = states[rows].double().norm(dim=-1, keepdim=True).to(states.dtype)
    return length


def center(states: Tensor) -> Tensor:
    """Subtract the mean row; rows that only rounding keeps from zero become zero."""
    centred = states - states.mean(dim=-2, keepdim=True)
    floor = RESIDUE_ULPS * torch.finfo(states.dtype).eps * row_lengths(states)
    return torch.where(row_lengths(centred) <= floor, torch.zeros_like(centred), centred)


def normalize_rows(states: Tensor) -> Tensor:
    """Scale every row to unit length; zero rows stay zero."""
    length = row_lengths(states)
    return states / torch.where(length == 0, torch.ones_like(length), length)


def massive_boundaries(states: Tensor, ratio: float) -> list[int]:
    """Positions along `[boundaries, rows, hidden]` where a row is `ratio` times as long as the median row."""
    lengths = row_lengths(states).squeeze(-1)
    return (lengths.amax(dim=1) > ratio * lengths.median(dim=1).values).nonzero().flatten().tolist()


def require_finite(states: Tensor, boundaries: list[int]) -> None:
    """Refuse NaN and infinite states `[boundaries, rows, hidden]`, naming the first such boundary."""
    finite = torch.isfinite(states).flatten(1).all(dim=1)
    if not bool(finite.all()):
        first = boundaries[int((~finite).nonzero()[0])]
        raise SpecdecError(
            f"the target's states at boundary {first} are not finite; run it in float32, or check its weights"
        )
