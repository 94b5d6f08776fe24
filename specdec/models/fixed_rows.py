"""Products whose bits do not depend on how many rows share a pass.

A library picks the path of a matrix product by its shape, so a row's low bits may change with the number of
rows beside it. Here every product has the same number of rows: more rows are cut into such blocks, fewer are
filled up with zeros. Knows nothing of what the rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.models.layers import Linear

FIXED_ROWS = 64  # the largest tree, and a whole batch of single rows, are one block


class FixedRowLinear(Linear):
    """A linear layer computed in blocks of `FIXED_ROWS` rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """Y [rows, out_features] of x [rows, in_features]."""
        rows = x.shape[0]
        if rows == FIXED_ROWS:
            return super().__call__(x)
        blocks = F.pad(x, (0, 0, 0, -rows % FIXED_ROWS)).split(FIXED_ROWS)
        return torch.cat([super(FixedRowLinear, self).__call__(block) for block in blocks])[:rows]
