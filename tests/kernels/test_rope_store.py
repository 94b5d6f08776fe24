"""Rotating and storing in one kernel: against plain torch and fp64, and what it must not touch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.config import RopeConfig
from specdec.kernels import reference_rope_store, rope_store
from specdec.kernels.kv_quant import KV_CODE_DTYPES, dequantise_rows, quantise_rows
from specdec.models.layers import rms_norm
from specdec.models.rope import RotaryEmbedding, apply_rope
from specdec.paged_kv import PagedKVCache

GUARD = 1e4
MAX_POSITIONS = 64
# query heads, KV heads, head_dim: grouped, one KV head, as many as query heads, more than one program a row
SHAPES = [(4, 2, 24), (6, 1, 64), (3, 3, 80), (14, 2, 16)]


@dataclass
class Case:
    qkv: Tensor
    tables: tuple[Tensor, Tensor]
    positions: Tensor
    slots: Tensor
    cache: PagedKVCache
    num_heads: int
    norms: dict[str, Tensor | float]

    def run(self, module, **more) -> Tensor:
        key_cache, value_cache = self.cache.layer(1)
        cos, sin = self.tables
        return module.rope_store(
            self.qkv,
            cos,
            sin,
            self.positions,
            key_cache,
            value_cache,
            self.slots,
            num_heads=self.num_heads,
            **self.norms,
            **more,
        )


def _case(shape: tuple[int, int, int], rows: int, dtype: torch.dtype, device: str, normed: bool) -> Case:
    """Rows in scattered slots of the middle layer of three, every third row stored nowhere."""
    heads, kv_heads, dim = shape
    cache = PagedKVCache(
        num_layers=3,
        num_blocks=4,
        block_size=16,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype=dtype,
        device=device,
    )
    cache.data.fill_(GUARD)
    rope = RotaryEmbedding(
        RopeConfig(rope_type="default", theta=100.0, head_dim=dim, max_position_embeddings=MAX_POSITIONS)
    )
    cos, sin = rope.cos_sin(torch.arange(MAX_POSITIONS), MAX_POSITIONS)
    slots = torch.randperm(cache.num_blocks * cache.block_size)[:rows]
    slots[2::3] = -1
    wide = torch.randn(rows, heads + 2 * kv_heads, dim + 2)
    norms: dict[str, Tensor | float] = {}
    if normed:
        norms = {name: (1 + 0.3 * torch.randn(dim)).to(device, dtype) for name in ("q_norm", "k_norm")}
        norms["eps"] = 1e-5
    return Case(
        qkv=wide.to(device, dtype)[..., :dim],
        tables=(cos.to(device), sin.to(device)),
        positions=torch.randint(MAX_POSITIONS, (rows,), dtype=torch.int32).to(device),
        slots=slots.to(device),
        cache=cache,
        num_heads=heads,
        norms=norms,
    )


def _exact(case: Case) -> tuple[Tensor, Tensor]:
    """Query and the layer's keys and values in fp64."""
    wide = Case(
        case.qkv.double(),
        (case.tables[0].double(), case.tables[1].double()),
        case.positions,
        case.slots,
        PagedKVCache(
            num_layers=3,
            num_blocks=4,
            block_size=16,
            num_kv_heads=case.cache.data.shape[2],
            head_dim=case.cache.data.shape[4],
            dtype=torch.float64,
            device=case.cache.data.device,
        ),
        case.num_heads,
        {name: value.double() if isinstance(value, Tensor) else value for name, value in case.norms.items()},
    )
    wide.cache.data.fill_(GUARD)
    return wide.run(reference_rope_store), wide.cache.data[1]


def _plain(case: Case) -> tuple[Tensor, Tensor]:
    """The decoder's own path in the case's dtype: norm, rotation and store one after the other."""
    heads, kv_heads = case.num_heads, case.cache.data.shape[2]
    query, key, value = case.qkv.split((heads, kv_heads, kv_heads), dim=1)
    if case.norms:
        query = rms_norm(query, case.norms["q_norm"], case.norms["eps"])
        key = rms_norm(key, case.norms["k_norm"], case.norms["eps"])
    cos, sin = (table[case.positions].to(case.qkv.dtype) for table in case.tables)
    stored = torch.full_like(case.cache.data[1], GUARD)
    kept = case.slots >= 0
    stored[0][:, case.slots[kept]] = apply_rope(key, cos, sin)[kept].transpose(0, 1)
    stored[1][:, case.slots[kept]] = value[kept].transpose(0, 1)
    return apply_rope(query, cos, sin), stored


def _check(case: Case, check) -> None:
    exact_query, exact_stored = _exact(case)
    plain_query, plain_stored = _plain(case)
    query = case.run(rope_store)
    check(query, plain_query, exact_query)
    written = torch.zeros(case.cache.data.shape[3], dtype=torch.bool, device=query.device)
    written[case.slots[case.slots >= 0]] = True
    data = case.cache.data
    check(data[1, 0][:, written], plain_stored[0][:, written], exact_stored[0][:, written])
    assert torch.equal(data[1, 1], plain_stored[1]), "values are stored as they are"
    assert bool((data[1][:, :, ~written] == GUARD).all()), "a slot nobody named was written"
    assert bool((data[0] == GUARD).all()), "another layer was written"
    assert bool((data[2] == GUARD).all()), "another layer was written"


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("shape", "rows"), zip(SHAPES, (7, 1, 4, 5), strict=True), ids=str)
def test_rotation_and_store_are_as_accurate_as_plain_torch(
    shape: tuple[int, int, int], rows: int, normed: bool, dtype: torch.dtype, device: str, assert_as_accurate
) -> None:
    _check(_case(shape, rows, dtype, device, normed), assert_as_accurate)


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", [*SHAPES, (32, 8, 128), (8, 2, 256)], ids=str)
def test_rotation_and_store_are_as_accurate_in_bfloat16(shape, normed: bool, assert_as_accurate) -> None:
    _check(_case(shape, 33, torch.bfloat16, "cuda", normed), assert_as_accurate)


def test_reference_equals_the_decoders_own_path_in_fp32(device: str) -> None:
    """Catches a reference that is exact about the wrong thing: halves swapped, the other sign."""
    case = _case((4, 2, 24), 6, torch.float32, device, normed=True)
    query = case.run(reference_rope_store)
    plain_query, plain_stored = _plain(case)
    torch.testing.assert_close(query, plain_query)
    torch.testing.assert_close(case.cache.data[1], plain_stored)


@pytest.mark.parametrize("module", [rope_store, reference_rope_store], ids=["triton", "reference"])
def test_slot_minus_one_writes_nothing_and_padding_leaves_the_pool_alone(module, device: str) -> None:
    """Catches an index that wraps to the last slot of the pool."""
    case = _case((4, 2, 24), 4, torch.float32, device, normed=False)
    case.slots[:] = torch.tensor([3, 17, 40, -1])
    case.run(module)
    touched = (case.cache.data != GUARD).any(-1).nonzero()
    assert sorted(set(touched[:, 3].tolist())) == [3, 17, 40]
    case.cache.data.fill_(GUARD)
    case.slots.fill_(-1)
    query = case.run(module)
    assert bool((case.cache.data == GUARD).all())
    assert bool(query.isfinite().all()), "queries of rows that are not stored are rotated all the same"


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("module", [rope_store, reference_rope_store], ids=["triton", "reference"])
def test_eight_bit_rows_are_the_codes_of_the_exact_rows(module, kind: str, device: str) -> None:
    case = _case((4, 2, 24), 6, torch.float32, device, normed=True)
    exact_query, exact_stored = _exact(case)
    case.cache.data = torch.zeros_like(case.cache.data, dtype=KV_CODE_DTYPES[kind])
    case.cache.data.view(torch.uint8).fill_(3)
    scales = torch.full((2, 2, 64), GUARD, device=device)
    query = case.run(module, key_scales=scales[0], value_scales=scales[1])
    torch.testing.assert_close(query.double(), exact_query, rtol=1e-5, atol=1e-5)
    kept = case.slots[case.slots >= 0]
    stored = case.cache.data[1].view(torch.uint8)[:, :, kept].view(KV_CODE_DTYPES[kind])
    # values are not rotated: bit for bit the definition's codes and scales
    codes, row_scales = quantise_rows(exact_stored[1][:, kept].float(), kind)
    assert torch.equal(stored[1].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scales[1][:, kept], row_scales)
    # half a step of int8; of fp8 half of 2^-3 of the number, or half of the smallest step 2^-9
    step = scales[0][:, kept].unsqueeze(-1).double()
    exact = exact_stored[0][:, kept]
    allowed = step * 0.5 if kind == "int8" else torch.maximum(exact.abs() / 16, step * 2**-10)
    error = (dequantise_rows(stored[0], scales[0][:, kept]).double() - exact).abs()
    assert bool((error <= allowed * (1 + 1e-4)).all())
    untouched = torch.ones(64, dtype=torch.bool, device=device)
    untouched[kept] = False
    assert bool((case.cache.data.view(torch.uint8)[1][:, :, untouched] == 3).all())
    assert bool((scales[:, :, untouched] == GUARD).all())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bit_rounding_equals_torch_on_ties_denormals_and_zeros(kind: str, device: str) -> None:
    """The kernel makes fp8 bits by hand, as an A100 cannot: all codes, halves between, both signs."""
    case = _case((1, 1, 256), 6, torch.float32, device, normed=False)
    case.slots[:] = torch.arange(6)
    halfway = (torch.arange(256) - 128) / 2
    fine = torch.arange(256) * 2.0**-11
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.zeros(6, 256)
    values[0] = halfway
    values[1, :127], values[1, 127:254] = every, -every
    values[2, :126] = (every[:-1] + every[1:]) / 2
    values[3], values[4] = fine, torch.randn(256) * 100
    # the largest value fixes the scale at 1, except in the rows of noise and of zeros
    values[:4, 255] = 127.0 if kind == "int8" else 448.0
    values[:4].clamp_(-float(values[0, 255]), float(values[0, 255]))
    case.qkv[:, 2] = values.to(device)
    case.cache.data = torch.zeros_like(case.cache.data, dtype=KV_CODE_DTYPES[kind])
    scales = torch.zeros(2, 1, 64, device=device)
    case.run(rope_store, key_scales=scales[0], value_scales=scales[1])
    codes, row_scales = quantise_rows(values, kind)
    assert torch.equal(scales[1][0, :6].cpu(), row_scales)
    stored = case.cache.data[1, 1, 0, :6].cpu().float()
    # as numbers: torch gives -0 codes for tiny negative values too, but a sign of zero means nothing
    assert torch.equal(stored, codes.float())
