"""Ridge regression from sums: the solver and the input rows that the probe and a head's start share.

Pure tensor functions. Does not know models, heads or where sums come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

# of the mean squared input: enough for 10^4 rows, and lost in 10^5.
RIDGE_PENALTY = 0.02


def unit_rms(states: Tensor) -> Tensor:
    """States `[..., hidden]` of root mean square 1: RMSNorm without its weight."""
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6)


def ridge_solve(gram: Tensor, cross: Tensor, penalty: Tensor | None = None) -> Tensor:
    """Weights `[inputs, outputs]` that minimise |Y - X W|^2 + penalty |W|^2.

    Args:
        gram: X^T X, `[inputs, inputs]`.
        cross: X^T Y, `[inputs, outputs]`.
        penalty: a scalar; `RIDGE_PENALTY` of the mean diagonal of the Gram when None.
    """
    if penalty is None:
        penalty = RIDGE_PENALTY * gram.diagonal().mean()
    matrix = gram.double() + penalty.double() * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    return torch.linalg.solve(matrix, cross.double()).to(cross.dtype)
