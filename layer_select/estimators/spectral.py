"""Entropies and ranks of the spectrum of a sample's Gram matrix.

Matrix-based Renyi entropy (Skean et al., arXiv:2502.02013): with Gram matrix K = X X^T of the states X
`[rows, hidden]` and lam = eig(K) / trace(K), S_a = ln(sum lam^a) / (1 - a); a -> 1 is the Shannon entropy of
that spectrum. Each is 0 when all states lie on one line and ln n when n states are orthogonal and equally
long. S_2 = -ln(||K||_F^2 / trace(K)^2) needs no eigenvalues.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.layer_select.estimators.sample import StateSample


def spectral_entropy(spectrum: Tensor, alpha: float = 1.0) -> Tensor:
    """Renyi entropy in nats of normalised spectra `[..., rank]`; 0 for an all-zero one.

    Args:
        spectrum: eigenvalues that sum to 1.
        alpha: the order, above 0; 1 is Shannon's, infinity that of the largest eigenvalue alone.
    """
    if alpha == 1.0:
        return torch.special.entr(spectrum).sum(dim=-1)
    largest = spectrum.amax(dim=-1)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    if math.isinf(alpha):
        return -torch.log(safe)
    # powers of ratios to the largest neither overflow nor vanish.
    powers = (spectrum / safe.unsqueeze(-1)).pow(alpha).sum(dim=-1).clamp_min(1.0)
    entropy = (torch.log(powers) + alpha * torch.log(safe)) / (1.0 - alpha)
    return torch.where(largest > 0, entropy.clamp_min(0.0), torch.zeros_like(entropy))


def renyi_two(gram: Tensor) -> Tensor:
    """S_2 in nats from Gram matrices `[..., rank, rank]` without their eigenvalues; 0 for a zero one."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    safe = torch.where(trace > 0, trace, torch.ones_like(trace))
    purity = (gram / safe[..., None, None]).square().sum(dim=(-2, -1))
    return -torch.log(torch.where(trace > 0, purity, torch.ones_like(purity))).clamp_max(0.0)


def matrix_renyi(sample: StateSample, alpha: float) -> Tensor:
    """Matrix-based Renyi entropy divided by ln min(rows, hidden), `[boundaries]`, in 0..1."""
    if alpha == 2.0:
        entropy = renyi_two(sample.gram)
    else:
        spectrum = sample.spectrum if alpha >= 1.0 else _significant(sample)
        entropy = spectral_entropy(spectrum, alpha)
    return entropy / max(math.log(sample.max_rank), torch.finfo(torch.float64).tiny)


def matrix_entropy(sample: StateSample) -> Tensor:
    """Matrix-based Shannon entropy divided by ln min(rows, hidden), `[boundaries]`, in 0..1."""
    return matrix_renyi(sample, 1.0)


def effective_rank(sample: StateSample) -> Tensor:
    """Perplexity of the normalised *squared* singular values over min(rows, hidden), `[boundaries]`.

    It is exp of the matrix-based Shannon entropy.
    """
    return spectral_entropy(sample.spectrum).exp() / sample.max_rank


def effective_rank_roy_vetterli(sample: StateSample) -> Tensor:
    """Perplexity of the normalised singular values themselves over min(rows, hidden), `[boundaries]`.

    The convention of Roy and Vetterli (EUSIPCO 2007); never below the squared one.
    """
    values = _significant(sample).sqrt()
    total = values.sum(dim=-1, keepdim=True)
    values = values / torch.where(total == 0, torch.ones_like(total), total)
    return spectral_entropy(values).exp() / sample.max_rank


def _significant(sample: StateSample) -> Tensor:
    """The spectrum without what rounding of the Gram can make: roots and small powers would lift it."""
    spectrum = sample.spectrum
    floor = sample.max_rank * torch.finfo(sample.states.dtype).eps * spectrum.amax(dim=-1, keepdim=True)
    return torch.where(spectrum <= floor, torch.zeros_like(spectrum), spectrum)
