"""Differential entropy of a Gaussian with the rows' covariance, scale removed.

h = 1/2 ln det(2 pi e (Sigma + eps I)) grows with the length of the states, which grows with depth; so rows
are divided by their root mean square first and the value is in nats per dimension, at most that of white
rows, 1/2 ln(2 pi e (1 + eps)).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.layer_select.estimators.sample import StateSample, smaller_gram

# part of the unit mean square; directions that the rows do not reach (fewer rows than dimensions) count this.
EPSILON = 1e-3


def gaussian_entropy(sample: StateSample) -> Tensor:
    """Gaussian differential entropy per dimension of rows of unit root mean square, `[boundaries]`."""
    found = [_entropy(states) for states in sample.scaled]
    return torch.stack(found)


def _entropy(states: Tensor) -> Tensor:
    """Of one boundary's rows `[rows, hidden]`; constant rows give that of eps alone."""
    num_rows, hidden = states.shape
    mean_square = states.double().square().mean()
    scale = torch.rsqrt(torch.where(mean_square > 0, mean_square, torch.ones_like(mean_square)))
    centred = (states - states.mean(dim=0)) * scale.to(states.dtype)
    covariance = smaller_gram(centred) / num_rows
    size = covariance.shape[0]
    covariance.diagonal().add_(EPSILON)
    # |Sigma + eps I| from the smaller Gram: the directions it lacks contribute eps each.
    log_det = torch.linalg.slogdet(covariance).logabsdet + (hidden - size) * math.log(EPSILON)
    return 0.5 * (log_det / hidden + math.log(2 * math.pi * math.e))
