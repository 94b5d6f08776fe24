"""RMS norm, residual sum with RMS norm, and the gated activation as Triton kernels.

Owns the kernels and their launch; signatures and meaning are those of `reference_norms`. A row is one
program and is summed in the same order whatever else is in the batch, so a row's bits do not depend on its
neighbours. Knows nothing of models.

Letters: H hidden size, N inner size, BLOCK the power of two at or above H (or the tile of N).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase

# a row is one program's registers: 32 elements for each of 1024 threads; no supported model is half as wide
MAX_HIDDEN = 32768
# elements of one program of the activation: eight for each of 128 threads
ACTIVATION_TILE = 1024


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, out_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + row * out_stride + columns, x * scale * weight, mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    update_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    update_stride,
    residual_stride,
    out_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    update = tl.load(update_ptr + row * update_stride + columns, mask=inside, other=0.0).to(tl.float32)
    place = residual_ptr + row * residual_stride + columns
    residual = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    # rounded first: the norm is of the sum that the next layer reads
    rounded = (residual + update).to(residual_ptr.dtype.element_ty)
    tl.store(place, rounded, mask=inside)
    total = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / H + eps)
    tl.store(out_ptr + row * out_stride + columns, total * scale * weight, mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, in_stride, out_stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    start = gate_up_ptr + row * in_stride
    gate = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + N + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


def _warps(block: int) -> int:
    # eight elements a thread, 4 to 32 warps
    return min(32, max(4, block // 256))


def _check(x: Tensor, weight: Tensor | None = None) -> None:
    assert x.dim() == 2, "rows of one vector each"
    assert x.stride(1) == 1, "a row's elements lie side by side"
    assert weight is None or weight.is_contiguous(), "the weight is one vector"
    assert weight is None or x.shape[1] <= MAX_HIDDEN, "a row must fit one program"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference_norms.rms_norm`."""
    _check(x, weight)
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    if rows:
        _rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), out.stride(0), eps, H=hidden, BLOCK=block, num_warps=_warps(block)
        )
    return out


def add_rms_norm(update: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference_norms.add_rms_norm`."""
    _check(update, weight)
    _check(residual)
    assert update.shape == residual.shape, "the update is added to the residual stream row by row"
    rows, hidden = update.shape
    out = torch.empty((rows, hidden), dtype=residual.dtype, device=update.device)
    block = triton.next_power_of_2(hidden)
    if rows:
        _add_rms_norm_kernel[(rows,)](
            update,
            residual,
            weight,
            out,
            update.stride(0),
            residual.stride(0),
            out.stride(0),
            eps,
            H=hidden,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference_norms.silu_mul`."""
    _check(gate_up)
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(inner, ACTIVATION_TILE))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), out.stride(0), inner, BLOCK=ACTIVATION_TILE)
    return out


def compile_cases() -> list[CompileCase]:
    """A Llama-3.1-8B row and one of SmolLM2, and the widest."""
    cases = []
    for name, hidden, dtype in (("8b-bf16", 4096, "*bf16"), ("smollm2-fp32", 576, "*fp32")):
        block = triton.next_power_of_2(hidden)
        shared: dict[str, Any] = {
            "constants": {"H": hidden, "BLOCK": block},
            "num_warps": _warps(block),
        }
        strides = {"x_stride": "i32", "out_stride": "i32", "eps": "fp32"}
        cases.append(
            CompileCase(
                name=f"norms/rms_norm-{name}",
                kernel=_rms_norm_kernel,
                signature={"x_ptr": dtype, "weight_ptr": dtype, "out_ptr": dtype, **strides},
                aligned=("x_ptr", "weight_ptr", "out_ptr", "x_stride", "out_stride"),
                **shared,
            )
        )
        pointers = ("update_ptr", "residual_ptr", "weight_ptr", "out_ptr")
        added = ("update_stride", "residual_stride", "out_stride")
        cases.append(
            CompileCase(
                name=f"norms/add_rms_norm-{name}",
                kernel=_add_rms_norm_kernel,
                signature=dict.fromkeys(pointers, dtype) | dict.fromkeys(added, "i32") | {"eps": "fp32"},
                aligned=(*pointers, *added),
                **shared,
            )
        )
    cases.append(
        CompileCase(
            name="norms/silu_mul-bf16",
            kernel=_silu_mul_kernel,
            signature={
                "gate_up_ptr": "*bf16",
                "out_ptr": "*bf16",
                "in_stride": "i32",
                "out_stride": "i32",
                "N": "i32",
            },
            constants={"BLOCK": ACTIVATION_TILE},
            aligned=("gate_up_ptr", "out_ptr", "in_stride", "out_stride", "N"),
        )
    )
    return cases
