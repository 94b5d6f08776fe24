"""Building blocks of the decoder: linear layers in the storage their weights allow, RMS norm.

A packed linear holds fp16 weights for FBGEMM and computes in fp32: exact products of the stored
weights, half the memory traffic of fp32. It is used only where every weight is an fp16 number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ROW_MULTIPLE = 4  # rows of a product padded to this give the same bits whatever their number (FBGEMM)


class Linear:
    """y = x W^T + b for x [rows, in_features], weight [out_features, in_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = packed
        if packed:
            self._packed = torch.ops.quantized.linear_prepack_fp16(
                weight.float(), None if bias is None else bias.float()
            )
        else:
            self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed)
        return F.linear(x, self.weight, self.bias)


def packing_available() -> bool:
    """Whether this torch build has the FBGEMM fp16 linear for this processor."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        probe = Linear(torch.ones(4, 4), None, packed=True)
        return bool(torch.equal(probe(torch.ones(4, 4)), torch.full((4, 4), 4.0)))
    except (RuntimeError, NotImplementedError):
        return False


def fits_fp16(weight: Tensor) -> bool:
    """Whether every entry is exactly an fp16 number."""
    if weight.dtype == torch.float16:
        return bool(weight.isfinite().all())
    return bool(torch.equal(weight.half().to(weight.dtype), weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last axis (arXiv:1910.07467), computed in x's dtype or fp32."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)
