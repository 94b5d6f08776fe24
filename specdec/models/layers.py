"""Building blocks of the decoder: linear layers in the storage their weights allow, RMS norm.

A packed linear holds fp16 weights for FBGEMM and computes in fp32: exact products of the stored
weights, half the memory traffic of fp32. It is used only where every weight is an fp16 number. A bf16 one
holds weights in oneDNN's layout and rounds the activations of every call to bf16 too; sums are fp32. An int8
one rounds the weights (a scale per output) and, at every call, the activations (a scale per row). To a model
that is asked for in fp32, both are another model.
"""

from __future__ import annotations

import logging
import warnings
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

SLOW_BF16 = "this processor does not multiply bf16 numbers; float32 takes a fraction of the time"
ROW_MULTIPLE = 4  # rows of a plain product padded to this have the same bits whatever their number (MKL)
PACKED_FOR_ROWS = 16  # a hint to oneDNN: the layout holds for any number of rows
# row counts compared by `row_multiple`: FBGEMM cuts rows into blocks of 120, and each block into kernels
PROBE_ROWS = 260
ROW_MULTIPLES = (1, 3, 4, 6, 8, 12, 24)


class Storage(IntEnum):
    """How a matrix is held."""

    PLAIN = 0  # in the compute dtype
    FP16 = 1
    INT8 = 2
    BF16 = 3


class Linear:
    """y = x W^T + b for x [rows, in_features], weight [out_features, in_features].

    `weight` of an fp16 or int8 one is inside `packed` and empty here, that of a bf16 one has oneDNN's layout;
    the bias of an fp16 one is inside too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, storage: Storage = Storage.PLAIN) -> None:
        self.out_features, self.in_features = weight.shape
        self.storage = storage
        self.weight = torch.empty(0, device=weight.device)
        self.bias: Tensor | None = None
        self.packed: torch.ScriptObject | None = None
        if storage is Storage.FP16:
            wide_bias = None if bias is None else bias.float()
            self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), wide_bias)
        elif storage is Storage.INT8:
            self.packed = torch.ops.quantized.linear_prepack(_to_int8(weight.float()), None)
            self.bias = None if bias is None else bias.float()
        elif storage is Storage.BF16:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), PACKED_FOR_ROWS)
            self.bias = None if bias is None else bias.float()
        else:
            self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.storage is Storage.FP16:
            return torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed)
        if self.storage is Storage.INT8:
            spread, scale = spread_rows(x)
            product = (
                torch.ops.quantized.linear_dynamic.default(spread, self.packed, int8_overflows()) * scale
            )
            return product if self.bias is None else product + self.bias
        if self.storage is Storage.BF16:
            product = bf16_product(x, self.weight)
            return product if self.bias is None else (product + self.bias).to(x.dtype)
        return F.linear(x, self.weight, self.bias)


def bf16_product(x: Tensor, packed: Tensor) -> Tensor:
    """Product of x [rows, in], rounded to bf16, and a weight in oneDNN's layout: in x's dtype."""
    nothing = torch.jit.annotate(list[int | float | complex | None], [])
    return torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), packed, None, "none", nothing, "").to(
        x.dtype
    )


def _to_int8(weight: Tensor) -> Tensor:
    """Round each output's weights to 255 steps between minus and plus its largest; add two columns of 0."""
    scales = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny).double() / 127
    points = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch announces the end of its quantised tensors; there is no other way yet to these products
        warnings.simplefilter("ignore", UserWarning)
        return torch.quantize_per_channel(F.pad(weight, (0, 2)), scales, points, axis=0, dtype=torch.qint8)


def spread_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row to -1..1 and put both ends behind it, so that every row of every call is rounded alike.

    torch rounds activations by the smallest and largest of the whole call; the ends fix these.

    Returns:
        The rows [rows, in + 2], and what their products are to be multiplied by [rows, 1].
    """
    scale = x.abs().amax(-1, True).clamp_min_(1e-30)
    return torch.cat([x, scale, -scale], 1).div_(scale), scale


@lru_cache(maxsize=1)
def int8_overflows() -> bool:
    """Whether sums of two full int8 products overflow here (no VNNI); activations then have seven bits."""
    weight = torch.ones(4, 62)
    packed = Linear(weight, None, Storage.INT8).packed
    x = torch.ones(1, 64)
    x[0, -1] = -1.0
    found = torch.ops.quantized.linear_dynamic.default(x, packed, False)
    return bool((found - weight.sum(dim=1)).abs().max() > 1.0)


def packing_available(storage: Storage = Storage.FP16) -> bool:
    """Whether this torch build has a packed linear of that storage for this processor."""
    if storage is Storage.BF16 and not multiplies_bf16():
        return False
    if storage is not Storage.BF16 and "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        probe = Linear(torch.ones(4, 4), None, storage)
        return bool((probe(torch.ones(4, 4)) - 4.0).abs().max() < 0.1)
    except (RuntimeError, NotImplementedError):
        return False


def multiplies_bf16() -> bool:
    """Whether the processor has products of bf16 numbers, which alone make packing them worth while."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@lru_cache(maxsize=1)
def row_multiple() -> int:
    """To what number of rows packed fp16 products must be padded, so that a row's bits do not depend on it.

    The smallest that this processor's kernels bear out at every number of rows tried: 1 with AVX-512, 3 with
    AVX2, whose kernels for one and for two rows add up in another order than those for three to six: 32 or 44
    rows, though multiples of 4, end with the kernel for two.
    """
    generator = torch.Generator().manual_seed(0)
    # both sizes are no multiple of the kernels' blocks, and a row is longer than one block of a sum
    matrix = Linear(torch.randn(40, 530, generator=generator).half(), None, Storage.FP16)
    x = torch.randn(PROBE_ROWS, 530, generator=generator)
    for multiple in ROW_MULTIPLES:
        counts = range(multiple, PROBE_ROWS + 1, multiple)
        alone = torch.cat([matrix(x[end - multiple : end]) for end in counts])
        if all(torch.equal(matrix(x[:rows]), alone[:rows]) for rows in counts):
            return multiple
    logger.warning(
        "packed fp16 products depend on the number of rows on this processor, and no padding was found that "
        "mends it: near ties may be decided otherwise with drafts than without; --weights plain avoids it"
    )
    return ROW_MULTIPLE


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
