"""Attention over eight-bit keys and values: as accurate as plain torch over what the codes stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention import SequenceAttention
from specdec.kernels import paged_attention
from specdec.kernels.device_batch import device_batch
from specdec.kernels.kv_quant import dequantise_rows, quantise_rows
from specdec.kernels.tree_attention import tree_attention

TREE = (-1, 0, 0, 1, 1, 2, 5)


def quantised(case: Any, kind: str) -> tuple[Any, dict[str, Tensor], Any]:
    """The case over codes with NaN scales on nobody's rows, its scales, and the case over what codes mean."""
    keys, key_scales = quantise_rows(case.keys, kind)
    values, value_scales = quantise_rows(case.values, kind)
    nobody = case.keys.isnan().all(-1)
    key_scales[nobody] = value_scales[nobody] = float("nan")
    meant = replace(
        case,
        keys=dequantise_rows(keys, key_scales).to(case.keys.dtype),
        values=dequantise_rows(values, value_scales).to(case.keys.dtype),
    )
    return (
        replace(case, keys=keys, values=values),
        {"key_scales": key_scales, "value_scales": value_scales},
        meant,
    )


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("dim", "num_splits", "window"), [(24, 1, None), (64, 3, None), (80, 2, 6)])
def test_codes_are_attended_like_what_they_stand_for(
    make_case: Callable[..., Any],
    dense_attention: Callable[..., Tensor],
    assert_as_accurate: Callable[..., None],
    device: str,
    dtype: torch.dtype,
    kind: str,
    dim: int,
    num_splits: int,
    window: int | None,
) -> None:
    case = make_case([(3, 20), (17, 1), (31, TREE)], dim=dim, dtype=dtype, device=device, kv_heads=1)
    codes, scales, meant = quantised(case, kind)
    output = tree_attention(
        codes.query, codes.keys, codes.values, codes.batch, num_splits=num_splits, window=window, **scales
    )
    plain = paged_attention(
        meant.query.cpu(), meant.keys.cpu(), meant.values.cpu(), meant.host, window=window
    )
    assert_as_accurate(output.cpu(), plain, dense_attention(meant, window))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_small_scales_do_not_fade_in_half_precision(
    make_case: Callable[..., Any], dense_attention: Callable[..., Tensor], device: str, kind: str
) -> None:
    """Values of 1e-3 have scales near 1e-5, whose products with small weights float16 cannot hold."""
    case = make_case([(40, 1)], dtype=torch.float16, device=device)
    case.values.mul_(1e-3)
    codes, scales, meant = quantised(case, kind)
    output = tree_attention(codes.query, codes.keys, codes.values, codes.batch, **scales).cpu()
    exact = dense_attention(replace(meant, values=dequantise_rows(codes.values, scales["value_scales"])))
    assert (output - exact).abs().max() < 2 * torch.finfo(torch.float16).eps * exact.abs().max()


def test_all_codes_of_e4m3_are_decoded(device: str) -> None:
    """Subnormal numbers and both signs: each code in turn is the one value a query sees."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    count = codes.numel()
    values = torch.zeros(1, 256, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values.view(torch.uint8).view(-1)[:count] = codes.view(torch.uint8)
    host = [
        SequenceAttention(
            query_start=0,
            num_queries=16,
            context_len=0,
            num_new=16,
            slots=slice(0, 16),
            mask=torch.eye(16, dtype=torch.bool),
            query_positions=list(range(16)),
            new_positions=list(range(16)),
        )
    ]
    ones = torch.ones(1, 256, device=device)
    query = torch.zeros(16, 1, 16, dtype=torch.float16, device=device)
    batch = device_batch(host, block_size=16, device=device)
    output = tree_attention(
        query, values.to(device), values.to(device), batch, key_scales=ones, value_scales=ones
    )
    assert torch.equal(output.cpu().flatten()[:count], codes.to(torch.float16))
