"""Products with frozen fp32 rows on a CPU, through oneDNN's own layout of them.

Owns the layout and the product. torch multiplies fp32 matrices on a CPU by MKL, which on AMD reaches 60 % of
what oneDNN does for the few rows of a block of the loss; rows that never change are laid out once. The sums
are fp32 sums of the same products in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

# rows of the other factor that the layout is chosen for; others are as right
EXPECTED_ROWS = 128


def packed_rows(weight: Tensor) -> Tensor | None:
    """`weight` [outputs, inputs] in oneDNN's layout; None where that is of no use (a card, other types)."""
    if weight.is_cuda or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), EXPECTED_ROWS)
    return packed


def packed_product(inputs: Tensor, packed: Tensor) -> Tensor:
    """`inputs` [rows, inputs] times the transpose of what was packed: [rows, outputs]."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, None, "none", [], "")
    return found
