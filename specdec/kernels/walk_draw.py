"""The draw that ends a verification walk, as Triton kernels: one id from what the walk left of p.

Owns the inverse CDF over a vocabulary in tiles: one launch sums each tile, another finds the tile and then
the id in it. What is left of p is p itself (bonus), p without some ids (target-only), or (w p - q)+ (block);
where nothing is left, which only rounding can bring about, p. Does not know how a walk came to its end.

Letters: B sequences, V vocabulary, S tiles of a row, SP the power of two at or above S, X ids taken out of p
at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.row_weights import NO_ID, TILE, WARPS, kept_weights, load_law, load_logits, tile_of
from specdec.kernels.tree_records import RowLaws

# in `forced`: a token is to be drawn
DRAW = -2
_DRAW = tl.constexpr(DRAW)


@dataclass(frozen=True, kw_only=True)
class WalkEnds:
    """Where the walks of a batch ended.

    Attributes:
        row: int32 `[batch]`, the row whose law counts.
        forced: int64 `[batch]`, the token that follows whatever is drawn, or `DRAW`.
        is_bonus: bool `[batch]`: the whole of p is left.
        coin: float64 `[batch]`, the number that draws.
    """

    row: Tensor
    forced: Tensor
    is_bonus: Tensor
    coin: Tensor

    @classmethod
    def empty(cls, is_bonus: Tensor) -> WalkEnds:
        """Tensors for a kernel to fill, beside those of its result."""
        batch, device = is_bonus.shape[0], is_bonus.device
        return cls(
            row=torch.empty(batch, dtype=torch.int32, device=device),
            forced=torch.empty(batch, dtype=torch.int64, device=device),
            is_bonus=is_bonus,
            coin=torch.empty(batch, dtype=torch.float64, device=device),
        )


@triton.jit
def draft_tile(draft_ptr, mass_ptr, row, stride, ids, child, V):
    """One tile of q after a row: its own law, or the one that is sure of `child`."""
    mass = tl.load(mass_ptr + row)
    q = tl.load(draft_ptr + row * stride + ids, mask=ids < V, other=0.0).to(tl.float64)
    return tl.where(mass > 0.0, q / tl.where(mass > 0.0, mass, 1.0), (ids == child).to(tl.float64))


@triton.jit
def _tile_of_rest(
    logit_ptr,
    number_ptr,
    place_ptr,
    taken_ptr,
    num_taken_ptr,
    draft_ptr,
    mass_ptr,
    scale_ptr,
    token_ptr,
    sequence,
    row,
    ids,
    stride,
    draft_stride,
    V,
    X,
    BLOCK_RULE: tl.constexpr,
):
    """One tile of p and of what is left of it."""
    law = load_law(number_ptr, place_ptr, row)
    p = kept_weights(load_logits(logit_ptr, row, stride, ids, V), ids, law) / law[3]
    if BLOCK_RULE:
        child = tl.load(token_ptr + row + 1).to(tl.int32)
        q = draft_tile(draft_ptr, mass_ptr, row, draft_stride, ids, child, V)
        rest = tl.maximum(tl.load(scale_ptr + sequence) * p - q, 0.0)
    else:
        rest = p
        for index in range(0, tl.load(num_taken_ptr + sequence)):
            rest = tl.where(ids == tl.load(taken_ptr + sequence * X + index), 0.0, rest)
    return p, rest


@triton.jit
def _sums_kernel(
    logit_ptr,
    number_ptr,
    place_ptr,
    taken_ptr,
    num_taken_ptr,
    draft_ptr,
    mass_ptr,
    scale_ptr,
    token_ptr,
    row_ptr,
    forced_ptr,
    bonus_ptr,
    sum_ptr,
    stride,
    draft_stride,
    V,
    S,
    X,
    BLOCK_RULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mass of p and of what is left of it in one tile, side by side [B, 2, S]."""
    sequence = tl.program_id(0)
    tile = tl.program_id(1)
    if tl.load(forced_ptr + sequence) == _DRAW:
        row = tl.load(row_ptr + sequence).to(tl.int64)
        ids = tile * TILE + tl.arange(0, TILE)
        out = sum_ptr + sequence * 2 * S + tile
        if tl.load(bonus_ptr + sequence).to(tl.int32) > 0:
            law = load_law(number_ptr, place_ptr, row)
            p = kept_weights(load_logits(logit_ptr, row, stride, ids, V), ids, law) / law[3]
            tl.store(out, tl.sum(p, 0))
            tl.store(out + S, 0.0)
        else:
            p, rest = _tile_of_rest(
                logit_ptr,
                number_ptr,
                place_ptr,
                taken_ptr,
                num_taken_ptr,
                draft_ptr,
                mass_ptr,
                scale_ptr,
                token_ptr,
                sequence,
                row,
                ids,
                stride,
                draft_stride,
                V,
                X,
                BLOCK_RULE,
            )
            tl.store(out, tl.sum(p, 0))
            tl.store(out + S, tl.sum(rest, 0))


@triton.jit
def _pick_kernel(
    logit_ptr,
    number_ptr,
    place_ptr,
    taken_ptr,
    num_taken_ptr,
    draft_ptr,
    mass_ptr,
    scale_ptr,
    token_ptr,
    row_ptr,
    forced_ptr,
    bonus_ptr,
    sum_ptr,
    coin_ptr,
    next_ptr,
    stride,
    draft_stride,
    V,
    S,
    X,
    BLOCK_RULE: tl.constexpr,
    TILE: tl.constexpr,
    SP: tl.constexpr,
):
    sequence = tl.program_id(0)
    forced = tl.load(forced_ptr + sequence)
    if forced != _DRAW:
        tl.store(next_ptr + sequence, forced)
    else:
        row = tl.load(row_ptr + sequence).to(tl.int64)
        tiles = tl.arange(0, SP)
        start = sum_ptr + sequence * 2 * S
        rests = tl.load(start + S + tiles, mask=tiles < S, other=0.0)
        # none where p itself is wanted
        whole = tl.sum(rests, 0) <= 0.0
        sums = tl.where(whole, tl.load(start + tiles, mask=tiles < S, other=0.0), rests)
        reached = tl.cumsum(sums, 0)
        wanted = tl.load(coin_ptr + sequence) * tl.sum(tl.where(tiles == SP - 1, reached, 0.0), 0)
        hit = tl.min(tl.where((reached > wanted) & (sums > 0.0), tiles, SP), 0)
        last = tl.max(tl.where(sums > 0.0, tiles, 0), 0)
        tile = tl.where(hit < SP, hit, last)
        before = tl.sum(tl.where(tiles == tile - 1, reached, 0.0), 0)
        ids = tile * TILE + tl.arange(0, TILE)
        if whole:
            law = load_law(number_ptr, place_ptr, row)
            values = kept_weights(load_logits(logit_ptr, row, stride, ids, V), ids, law) / law[3]
        else:
            _, values = _tile_of_rest(
                logit_ptr,
                number_ptr,
                place_ptr,
                taken_ptr,
                num_taken_ptr,
                draft_ptr,
                mass_ptr,
                scale_ptr,
                token_ptr,
                sequence,
                row,
                ids,
                stride,
                draft_stride,
                V,
                X,
                BLOCK_RULE,
            )
        inside = before + tl.cumsum(values, 0)
        chosen = tl.min(tl.where((inside > wanted) & (values > 0.0), ids, NO_ID), 0)
        last_id = tl.max(tl.where(values > 0.0, ids, 0), 0)
        tl.store(next_ptr + sequence, tl.where(chosen < NO_ID, chosen, last_id).to(tl.int64))


def draw_ends(
    ends: WalkEnds,
    logits: Tensor,
    laws: RowLaws,
    *,
    taken: tuple[Tensor, Tensor] | None = None,
    block: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Draw the token after every walk, int64 `[batch]`.

    Args:
        ends: where the walks ended.
        logits: `[rows, vocab]`.
        laws: of the rows.
        taken: target-only: int32 ids to leave out `[batch, X]` and how many int32 `[batch]`.
        block: block verification: q `[rows, vocab]`, its mass float64 `[rows]`, w float64 `[batch]`, and the
            token ids of the tree int64 `[rows]`.
    """
    batch, vocab = ends.row.shape[0], logits.shape[1]
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    sums = torch.empty((batch, 2, tiles), dtype=torch.float64, device=logits.device)
    next_token_ids = torch.empty(batch, dtype=torch.int64, device=logits.device)
    ids, num_ids = taken if taken is not None else (None, None)
    draft, mass, scale, tokens = block if block is not None else (None, None, None, None)
    left = (logits, laws.numbers, laws.places, ids, num_ids, draft, mass, scale, tokens)
    sizes = (
        logits.stride(0),
        draft.stride(0) if draft is not None else 0,
        vocab,
        tiles,
        ids.shape[1] if ids is not None else 0,
    )
    if batch:
        where = (ends.row, ends.forced, ends.is_bonus, sums)
        is_block = block is not None
        _sums_kernel[(batch, tiles)](*left, *where, *sizes, BLOCK_RULE=is_block, TILE=tile, num_warps=WARPS)
        _pick_kernel[(batch,)](
            *left,
            *where,
            ends.coin,
            next_token_ids,
            *sizes,
            BLOCK_RULE=is_block,
            TILE=tile,
            SP=triton.next_power_of_2(tiles),
            num_warps=WARPS,
        )
    return next_token_ids


def compile_cases() -> list[CompileCase]:
    """Both ways of ending a walk over a vocabulary of 152k."""
    always = {"logit_ptr": "*bf16", "number_ptr": "*fp64", "place_ptr": "*i32"}
    only_taken = {"taken_ptr": "*i32", "num_taken_ptr": "*i32"}
    only_block = {"draft_ptr": "*fp64", "mass_ptr": "*fp64", "scale_ptr": "*fp64", "token_ptr": "*i64"}
    where = {"row_ptr": "*i32", "forced_ptr": "*i64", "bonus_ptr": "*i1", "sum_ptr": "*fp64"}
    sizes = dict.fromkeys(("stride", "draft_stride", "V", "S", "X"), "i32")
    cases = []
    for name, used, unused in (("target_only", only_taken, only_block), ("block", only_block, only_taken)):
        signature = always | used | where | sizes
        constants = dict.fromkeys(unused) | {"BLOCK_RULE": name == "block", "TILE": TILE}
        cases.append(
            CompileCase(
                name=f"walk_draw/sums-{name}",
                kernel=_sums_kernel,
                signature=signature,
                constants=constants,
                aligned=("logit_ptr", "stride", "V"),
                num_warps=WARPS,
            )
        )
        cases.append(
            CompileCase(
                name=f"walk_draw/pick-{name}",
                kernel=_pick_kernel,
                signature=signature | {"coin_ptr": "*fp64", "next_ptr": "*i64"},
                constants=constants | {"SP": 128},
                aligned=("logit_ptr", "stride", "V"),
                num_warps=WARPS,
            )
        )
    return cases
