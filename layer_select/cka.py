"""Linear CKA between boundaries: biased and debiased, both streamed over minibatches.

Owns the formulas (Kornblith et al. 2019; HSIC_1 of Song et al. 2012; minibatch form of Nguyen et al.,
arXiv:2010.15327). Does not know models or how the values are used.

All pairs of boundaries come from one matrix product. HSIC_1 of two kernels equals the inner product of their
U-centred Gram matrices divided by n (n - 3) (Szekely and Rizzo 2014), so each Gram is U-centred and flattened
once and the flattened stack is multiplied by its own transpose: n^2 hidden per boundary and n^2 per pair. The
feature form (hidden^2 n per pair) would only be cheaper for n far above hidden, where minibatches never are.
U-centring ignores a common shift of the states, so they are centred first, which keeps fp32 digits.

The biased value (HSIC with the diagonal kept) comes from the same Grams; averaged over minibatches it depends
on their size. Over shared rows both kinds are inner products of matrices, one for each boundary, so both CKA
matrices are positive semi-definite, as a k-DPP needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.config import MIN_ROWS
from specdec.layer_select.rows import center


def linear_cka(first: Tensor, second: Tensor) -> Tensor:
    """Biased linear CKA of two feature sets `[rows, hidden]`; near 1 for any pair once hidden >> rows."""
    x, y = center(first.double()), center(second.double())
    if x.shape[0] <= max(x.shape[1], y.shape[1]):
        k, g = x @ x.mT, y @ y.mT
        cross, own_x, own_y = (k * g).sum(), k.norm(), g.norm()
    else:
        cross, own_x, own_y = (y.mT @ x).square().sum(), (x.mT @ x).norm(), (y.mT @ y).norm()
    scale = own_x * own_y
    return cross / scale if scale > 0 else torch.zeros_like(cross)


@dataclass(frozen=True, kw_only=True)
class HsicPair:
    """HSIC between all pairs of boundaries over the same rows, `[boundaries, boundaries]`, float64.

    Attributes:
        debiased: HSIC_1; unbiased, so it may be negative off the diagonal.
        biased: HSIC_0 = tr(K H L H) / (n - 1)^2, never negative.
    """

    debiased: Tensor
    biased: Tensor


def hsic_pair(states: Tensor) -> HsicPair:
    """HSIC between all pairs of boundaries, biased and not.

    Args:
        states: `[boundaries, rows, hidden]`, at least 4 rows.
    """
    num_rows = states.shape[1]
    if num_rows < MIN_ROWS:
        raise SpecdecError(
            f"CKA needs at least {MIN_ROWS} rows, {num_rows} given; use more calibration tokens"
        )
    centred = center(states)
    gram = centred @ centred.mT
    biased = _inner_products(gram) / (num_rows - 1) ** 2
    gram.diagonal(dim1=-2, dim2=-1).zero_()
    row_sums = gram.sum(dim=-1)
    total = row_sums.sum(dim=-1)[:, None, None] / ((num_rows - 1) * (num_rows - 2))
    gram -= row_sums[:, :, None] / (num_rows - 2)
    gram -= row_sums[:, None, :] / (num_rows - 2)
    gram += total
    gram.diagonal(dim1=-2, dim2=-1).zero_()
    return HsicPair(debiased=_inner_products(gram) / (num_rows * (num_rows - 3)), biased=biased)


def _inner_products(grams: Tensor) -> Tensor:
    flat = grams.flatten(1)
    products = (flat @ flat.mT).double()
    return (products + products.mT) / 2


def hsic_matrix(states: Tensor) -> Tensor:
    """HSIC_1 between all pairs of boundaries, `[boundaries, boundaries]`; see `hsic_pair`."""
    return hsic_pair(states).debiased


def cka_from_hsic(hsic: Tensor) -> Tensor:
    """The CKA matrix of averaged HSIC values `[boundaries, boundaries]`.

    A boundary whose own HSIC is not positive (constant states) has CKA 0 with every other; see
    `degenerate_boundaries`. The diagonal is 1.
    """
    own = hsic.diagonal()
    usable = own > 0
    scale = torch.where(usable, own, torch.ones_like(own)).sqrt()
    cka = hsic / (scale[:, None] * scale[None, :])
    cka = torch.where(usable[:, None] & usable[None, :], cka, torch.zeros_like(cka))
    cka.fill_diagonal_(1.0)
    return cka


def degenerate_boundaries(hsic: Tensor) -> list[int]:
    """Positions whose own HSIC is not positive: their states hold no variation to compare."""
    return (hsic.diagonal() <= 0).nonzero().flatten().tolist()


def minibatch_hsic(batches: Iterable[Tensor]) -> Tensor:
    """Row-weighted mean of HSIC_1 over batches `[boundaries, rows, hidden]`; memory of one batch."""
    total, rows = None, 0
    for states in batches:
        part = hsic_matrix(states) * states.shape[1]
        total = part if total is None else total + part
        rows += states.shape[1]
    assert total is not None, "at least one batch is needed"
    return total / rows


def debiased_cka(first: Tensor, second: Tensor) -> Tensor:
    """Debiased linear CKA of two feature sets `[rows, hidden]` of any widths; may be slightly negative."""
    width = max(first.shape[1], second.shape[1])
    # zero columns change no inner product.
    padded = [torch.nn.functional.pad(x.double(), (0, width - x.shape[1])) for x in (first, second)]
    return cka_from_hsic(hsic_matrix(torch.stack(padded)))[0, 1]
