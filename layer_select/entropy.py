"""Informativeness of one boundary from the states of one text.

Owns the estimators and their registry. Does not know models, texts or how boundaries are combined.

Matrix-based entropy (Skean et al., arXiv:2502.02013): with Gram matrix K = X X^T of the token states X
`[tokens, hidden]` and lam = eig(K) / trace(K), the Shannon entropy of that spectrum, -sum lam ln lam. It is 0
when all states lie on one line and ln(n) when n states are orthogonal and equally long. Centring and unit
rows are applied first unless switched off (Matrix-Entropy and Diff-eRank do so). X X^T and X^T X share their
non-zero spectrum, so the smaller of the two is decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.rows import center, normalize_rows


@dataclass(frozen=True, kw_only=True)
class TextStates:
    """States of one text at several boundaries, with what estimators share computed once.

    Attributes:
        states: `[boundaries, tokens, hidden]`, sink and padding positions removed.
        center: Subtract the text's mean state first.
        row_normalize: Scale states to unit length, after centring.
    """

    states: Tensor
    center: bool = True
    row_normalize: bool = True

    @property
    def max_rank(self) -> int:
        """The largest rank the Gram matrix can have."""
        return min(self.states.shape[-2:])

    @cached_property
    def spectrum(self) -> Tensor:
        """Gram eigenvalues divided by their sum, `[boundaries, min(tokens, hidden)]`, float64."""
        prepared = center(self.states) if self.center else self.states
        return gram_spectrum(normalize_rows(prepared) if self.row_normalize else prepared)


def gram_spectrum(states: Tensor) -> Tensor:
    """Eigenvalues of the token Gram matrix divided by its trace.

    Args:
        states: `[..., tokens, hidden]`.

    Returns:
        `[..., min(tokens, hidden)]`, float64, summing to 1, or all zero where all states are zero.
    """
    tokens, hidden = states.shape[-2:]
    gram = states @ states.mT if tokens <= hidden else states.mT @ states
    # the product is cheap in the states' own precision, the decomposition needs the digits.
    eigenvalues = torch.linalg.eigvalsh(gram.double()).clamp_min(0)
    trace = eigenvalues.sum(dim=-1, keepdim=True)
    return eigenvalues / torch.where(trace == 0, torch.ones_like(trace), trace)


def spectral_entropy(spectrum: Tensor) -> Tensor:
    """Shannon entropy in nats of normalised spectra `[..., rank]`; 0 for an all-zero one."""
    return torch.special.entr(spectrum).sum(dim=-1)


def matrix_entropy(text: TextStates) -> Tensor:
    """Matrix-based Shannon entropy divided by ln min(tokens, hidden), `[boundaries]`, in 0..1."""
    return spectral_entropy(text.spectrum) / max(math.log(text.max_rank), torch.finfo(torch.float64).tiny)


def effective_rank(text: TextStates) -> Tensor:
    """Perplexity of the Gram spectrum divided by min(tokens, hidden), `[boundaries]`.

    It is exp of the matrix-based entropy, the convention of squared singular values; Roy and Vetterli's
    normalises the singular values themselves.
    """
    return spectral_entropy(text.spectrum).exp() / text.max_rank


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One way to say how much a boundary tells.

    Attributes:
        name: Its key in the registry and in files.
        sign: +1 where a higher value is taken as richer, -1 where a lower one is.
        normalization: What the raw value is divided by.
        drop_bos: Whether the attention sink is removed first.
        compute: States of one text to one value a boundary, `[boundaries]`, float64, finite.
    """

    name: str
    sign: int
    normalization: str
    drop_bos: bool = True
    compute: Callable[[TextStates], Tensor]


ESTIMATORS: dict[str, Estimator] = {
    "matrix_entropy": Estimator(
        name="matrix_entropy", sign=1, normalization="ln min(tokens, hidden)", compute=matrix_entropy
    ),
    "effective_rank": Estimator(
        name="effective_rank", sign=1, normalization="min(tokens, hidden)", compute=effective_rank
    ),
}


def estimator_named(name: str) -> Estimator:
    """The registered estimator of that name, or an error listing the known ones."""
    if name not in ESTIMATORS:
        raise SpecdecError(f"estimator ({name}) must be one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]
