"""Rotating queries and keys and storing keys and values in plain torch: what `rope_store` must equal.

The definition, also of the kernel: a projected row is widened to fp32 (fp64 stays), normed if there are norm
weights, rotated, and rounded once; values are stored as they are. Eight-bit caches get the codes and scales
of `specdec.kernels.kv_quant`, made from the fp32 row before any rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.kv_quant import KV_CODE_DTYPES, quantise_rows


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
    """Rotate the queries and keys of a fused projection and store its keys and values.

    Args:
        qkv: [T, heads + 2 * kv_heads, head_dim], queries first, then keys, then values.
        cos: table [max_positions, head_dim] whose halves are equal, of `RotaryEmbedding`.
        sin: table of the same shape.
        positions: [T], rows of the tables.
        key_cache: [kv_heads, slots, head_dim], the projection's dtype or an eight-bit one.
        value_cache: of the same shape and dtype.
        slots: int64 [T], where a row's key and value go; -1 stores nothing.
        num_heads: query heads.
        q_norm: weight [head_dim] of an RMS norm of every query head; comes with `k_norm`.
        k_norm: the same for keys.
        eps: of both norms.
        key_scales: fp32 [kv_heads, slots], written beside an eight-bit cache.
        value_scales: the same for values.

    Returns:
        The rotated queries [T, heads, head_dim], of rows that are not stored too.
    """
    kv_heads = key_cache.shape[0]
    wide = qkv if qkv.dtype == torch.float64 else qkv.float()
    query, key, value = wide.split((num_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = _normed(query, q_norm, eps), _normed(key, k_norm, eps)
    angles = cos[positions].to(wide.dtype).unsqueeze(1), sin[positions].to(wide.dtype).unsqueeze(1)
    key = _rotated(key, *angles)
    kept = slots >= 0
    _store(key[kept], key_cache, key_scales, slots[kept])
    _store(value[kept], value_cache, value_scales, slots[kept])
    return _rotated(query, *angles).to(qkv.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _store(rows: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    if scales is not None:
        kind = next(kind for kind, dtype in KV_CODE_DTYPES.items() if dtype == cache.dtype)
        codes, row_scales = quantise_rows(rows, kind)
        scales[:, slots] = row_scales.transpose(0, 1)
        # an index into eight-bit floats is not implemented everywhere; their bytes are
        cache.view(torch.uint8)[:, slots] = codes.view(torch.uint8).transpose(0, 1)
    else:
        cache[:, slots] = rows.to(cache.dtype).transpose(0, 1)
