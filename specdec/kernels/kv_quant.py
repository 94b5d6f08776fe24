"""Eight-bit keys and values: one scale per row and head.

Owns the definition of the codes; the fused store and the attention kernel follow it. A row x of head_dim
numbers becomes codes c and one fp32 scale s with x ~ c * s, s = max|x| / (largest code), so no row clips and
a row's codes depend on that row alone: what was stored never changes when rows are added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import SpecdecError

KV_CODE_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST_CODE: dict[str, float] = {"int8": 127.0, "fp8": 448.0}


def quantise_rows(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows: x [..., head_dim] -> (codes [..., head_dim], scales fp32 [...]).

    int8 rounds half to even; fp8 is e4m3 (finite, no infinities), rounded to nearest even. A row of zeros has
    scale 1.
    """
    if kind not in KV_CODE_DTYPES:
        raise SpecdecError(f"kind of quantised KV ({kind}) must be one of {', '.join(KV_CODE_DTYPES)}")
    wide = x.float()
    largest = wide.abs().amax(-1)
    scales = torch.where(largest > 0, largest / LARGEST_CODE[kind], torch.ones_like(largest))
    limit = LARGEST_CODE[kind]
    # the division can end one rounding above the largest code
    codes = (wide / scales[..., None]).clamp(-limit, limit)
    if kind == "int8":
        codes = codes.round()
    return codes.to(KV_CODE_DTYPES[kind]), scales


def dequantise_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """What the codes stand for, fp32 [..., head_dim]."""
    return codes.float() * scales[..., None]
