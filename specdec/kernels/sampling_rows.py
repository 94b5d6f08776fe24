"""From logits to laws and choices as Triton kernels, many rows with their own parameters at once.

Owns the launches; signatures and meaning are those of `reference_sampling_rows`. A first launch takes a tile
of a row per program: its peak and the sum of its weights. A second one takes a row per program and, where a
row asks for top-k or top-p, searches the border (`row_search`). Masses are float64, which costs a data-centre
card little; a card with few float64 units pays.

Letters: V vocabulary, S tiles of a row, SP the power of two at or above S.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.row_search import find_border, kept_mass
from specdec.kernels.row_weights import (
    MIN_KEY,
    NO_ID,
    TILE,
    WARPS,
    first_best,
    load_logits,
    tile_of,
    weight_of,
)
from specdec.kernels.tree_records import RowLaws, RowParams
from specdec.sampling_params import GREEDY_TEMPERATURE

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
# ids of one step of the search, and parts an interval is cut into: 48 counters for each of 256 threads
SEARCH_TILE = 512
WAYS = 8


@triton.jit
def _tiles_kernel(
    logit_ptr,
    temperature_ptr,
    peak_ptr,
    best_ptr,
    sum_ptr,
    stride,
    V,
    S,
    WITH_SUM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Peak (NaN if there is one), its lowest id, and the sum of weights relative to it."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    logits = load_logits(logit_ptr, row, stride, ids, V)
    is_nan = logits != logits
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    logits = tl.where(is_nan, float("-inf"), logits)
    peak, best = first_best(logits, ids)
    tl.store(peak_ptr + row * S + tile, tl.where(has_nan, float("nan"), peak))
    tl.store(best_ptr + row * S + tile, best)
    if WITH_SUM:
        temperature = tl.load(temperature_ptr + row)
        temperature = tl.where(temperature <= _GREEDY, 1.0, temperature)
        # a tile of -inf or with +inf has no weights that mean anything
        base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak).to(tl.float64)
        weights = tl.where(logits == float("inf"), 0.0, weight_of(logits, base, temperature))
        tl.store(sum_ptr + row * S + tile, tl.sum(weights, 0))


@triton.jit
def _row_peak(peak_ptr, best_ptr, row, S, SP: tl.constexpr):
    tiles = tl.arange(0, SP)
    peaks = tl.load(peak_ptr + row * S + tiles, mask=tiles < S, other=float("-inf"))
    ids = tl.load(best_ptr + row * S + tiles, mask=tiles < S, other=NO_ID)
    is_nan = peaks != peaks
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    peak, best = first_best(tl.where(is_nan, float("-inf"), peaks), ids)
    bad = has_nan | (tl.abs(peak) == float("inf"))
    return peak, best, bad


@triton.jit
def _greedy_kernel(peak_ptr, best_ptr, token_ptr, bad_ptr, S, SP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, best, bad = _row_peak(peak_ptr, best_ptr, row, S, SP)
    tl.store(token_ptr + row, tl.where(bad, 0, best).to(tl.int64))
    tl.store(bad_ptr + row, bad.to(tl.int1))


@triton.jit
def _laws_kernel(
    logit_ptr,
    peak_ptr,
    best_ptr,
    sum_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    number_ptr,
    place_ptr,
    stride,
    V,
    S,
    SP: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WAYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, best, bad = _row_peak(peak_ptr, best_ptr, row, S, SP)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature <= _GREEDY
    temperature = tl.where(greedy, 1.0, temperature)
    sure = bad | greedy
    key = tl.full([], MIN_KEY, tl.int32)
    last = key * 0 + V
    mass = tl.full([], 1.0, tl.float64)
    if sure == 0:
        tiles = tl.arange(0, SP)
        peaks = tl.load(peak_ptr + row * S + tiles, mask=tiles < S, other=float("-inf"))
        sums = tl.load(sum_ptr + row * S + tiles, mask=tiles < S, other=0.0)
        mass = tl.sum(sums * weight_of(peaks, peak.to(tl.float64), temperature), 0)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)
        if (top_k > 0) & (top_k < V):
            wanted = top_k.to(tl.float64)
            key, last = find_border(
                logit_ptr,
                peak_ptr,
                row,
                stride,
                V,
                S,
                wanted,
                peak,
                temperature,
                key,
                last,
                False,
                TILE,
                STEP,
                WAYS,
            )
            mass = kept_mass(
                logit_ptr, peak_ptr, row, stride, V, S, peak, temperature, 0.0, key, last, TILE, STEP
            )
        if top_p < 1.0:
            wanted = mass * top_p
            key, last = find_border(
                logit_ptr,
                peak_ptr,
                row,
                stride,
                V,
                S,
                wanted,
                peak,
                temperature,
                key,
                last,
                True,
                TILE,
                STEP,
                WAYS,
            )
        if (top_p < 1.0) | (min_p > 0.0):
            mass = kept_mass(
                logit_ptr, peak_ptr, row, stride, V, S, peak, temperature, min_p, key, last, TILE, STEP
            )
    numbers = number_ptr + row * 4
    tl.store(numbers, tl.where(bad, 0.0, peak).to(tl.float64))
    tl.store(numbers + 1, temperature)
    tl.store(numbers + 2, tl.load(min_p_ptr + row))
    tl.store(numbers + 3, mass)
    places = place_ptr + row * 4
    tl.store(places, key)
    tl.store(places + 1, last)
    tl.store(places + 2, tl.where(bad, 0, tl.where(greedy, best, -1)))
    tl.store(places + 3, bad.to(tl.int32))


def _tiles(logits: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Peak, its id and sum of weights of each tile `[rows, tiles]`, and the ids of a tile."""
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    rows, vocab = logits.shape
    tile = tile_of(vocab)
    shape, device = (rows, triton.cdiv(vocab, tile)), logits.device
    peaks = torch.empty(shape, dtype=torch.float32, device=device)
    best = torch.empty(shape, dtype=torch.int32, device=device)
    sums = torch.empty(shape if temperature is not None else (0,), dtype=torch.float64, device=device)
    if rows:
        _tiles_kernel[shape](
            logits,
            temperature,
            peaks,
            best,
            sums,
            logits.stride(0),
            vocab,
            shape[1],
            WITH_SUM=temperature is not None,
            TILE=tile,
            num_warps=WARPS,
        )
    return peaks, best, sums, tile


def greedy_choices(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference_sampling_rows.greedy_choices`."""
    peaks, best, _, _ = _tiles(logits, None)
    rows, tiles = peaks.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        _greedy_kernel[(rows,)](peaks, best, tokens, bad, tiles, SP=triton.next_power_of_2(tiles))
    return tokens, bad


def row_laws(logits: Tensor, params: RowParams) -> RowLaws:
    """See `reference_sampling_rows.row_laws`."""
    peaks, best, sums, tile = _tiles(logits, params.temperature)
    rows, tiles = peaks.shape

    laws = RowLaws(
        numbers=torch.empty((rows, 4), dtype=torch.float64, device=logits.device),
        places=torch.empty((rows, 4), dtype=torch.int32, device=logits.device),
    )
    if rows:
        _laws_kernel[(rows,)](
            logits,
            peaks,
            best,
            sums,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            laws.numbers,
            laws.places,
            logits.stride(0),
            logits.shape[1],
            tiles,
            SP=triton.next_power_of_2(tiles),
            TILE=tile,
            STEP=min(SEARCH_TILE, tile),
            WAYS=WAYS,
            num_warps=WARPS,
        )
    return laws


def compile_cases() -> list[CompileCase]:
    """Laws and greedy choices of a vocabulary of 152k."""
    numbers = {"stride": "i32", "V": "i32", "S": "i32"}
    tiles = {"peak_ptr": "*fp32", "best_ptr": "*i32"}
    params = {"temperature_ptr": "*fp64", "top_k_ptr": "*i32", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64"}
    out = {"number_ptr": "*fp64", "place_ptr": "*i32"}
    cases = [
        CompileCase(
            name="sampling_rows/greedy",
            kernel=_greedy_kernel,
            signature={**tiles, "token_ptr": "*i64", "bad_ptr": "*i1", "S": "i32"},
            constants={"SP": 128},
        )
    ]
    for name, dtype in (("greedy", "bf16"), ("laws", "bf16"), ("laws", "fp32")):
        pointers = {**tiles, "logit_ptr": f"*{dtype}", "temperature_ptr": "*fp64", "sum_ptr": "*fp64"}
        cases.append(
            CompileCase(
                name=f"sampling_rows/tiles-{name}-{dtype}",
                kernel=_tiles_kernel,
                signature=pointers | numbers,
                constants={"WITH_SUM": name == "laws", "TILE": TILE},
                aligned=("logit_ptr", "stride", "V"),
                num_warps=WARPS,
            )
        )
    cases.append(
        CompileCase(
            name="sampling_rows/laws",
            kernel=_laws_kernel,
            signature={"logit_ptr": "*bf16", "sum_ptr": "*fp64"} | tiles | params | out | numbers,
            constants={"SP": 128, "TILE": TILE, "STEP": SEARCH_TILE, "WAYS": WAYS},
            aligned=("logit_ptr", "stride", "V"),
            num_warps=WARPS,
        )
    )
    return cases
