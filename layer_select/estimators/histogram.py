"""Entropy of every coordinate's histogram over rows, averaged over coordinates.

Coordinate j is binned in `BINS` bins between its 0.1 % and 99.9 % quantiles (values outside fall in the edge
bins), H_j = -sum p ln p, plus the bias correction of Miller and Madow, (nonempty bins - 1) / (2 rows). It
depends on the number of bins, so compare only values of the same number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.layer_select.estimators.sample import StateSample

# 64 to 256 are usual; 128 leaves 16 rows a bin at the default batch of 2,048 rows.
BINS = 128
TAIL = 0.001


def histogram_entropy(sample: StateSample) -> Tensor:
    """Mean Miller-Madow entropy of a coordinate over ln of the number of bins, `[boundaries]`.

    At most `sample.max_coordinates` coordinates are read, the same at every boundary, chosen by the seed.
    """
    hidden = sample.states.shape[-1]
    generator = torch.Generator().manual_seed(sample.seed)
    chosen = torch.randperm(hidden, generator=generator)[: sample.max_coordinates].sort().values
    found = [
        coordinate_entropies(states[:, chosen.to(states.device)].double()).mean() for states in sample.scaled
    ]
    return torch.stack(found) / math.log(BINS)


def coordinate_entropies(columns: Tensor) -> Tensor:
    """Miller-Madow entropy in nats of each column of `[rows, columns]`; 0 for a constant one."""
    num_rows, num_columns = columns.shape
    low, high = _quantile(columns, TAIL), -_quantile(-columns, TAIL)
    width = high - low
    # a constant up to rounding, or mass in one value but for the tails: all in one bin.
    constant = width <= torch.finfo(torch.float32).eps * columns.abs().amax(dim=0)
    position = (columns - low) / torch.where(constant, torch.ones_like(width), width) * BINS
    bins = position.floor().clamp(0, BINS - 1).long()
    bins[:, constant] = 0
    flat = bins + BINS * torch.arange(num_columns, device=columns.device)
    counts = torch.bincount(flat.flatten(), minlength=BINS * num_columns).view(num_columns, BINS)
    entropy = torch.special.entr(counts.double() / num_rows).sum(dim=1)
    return entropy + ((counts > 0).sum(dim=1) - 1) / (2 * num_rows)


def _quantile(columns: Tensor, part: float) -> Tensor:
    """The lower quantile of each column by linear interpolation; a few smallest values instead of a sort."""
    position = part * (columns.shape[0] - 1)
    below = math.floor(position)
    wanted = min(below + 2, columns.shape[0])
    smallest = columns.topk(wanted, dim=0, largest=False, sorted=True).values
    return torch.lerp(smallest[below], smallest[wanted - 1], position - below)
