"""Variance that many subsets of input blocks explain on held-out rows, from one cached Gram.

Pure linear algebra. Each subset costs a Cholesky factor of its own block of the Gram, a solve for a few
output directions and a product with the held-out rows; nothing is read again. Held out, because on the rows
of the fit a set explains more the more its blocks differ, whether or not what it fits is there in other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeldOutFit:
    """Centred sums of the fit rows, and centred held-out rows.

    Attributes:
        gram: `[blocks * size, blocks * size]`.
        cross: `[blocks * size, outputs]`.
        inputs: Held-out inputs, `[rows, blocks * size]`.
        outputs: Held-out outputs, `[rows, outputs]`.
        size: Width of a block.
    """

    gram: Tensor
    cross: Tensor
    inputs: Tensor
    outputs: Tensor
    size: int

    def in_leading_directions(self, width: int) -> HeldOutFit:
        """The same fit of at most `width` output directions: those that the inputs move most."""
        if self.cross.shape[1] <= width:
            return self
        moment = (self.cross.mT @ self.cross).double()
        directions = torch.linalg.eigh(moment).eigenvectors[:, -width:].to(self.cross.dtype)
        return HeldOutFit(
            gram=self.gram,
            cross=self.cross @ directions,
            inputs=self.inputs,
            outputs=self.outputs @ directions,
            size=self.size,
        )

    def explained(self, subsets: Sequence[tuple[int, ...]], penalty: float) -> Tensor:
        """Share of the outputs' variance over the held-out rows, `[subsets]`, float64; may be below 0.

        Args:
            subsets: ascending block numbers of each.
            penalty: of the ridge regression; above 0.
        """
        spread = float((self.outputs - self.outputs.mean(dim=0)).double().square().sum())
        if spread == 0:
            return torch.zeros(len(subsets), dtype=torch.float64)
        left = [float(self._left(subset, penalty)) for subset in subsets]
        return 1.0 - torch.tensor(left, dtype=torch.float64) / spread

    def columns(self, subset: Sequence[int]) -> Tensor:
        """Columns of the blocks of a subset."""
        offsets = torch.arange(self.size, device=self.gram.device)
        return torch.cat([block * self.size + offsets for block in subset])

    def _left(self, subset: Sequence[int], penalty: float) -> Tensor:
        """Squared error of one subset over the held-out rows."""
        columns = self.columns(subset)
        slices = [slice(block * self.size, (block + 1) * self.size) for block in subset]
        # block by block: indexing by columns would first copy whole rows of all blocks.
        matrix = torch.cat([torch.cat([self.gram[row, column] for column in slices], 1) for row in slices])
        matrix.diagonal().add_(penalty)
        weights = torch.cholesky_solve(self.cross[columns], torch.linalg.cholesky(matrix))
        return (self.outputs - self.inputs[:, columns] @ weights).square().sum(dtype=torch.float64)
