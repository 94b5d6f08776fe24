"""Races and written-out laws of rows as Triton kernels.

Owns the launches; signatures and meaning are those of `reference_sampling_rows`. The noise of a race belongs
to a position, so a program takes one tile of one depth of a tree, makes its noise once and runs the races of
all nodes at that depth; tiles without kept ids cost no noise. The law of a row is never written out for a
race.

Letters: V vocabulary, S tiles of a row, SP the power of two at or above S.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.row_weights import (
    NO_ID,
    TILE,
    WARPS,
    first_best,
    kept_weights,
    load_law,
    load_logits,
    tile_of,
)
from specdec.kernels.streams import RACE, as_exponential, as_seed, words_of_run
from specdec.kernels.tree_records import RowLaws, TreeRows


@triton.jit
def _race_kernel(
    logit_ptr,
    number_ptr,
    place_ptr,
    node_start_ptr,
    parent_ptr,
    seed_ptr,
    position_ptr,
    speed_ptr,
    winner_ptr,
    stride,
    V,
    S,
    TILE: tl.constexpr,
):
    """Fastest id of one tile for every node of one depth of one tree."""
    sequence = tl.program_id(0)
    depth = tl.program_id(1)
    tile = tl.program_id(2)
    first = tl.load(node_start_ptr + sequence)
    end = tl.load(node_start_ptr + sequence + 1)
    if first < end:
        position = tl.load(position_ptr + first).to(tl.int64) + depth
        start = tile * TILE
        ids = start + tl.arange(0, TILE)
        seed = as_seed(tl.load(seed_ptr + sequence))
        words = words_of_run(start // 4, position * 0, tl.full([], RACE, tl.int64), position, seed, TILE // 4)
        noise = as_exponential(words)
        for node in range(0, end - first):
            row = first.to(tl.int64) + node
            is_real = tl.load(parent_ptr + row) >= -1
            if is_real & (tl.load(position_ptr + row).to(tl.int64) == position):
                law = load_law(number_ptr, place_ptr, row)
                logits = load_logits(logit_ptr, row, stride, ids, V)
                speed, winner = first_best(kept_weights(logits, ids, law) / noise, ids)
                tl.store(speed_ptr + row * S + tile, speed)
                tl.store(winner_ptr + row * S + tile, winner)


@triton.jit
def _race_end_kernel(speed_ptr, winner_ptr, parent_ptr, token_ptr, S, SP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, SP)
    is_real = tl.load(parent_ptr + row) >= -1
    mask = tiles < tl.where(is_real, S, 0)
    speeds = tl.load(speed_ptr + row * S + tiles, mask=mask, other=-1.0)
    winners = tl.load(winner_ptr + row * S + tiles, mask=mask, other=NO_ID)
    _, winner = first_best(speeds, winners)
    tl.store(token_ptr + row, tl.where(is_real, winner, 0).to(tl.int64))


@triton.jit
def _probs_kernel(logit_ptr, number_ptr, place_ptr, out_ptr, stride, V, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    law = load_law(number_ptr, place_ptr, row)
    weights = kept_weights(load_logits(logit_ptr, row, stride, ids, V), ids, law)
    tl.store(out_ptr + row * V + ids, weights / law[3], mask=ids < V)


def race_winners(logits: Tensor, laws: RowLaws, tree: TreeRows, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `reference_sampling_rows.race_winners`."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    speeds = torch.empty((rows, tiles), dtype=torch.float64, device=logits.device)
    winners = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _race_kernel[(tree.batch, tree.max_depth + 1, tiles)](
            logits,
            laws.numbers,
            laws.places,
            tree.node_start,
            tree.parents,
            seeds,
            positions,
            speeds,
            winners,
            logits.stride(0),
            vocab,
            tiles,
            TILE=tile,
            num_warps=WARPS,
        )
        _race_end_kernel[(rows,)](
            speeds, winners, tree.parents, tokens, tiles, SP=triton.next_power_of_2(tiles)
        )
    return tokens


def row_probs(logits: Tensor, laws: RowLaws) -> Tensor:
    """See `reference_sampling_rows.row_probs`."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    out = torch.empty((rows, vocab), dtype=torch.float64, device=logits.device)
    tile = tile_of(vocab)
    if rows:
        _probs_kernel[(rows, triton.cdiv(vocab, tile))](
            logits, laws.numbers, laws.places, out, logits.stride(0), vocab, TILE=tile, num_warps=WARPS
        )
    return out


def compile_cases() -> list[CompileCase]:
    """Races and laws of a vocabulary of 152k."""
    numbers = {"stride": "i32", "V": "i32"}
    law = {"number_ptr": "*fp64", "place_ptr": "*i32"}
    tree = {"node_start_ptr": "*i32", "parent_ptr": "*i32", "seed_ptr": "*i64", "position_ptr": "*i32"}
    race = {"speed_ptr": "*fp64", "winner_ptr": "*i32"}
    cases = [
        CompileCase(
            name="row_choices/race_end",
            kernel=_race_end_kernel,
            signature={**race, "parent_ptr": "*i32", "token_ptr": "*i64", "S": "i32"},
            constants={"SP": 128},
        )
    ]
    shared: dict[str, Any] = {
        "constants": {"TILE": TILE},
        "aligned": ("logit_ptr", "stride", "V"),
        "num_warps": WARPS,
    }
    logits = {"logit_ptr": "*bf16"}
    cases.append(
        CompileCase(
            name="row_choices/race",
            kernel=_race_kernel,
            signature=logits | law | tree | race | numbers | {"S": "i32"},
            **shared,
        )
    )
    cases.append(
        CompileCase(
            name="row_choices/probs",
            kernel=_probs_kernel,
            signature=logits | law | {"out_ptr": "*fp64"} | numbers,
            **shared,
        )
    )
    return cases
