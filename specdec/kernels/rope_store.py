"""Rotary embedding and the store into the paged KV cache as one Triton kernel.

Owns the kernel and its launch; signature and meaning are those of `reference_rope_store`. A program takes one
row and a few of its heads, be they queries, keys or values: the tables are read once, and nothing rotated or
normed goes through memory between. A row is computed alike whatever its neighbours. Knows nothing of models.

Letters: T rows, H query heads, K KV heads, D head_dim; HALF = D / 2, TILE heads a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.kv_quant import KV_CODE_DTYPES

# at head_dim 128 eight values for each of 128 threads; plain decoding of 48 heads is then six programs a row
HEADS_PER_PROGRAM = 8
PLAIN, INT8, FP8 = (tl.constexpr(kind) for kind in range(3))


@triton.jit
def _e4m3_code(x):
    """Bits of the fp8 (e4m3) number nearest to x, |x| <= 448, ties to even; any card can do this."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # keep three of 23 mantissa bits; a carry runs into the exponent as it should; bias 127 becomes 7
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below the smallest normal number 2^-6 codes count steps of 2^-9
    small = _rounded(tl.abs(x) * 512.0).to(tl.int32)
    code = tl.where(tl.abs(x) < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _rounded(x):
    """Nearest whole number, ties to even, |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _codes(first, second, inside, KIND: tl.constexpr):
    """Codes of both halves [TILE, HALF] and the scale of every row [TILE]; see `kv_quant.quantise_rows`."""
    limit: tl.constexpr = 127.0 if KIND == INT8 else 448.0
    both = tl.maximum(tl.abs(first), tl.abs(second))
    largest = tl.max(tl.where(inside, both, 0.0), 1)
    # correctly rounded, as torch divides: a code must not depend on where it was made
    scale = tl.where(largest > 0, tl.math.div_rn(largest, limit + tl.zeros_like(largest)), 1.0)
    over = scale[:, None] + tl.zeros_like(first)
    first = tl.minimum(tl.maximum(tl.math.div_rn(first, over), -limit), limit)
    second = tl.minimum(tl.maximum(tl.math.div_rn(second, over), -limit), limit)
    if KIND == INT8:
        first_code = _rounded(first).to(tl.int8)
        second_code = _rounded(second).to(tl.int8)
    else:
        first_code = _e4m3_code(first)
        second_code = _e4m3_code(second)
    return first_code, second_code, scale


@triton.jit
def _rope_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    qkv_row_stride,
    qkv_head_stride,
    table_stride,
    key_head_stride,
    key_slot_stride,
    value_head_stride,
    value_slot_stride,
    scale_head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORMED: tl.constexpr,
    KIND: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HALF
    is_query = heads < H
    is_key = (heads >= H) & (heads < H + K)
    is_value = (heads >= H + K) & (heads < H + 2 * K)
    inside = (heads < H + 2 * K)[:, None] & in_half[None, :]

    source = qkv_ptr + row * qkv_row_stride + heads[:, None] * qkv_head_stride + dims[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    value_first, value_second = first, second
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        q_first = tl.load(q_norm_ptr + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm_ptr + HALF + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm_ptr + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm_ptr + HALF + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        first = first * scale * tl.where(is_query[:, None], q_first, k_first)
        second = second * scale * tl.where(is_query[:, None], q_second, k_second)

    # both halves of a table row are equal, so one is read
    angle = tl.load(positions_ptr + row).to(tl.int64) * table_stride + dims
    cos = tl.load(cos_ptr + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin

    query = query_ptr + row * (H * D) + heads[:, None] * D + dims[None, :]
    tl.store(query, turned_first, mask=inside & is_query[:, None])
    tl.store(query + HALF, turned_second, mask=inside & is_query[:, None])

    slot = tl.load(slots_ptr + row)
    stored_first = tl.where(is_value[:, None], value_first, turned_first)
    stored_second = tl.where(is_value[:, None], value_second, turned_second)
    # one comparison a head: the interpreter cannot spread a scalar condition over a mask
    has_slot = tl.zeros([TILE], tl.int64) + slot >= 0
    writes_key = is_key & has_slot
    writes_value = is_value & has_slot
    key_head = (heads - H).to(tl.int64)
    value_head = (heads - H - K).to(tl.int64)
    key = key_ptr + key_head[:, None] * key_head_stride + slot * key_slot_stride + dims[None, :]
    value = value_ptr + value_head[:, None] * value_head_stride + slot * value_slot_stride + dims[None, :]
    if KIND != PLAIN:
        stored_first, stored_second, row_scale = _codes(stored_first, stored_second, inside, KIND)
        tl.store(key_scale_ptr + key_head * scale_head_stride + slot, row_scale, mask=writes_key)
        tl.store(value_scale_ptr + value_head * scale_head_stride + slot, row_scale, mask=writes_value)
    tl.store(key, stored_first, mask=inside & writes_key[:, None])
    tl.store(key + HALF, stored_second, mask=inside & writes_key[:, None])
    tl.store(value, stored_first, mask=inside & writes_value[:, None])
    tl.store(value + HALF, stored_second, mask=inside & writes_value[:, None])


def rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """See `reference_rope_store.rope_store`."""
    rows, heads, dim = qkv.shape
    kv_heads = key_cache.shape[0]
    assert heads == num_heads + 2 * kv_heads, "a fused projection holds queries, keys and values"
    assert dim % 2 == 0, "a head has two halves to rotate"
    assert qkv.stride(2) == key_cache.stride(2) == value_cache.stride(2) == 1, "a head is one piece of memory"
    assert cos.stride() == sin.stride(), "the tables are twins"
    assert cos.stride(1) == 1, "a table's row is one piece of memory"
    assert slots.shape[0] == positions.shape[0] == rows, "every row has a position and a slot, maybe -1"
    assert (q_norm is None) == (k_norm is None), "queries and keys are normed together"
    kind = 0
    if key_scales is not None and value_scales is not None:
        kind = 1 if key_cache.dtype == KV_CODE_DTYPES["int8"] else 2
        assert key_scales.stride() == value_scales.stride(), "the scales are twins"
        assert key_scales.stride(1) == 1, "a head's scales lie side by side"
    if kind == 2:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    query = torch.empty((rows, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if rows:
        _rope_store_kernel[(rows, triton.cdiv(heads, HEADS_PER_PROGRAM))](
            qkv,
            cos,
            sin,
            positions,
            query,
            key_cache,
            value_cache,
            key_scales,
            value_scales,
            slots,
            q_norm,
            k_norm,
            eps,
            qkv.stride(0),
            qkv.stride(1),
            cos.stride(0),
            key_cache.stride(0),
            key_cache.stride(1),
            value_cache.stride(0),
            value_cache.stride(1),
            key_scales.stride(0) if key_scales is not None else 0,
            H=num_heads,
            K=kv_heads,
            D=dim,
            TILE=HEADS_PER_PROGRAM,
            BLOCK_HALF=triton.next_power_of_2(dim // 2),
            NORMED=q_norm is not None,
            KIND=kind,
        )
    return query


def compile_cases() -> list[CompileCase]:
    """Llama-3.1-8B plain and in int8, Qwen3 (normed) in fp8, fp32 with a head that is no power of two."""
    return [
        _case("8b-bf16", "*bf16", "*bf16", heads=32, kv_heads=8, dim=128, normed=False, kind=0),
        _case("8b-int8", "*bf16", "*i8", heads=32, kv_heads=8, dim=128, normed=False, kind=1),
        _case("qwen3-fp8", "*bf16", "*u8", heads=32, kv_heads=8, dim=128, normed=True, kind=2),
        _case("odd-fp32", "*fp32", "*fp32", heads=9, kv_heads=3, dim=80, normed=True, kind=0),
    ]


def _case(
    name: str, dtype: str, cache: str, *, heads: int, kv_heads: int, dim: int, normed: bool, kind: int
) -> CompileCase:
    pointers = {"qkv_ptr": dtype, "query_ptr": dtype, "key_ptr": cache, "value_ptr": cache}
    pointers |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i32", "slots_ptr": "*i64"}
    constants = {
        "H": heads,
        "K": kv_heads,
        "D": dim,
        "TILE": HEADS_PER_PROGRAM,
        "BLOCK_HALF": triton.next_power_of_2(dim // 2),
        "NORMED": normed,
        "KIND": kind,
    }
    norms, scales = ("q_norm_ptr", "k_norm_ptr"), ("key_scale_ptr", "value_scale_ptr")
    pointers |= dict.fromkeys(norms, dtype) if normed else {}
    pointers |= dict.fromkeys(scales, "*fp32") if kind else {}
    constants |= {} if normed else dict.fromkeys(norms, None)
    constants |= {} if kind else dict.fromkeys(scales, None)
    strides = ["qkv_row_stride", "qkv_head_stride", "table_stride", "key_head_stride", "key_slot_stride"]
    strides += ["value_head_stride", "value_slot_stride", "scale_head_stride"]
    signature = pointers | dict.fromkeys(strides, "i32") | {"eps": "fp32"}
    return CompileCase(
        name=f"rope_store/{name}",
        kernel=_rope_store_kernel,
        signature=signature,
        constants=constants,
        aligned=(*pointers, *strides),
    )
