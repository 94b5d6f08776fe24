"""Norms and the gated activation in plain torch: what the Triton kernels of `norms` must equal.

The definition, also of the kernels: inputs are widened to fp32 (fp64 stays), everything is computed there,
and a result is rounded once. The residual sum is rounded before it is normed, because the next layer reads
the rounded one. Source of the norm: arXiv:1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of x [rows, hidden] with weight [hidden]."""
    wide = _wide(x)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * _wide(weight)).to(x.dtype)


def add_rms_norm(update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to `residual` in place, both [rows, hidden]; returns the norm of the sum."""
    residual.copy_(_wide(residual) + _wide(update))
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused projection [rows, 2 * inner], gate first -> [rows, inner]."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
