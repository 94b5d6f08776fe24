"""Explained variance of many subsets of input blocks, from one block Gram.

Pure linear algebra. For a subset S of blocks, tr(C_S^T (G_SS + penalty I)^-1 C_S) is what a ridge regression
on those blocks takes off the squared error (plus penalty). Eliminating one block from a symmetric system
leaves the Schur complement for the others, so the sum splits into one term for each block, in order, and
subsets that begin alike share their first eliminations. Before the last block only the diagonal blocks of the
complement are needed, for all last blocks in one batched product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# last blocks eliminated in one product; bounds what a batch holds at wide blocks.
LAST_TOGETHER = 32


@dataclass(frozen=True, kw_only=True)
class _System:
    """What is left after some eliminations.

    Attributes:
        blocks: Blocks that may follow, ascending.
        gram: `[blocks, size, blocks, size]`.
        cross: `[blocks, size, outputs]`.
        gain: What the eliminated blocks explain.
    """

    blocks: list[int]
    gram: Tensor
    cross: Tensor
    gain: float


# a subset's place in the caller's list, and the blocks of it that are still to be eliminated.
_Pending = tuple[int, tuple[int, ...]]


def explained_by_subset(
    gram: Tensor,
    cross: Tensor,
    size: int,
    penalty: float,
    subsets: Sequence[tuple[int, ...]],
    *,
    always: int,
) -> Tensor:
    """tr(C_S^T (G_SS + penalty I)^-1 C_S) of every subset, `[subsets]`, float64.

    Args:
        gram: `[blocks * size, blocks * size]`, symmetric.
        cross: `[blocks * size, outputs]`.
        size: width of a block.
        penalty: added to the diagonal; above 0.
        subsets: ascending block numbers.
        always: a block that is part of every subset besides.
    """
    used = sorted({block for subset in subsets for block in subset} | {always})
    columns = torch.cat([torch.arange(block * size, (block + 1) * size) for block in used]).to(gram.device)
    shape = (len(used), size)
    matrix = gram[columns][:, columns]
    matrix.diagonal().add_(penalty)
    system = _System(
        blocks=used, gram=matrix.view(*shape, *shape), cross=cross[columns].view(*shape, -1), gain=0.0
    )
    found = torch.zeros(len(subsets), dtype=torch.float64)
    pending = [(index, tuple(subset)) for index, subset in enumerate(subsets)]
    rest = [block for block in used if block != always]
    _descend(_eliminate(system, always, rest), pending, found)
    return found


def _descend(system: _System, pending: list[_Pending], found: Tensor) -> None:
    """Fill in what the pending subsets explain, each from the blocks still to be eliminated."""
    for index, left in pending:
        if not left:
            found[index] = system.gain
    last = [(index, left[0]) for index, left in pending if len(left) == 1]
    _finish_diagonal(system, last, found)
    by_first: dict[int, list[_Pending]] = {}
    for index, left in pending:
        if len(left) > 1:
            by_first.setdefault(left[0], []).append((index, left[1:]))
    for first, followers in by_first.items():
        needed = sorted({block for _, left in followers for block in left})
        if all(len(left) == 1 for _, left in followers):
            _finish_pairs(system, first, needed, [(index, left[0]) for index, left in followers], found)
        else:
            _descend(_eliminate(system, first, needed), followers, found)


def _eliminate(system: _System, block: int, keep: list[int]) -> _System:
    """Eliminate one block and keep the Schur complement of some others."""
    factor, explained, cross_part, own = _factor(system, block)
    places = [system.blocks.index(each) for each in keep]
    size = system.gram.shape[1]
    rows = system.gram[own][:, places].flatten(1)
    reduced = torch.linalg.solve_triangular(factor, rows, upper=False)
    matrix = system.gram[places][:, :, places].reshape(len(keep) * size, -1)
    matrix = matrix - reduced.mT @ reduced
    cross = system.cross[places].flatten(0, 1) - reduced.mT @ cross_part
    shape = (len(keep), size)
    return _System(
        blocks=keep,
        gram=matrix.view(*shape, *shape),
        cross=cross.view(*shape, -1),
        gain=system.gain + explained,
    )


def _factor(system: _System, block: int) -> tuple[Tensor, float, Tensor, int]:
    """Cholesky factor of one block, what it explains, its reduced cross sums, and its place."""
    own = system.blocks.index(block)
    factor = torch.linalg.cholesky(system.gram[own, :, own])
    cross = torch.linalg.solve_triangular(factor, system.cross[own], upper=False)
    return factor, float(cross.double().square().sum()), cross, own


def _finish_pairs(
    system: _System, first: int, needed: list[int], last: list[tuple[int, int]], found: Tensor
) -> None:
    """Subsets of which `first` and one more block are left: only diagonal blocks of the complement."""
    factor, explained, cross_part, own = _factor(system, first)
    gains: dict[int, float] = {}
    for low in range(0, len(needed), LAST_TOGETHER):
        part = needed[low : low + LAST_TOGETHER]
        places = [system.blocks.index(each) for each in part]
        # [blocks, size, size]: row block `first` against each last block.
        rows = system.gram[own][:, places].transpose(0, 1)
        reduced = torch.linalg.solve_triangular(factor, rows, upper=False)
        diagonal = torch.stack([system.gram[place, :, place] for place in places])
        cross = system.cross[places] - reduced.mT @ cross_part
        gains |= dict(zip(part, _gains(diagonal - reduced.mT @ reduced, cross), strict=True))
    for index, block in last:
        found[index] = system.gain + explained + gains[block]


def _finish_diagonal(system: _System, last: list[tuple[int, int]], found: Tensor) -> None:
    """Subsets of which one block is left."""
    needed = sorted({block for _, block in last})
    gains: dict[int, float] = {}
    for low in range(0, len(needed), LAST_TOGETHER):
        part = needed[low : low + LAST_TOGETHER]
        places = [system.blocks.index(each) for each in part]
        diagonal = torch.stack([system.gram[place, :, place] for place in places])
        gains |= dict(zip(part, _gains(diagonal, system.cross[places]), strict=True))
    for index, block in last:
        found[index] = system.gain + gains[block]


def _gains(diagonal: Tensor, cross: Tensor) -> list[float]:
    """What each block explains by itself, from its `[blocks, size, size]` and `[blocks, size, outputs]`."""
    reduced = torch.linalg.solve_triangular(torch.linalg.cholesky(diagonal), cross, upper=False)
    return reduced.double().square().sum(dim=(1, 2)).tolist()
