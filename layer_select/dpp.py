"""k-DPP: a set is likely when its boundaries are rich and span a large volume.

Owns the kernel L = diag(e^(theta I / 2)) R diag(e^(theta I / 2)) (Kulesza and Taskar, arXiv:1207.6083), its
log-determinants and greedy MAP inference by incremental Cholesky factors (Chen et al., arXiv:1709.05135).
log det L_S is submodular, not monotone, so greedy carries no guarantee; its gap is measured instead.
Debiased CKA is not promised to be positive semi-definite and is projected first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.layer_select.constraints import Feasible

# squared residuals below this part of a boundary's own diagonal entry are rounding: such a set is dependent.
RESIDUAL_FLOOR = 1e-12
BLOCK = 100_000


def project_psd(matrix: Tensor) -> Tensor:
    """The nearest positive semi-definite matrix: negative eigenvalues become 0."""
    eigenvalues, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    projected = (vectors * eigenvalues.clamp_min(0)) @ vectors.mT
    return (projected + projected.mT) / 2


def dpp_kernel(richness: Tensor, likeness: Tensor, theta: float) -> Tensor:
    """The kernel over boundaries 0..N, `[N + 1, N + 1]`."""
    quality = (theta * richness / 2).exp()
    return quality[:, None] * project_psd(likeness) * quality[None, :]


def log_dets(kernel: Tensor, sets: Tensor) -> Tensor:
    """Log-determinant of the kernel on each set `[subsets, K]`, `[subsets]`; floored for dependent sets."""
    steady, log_scale = _unit_diagonal(kernel)
    parts = [
        torch.linalg.slogdet(steady[part[:, :, None], part[:, None, :]]).logabsdet
        + log_scale[part].sum(dim=1)
        for part in sets.split(BLOCK)
    ]
    return torch.cat(parts)


def _unit_diagonal(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel scaled to a unit diagonal, and the log of what was divided out, `[N + 1]`.

    Qualities differ by many orders of magnitude under a large theta: only without them can a floor keep
    dependent sets comparable, instead of all at -inf, and leave independent ones alone.
    """
    diagonal = kernel.diagonal().clamp_min(torch.finfo(kernel.dtype).tiny)
    scale = diagonal.sqrt()
    unit = kernel / scale[:, None] / scale[None, :]
    return unit + RESIDUAL_FLOOR * torch.eye(len(kernel), dtype=kernel.dtype), diagonal.log()


def greedy_map(kernel: Tensor, sets: Feasible) -> list[int]:
    """Add the boundary that raises log det most until K are chosen, never into a corner; ascending."""
    steady, log_scale = _unit_diagonal(kernel)
    residual = steady.diagonal().clone()
    factors = kernel.new_zeros(len(kernel), 0)
    chosen: list[int] = []

    def add(boundary: int) -> None:
        nonlocal residual, factors
        pivot = residual[boundary].clamp_min(RESIDUAL_FLOOR).sqrt()
        column = (steady[:, boundary] - factors @ factors[boundary]) / pivot
        factors = torch.cat([factors, column[:, None]], dim=1)
        residual = residual - column.square()
        chosen.append(boundary)

    for boundary in sets.forced:
        add(boundary)
    while len(chosen) < sets.count:
        gain = log_scale + residual.clamp_min(RESIDUAL_FLOOR).log()
        order = torch.sort(gain, descending=True, stable=True).indices.tolist()
        add(next(b for b in order if b in sets.free and b not in chosen and sets.leaves_room([*chosen, b])))
    return sorted(chosen)
