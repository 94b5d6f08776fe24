"""Entropy over the channels of a single state, averaged over rows: the cheapest reading of "entropy".

Both turn one state h `[hidden]` into a distribution over its coordinates: its energy h_j^2 / |h|^2, whose
entropy is the log of the participation of channels, or softmax(h / rms(h)), scaled so that growing residual
norms do not decide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.layer_select.estimators.sample import StateSample
from specdec.layer_select.rows import normalize_rows


def channel_entropy(sample: StateSample) -> Tensor:
    """Mean entropy of the energy of a state's channels over ln hidden, `[boundaries]`, in 0..1."""
    return _mean_entropy(sample, lambda unit: unit.square())


def channel_softmax_entropy(sample: StateSample) -> Tensor:
    """Mean entropy of softmax(h / rms(h)) over ln hidden, `[boundaries]`, in 0..1."""
    width = math.sqrt(sample.states.shape[-1])
    return _mean_entropy(sample, lambda unit: torch.softmax(unit * width, dim=-1))


def _mean_entropy(sample: StateSample, law: Callable[[Tensor], Tensor]) -> Tensor:
    found = []
    # one boundary at a time: the law is as large as the states.
    for states in sample.states:
        probabilities = law(normalize_rows(states.double()))
        found.append(torch.special.entr(probabilities).sum(dim=-1).mean())
    return torch.stack(found) / max(math.log(sample.states.shape[-1]), torch.finfo(torch.float64).tiny)
