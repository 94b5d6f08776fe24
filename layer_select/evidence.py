"""Evidence beside entropy and CKA: how far each block moves the stream, how near each boundary is to the end.

Pure tensor functions on raw states (no centring, no scaling). Block influence is that of ShortGPT
(arXiv:2403.03853), 1 - E cos(h_b, h_{b+1}). Does not know models or how the values are used.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specdec.layer_select.rows import normalize_rows


def mean_cosine(first: Tensor, second: Tensor) -> Tensor:
    """Mean cosine over rows of states `[..., rows, hidden]`, `[...]`, float64; a zero state counts 0."""
    return (normalize_rows(first) * normalize_rows(second)).sum(dim=-1).double().mean(dim=-1)


def block_influence(states: Tensor) -> Tensor:
    """1 - E cos(h_b, h_{b+1}) of each block, `[boundaries - 1]`, from states `[boundaries, rows, hidden]`."""
    return torch.stack([1.0 - mean_cosine(first, second) for first, second in pairwise(states)])


def cosine_to_final(states: Tensor) -> Tensor:
    """E cos(h_b, h_N) of every boundary, `[boundaries]`, from states `[boundaries, rows, hidden]`."""
    return torch.stack([mean_cosine(state, states[-1]) for state in states])
