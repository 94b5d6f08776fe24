"""Best-first growth of draft trees as Triton kernels, without a host round trip.

Owns the launches of one level; signature and meaning are those of `reference_growth.grow_level`. A program
takes one tile of the draft vocabulary for all frontier nodes of a tree, because the noise of a race belongs
to the level, and keeps the best K children of each; a second launch unites the tiles of a node, a third ranks
the children of all nodes of a tree and appends them.

Letters: B trees, W rows of the frontier, K children of a node (the largest top_k), V draft vocabulary, S
tiles of it, SP the power of two at or above S, C = W * K candidates of a tree, CP the power of two at or
above C.
"""

from __future__ import annotations

from dataclasses import replace

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
from specdec.kernels.streams import RACE, as_exponential, as_seed, words_at
from specdec.kernels.tree_records import GrowingTrees, GrowthLimits, GrowthRaces


@triton.jit
def _children_kernel(
    logit_ptr,
    number_ptr,
    place_ptr,
    seed_ptr,
    root_ptr,
    coupled_ptr,
    id_ptr,
    frontier_ptr,
    peak_ptr,
    sum_ptr,
    value_ptr,
    child_ptr,
    stride,
    frontier_stride,
    depth,
    W,
    V,
    S,
    K: tl.constexpr,
    WITH_RACES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Best K children in one tile for every node of a frontier, and the tile's share of the row's mass."""
    tree = tl.program_id(0)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    log_noise = tl.zeros([TILE], tl.float64)
    is_coupled = 0
    if WITH_RACES:
        is_coupled = tl.load(coupled_ptr + tree).to(tl.int32)
        if is_coupled > 0:
            targets = tl.load(id_ptr + ids, mask=ids < V, other=0)
            position = tl.load(root_ptr + tree).to(tl.int64) + depth
            seed = as_seed(tl.load(seed_ptr + tree))
            words = words_at(targets, position * 0, tl.full([], RACE, tl.int64), position, seed)
            log_noise = tl.log(as_exponential(words))
    for slot in range(0, W):
        if tl.load(frontier_ptr + tree * frontier_stride + slot) >= 0:
            row = tree.to(tl.int64) * W + slot
            logits = load_logits(logit_ptr, row, stride, ids, V)
            values = logits.to(tl.float64)
            # two ifs: only the outer one is decided when the kernel is compiled
            if WITH_RACES:  # noqa: SIM102
                if is_coupled > 0:
                    law = load_law(number_ptr, place_ptr, row)
                    allowed = (kept_weights(logits, ids, law) > 0.0) & (ids < V)
                    won = (values - law[0]) / law[1] - log_noise
                    values = tl.where(allowed, won, float("-inf"))
                    # a bad row has a law that stands in, and no children
                    values = tl.where(law[7] > 0, float("nan"), values)
            is_nan = values != values
            has_nan = tl.max(is_nan.to(tl.int32), 0)
            values = tl.where(is_nan, float("-inf"), values)
            peak, _ = first_best(values, ids)
            place = row * S + tile
            base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
            shares = tl.where(values == float("inf"), 0.0, tl.exp(values - base))
            tl.store(sum_ptr + place, tl.sum(shares, 0))
            tl.store(peak_ptr + place, tl.where(has_nan > 0, float("nan"), peak))
            for rank in range(0, K):
                best, child = first_best(values, ids)
                tl.store(value_ptr + place * K + rank, best)
                tl.store(child_ptr + place * K + rank, child)
                values = tl.where(ids == child, float("-inf"), values)


@triton.jit
def _unite_kernel(
    frontier_ptr,
    node_score_ptr,
    top_k_ptr,
    max_depth_ptr,
    peak_ptr,
    sum_ptr,
    value_ptr,
    child_ptr,
    score_ptr,
    id_ptr,
    frontier_stride,
    capacity,
    depth,
    W,
    S,
    K: tl.constexpr,
    SP: tl.constexpr,
    SK: tl.constexpr,
):
    """Scores and ids of a node's best K children; -inf where it has fewer."""
    tree = tl.program_id(0)
    slot = tl.program_id(1)
    row = tree.to(tl.int64) * W + slot
    node = tl.load(frontier_ptr + tree * frontier_stride + slot)
    grows = tl.where(depth < tl.load(max_depth_ptr + tree), node, -1)
    for rank in range(0, K):
        tl.store(score_ptr + row * K + rank, float("-inf"))
        tl.store(id_ptr + row * K + rank, 0)
    if grows >= 0:
        tiles = tl.arange(0, SP)
        peaks = tl.load(peak_ptr + row * S + tiles, mask=tiles < S, other=float("-inf"))
        sums = tl.load(sum_ptr + row * S + tiles, mask=tiles < S, other=0.0)
        has_nan = tl.max((peaks != peaks).to(tl.int32), 0)
        peak = tl.max(tl.where(peaks != peaks, float("-inf"), peaks), 0)
        is_good = tl.where(tl.abs(peak) == float("inf"), 0, 1 - has_nan)
        if is_good > 0:
            log_mass = peak + tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
            above = tl.load(node_score_ptr + tree.to(tl.int64) * capacity + node)
            places = tl.arange(0, SK)
            inside = places < S * K
            values = tl.load(value_ptr + row * S * K + places, mask=inside, other=float("-inf"))
            children = tl.load(child_ptr + row * S * K + places, mask=inside, other=NO_ID)
            # the first of these is never -inf, so a child that was taken is not found a second time
            for rank in range(0, tl.minimum(tl.load(top_k_ptr + tree), K)):
                best, child = first_best(values, children)
                score = tl.where(best == float("-inf"), best, above + (best - log_mass))
                tl.store(score_ptr + row * K + rank, score)
                tl.store(id_ptr + row * K + rank, tl.where(best == float("-inf"), 0, child))
                values = tl.where(children == child, float("-inf"), values)


@triton.jit
def _append_kernel(
    frontier_ptr,
    num_ptr,
    top_k_ptr,
    max_depth_ptr,
    score_ptr,
    child_ptr,
    id_ptr,
    token_ptr,
    parent_ptr,
    node_score_ptr,
    next_num_ptr,
    next_frontier_ptr,
    parent_row_ptr,
    frontier_stride,
    capacity,
    depth,
    W,
    K: tl.constexpr,
    CP: tl.constexpr,
    KP: tl.constexpr,
):
    """Rank the candidates of a tree by -score, row, id; append them; the first become the next frontier."""
    tree = tl.program_id(0).to(tl.int64)
    candidates = W * K
    index = tl.arange(0, CP)
    inside = index < candidates
    start = tree * candidates
    scores = tl.load(score_ptr + start + index, mask=inside, other=float("-inf"))
    children = tl.load(child_ptr + start + index, mask=inside, other=NO_ID)
    rows = index // K
    rank = tl.zeros([CP], tl.int32)
    for other in range(0, candidates):
        score = tl.load(score_ptr + start + other)
        child = tl.load(child_ptr + start + other)
        ahead = (rows > other // K) | ((rows == other // K) & (children > child))
        rank += ((score > scores) | ((score == scores) & ahead)).to(tl.int32)
    valid = scores > float("-inf")
    num_added = tl.sum(valid.to(tl.int32), 0)
    num_nodes = tl.load(num_ptr + tree)
    place = tree * capacity + num_nodes + rank
    tokens = tl.load(id_ptr + children, mask=valid, other=0)
    parents = tl.load(frontier_ptr + tree * frontier_stride + rows, mask=valid, other=0)
    tl.store(token_ptr + place, tokens, mask=valid)
    tl.store(parent_ptr + place, parents, mask=valid)
    tl.store(node_score_ptr + place, scores, mask=valid)
    goes_on = tl.minimum(tl.minimum(num_added, tl.load(top_k_ptr + tree)), K)
    goes_on = tl.where(depth + 1 < tl.load(max_depth_ptr + tree), goes_on, 0)
    slots = tl.arange(0, KP)
    tl.store(next_num_ptr + tree, num_nodes + num_added)
    frontier = tl.where(slots < goes_on, num_nodes + slots, -1)
    tl.store(next_frontier_ptr + tree * K + slots, frontier, mask=slots < K)
    tl.store(parent_row_ptr + tree * K + slots, 0, mask=(slots >= goes_on) & (slots < K))
    tl.store(parent_row_ptr + tree * K + rank, rows, mask=valid & (rank < goes_on))


def grow_level(
    trees: GrowingTrees,
    logits: Tensor,
    limits: GrowthLimits,
    *,
    depth: int,
    vocab_ids: Tensor,
    vocab: int,
    races: GrowthRaces | None = None,
) -> tuple[GrowingTrees, Tensor]:
    """See `reference_growth.grow_level`; `vocab` is not needed, noise is made for the draft's ids alone."""
    assert logits.is_contiguous(), "rows of all trees lie one after the other"
    batch, rows, draft_vocab = logits.shape
    width, capacity, device = trees.frontier.shape[1], trees.scores.shape[1], logits.device
    tile = tile_of(draft_vocab)
    tiles = triton.cdiv(draft_vocab, tile)

    def made(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    peaks, sums = made(torch.float64, batch, rows, tiles), made(torch.float64, batch, rows, tiles)
    values = made(torch.float64, batch, rows, tiles, width)
    children = made(torch.int32, batch, rows, tiles, width)
    scores, ids = made(torch.float64, batch, rows, width), made(torch.int32, batch, rows, width)
    num_nodes, frontier = made(torch.int32, batch), made(torch.int32, batch, width)
    parent_rows = made(torch.int32, batch, width)
    if batch:
        stride = trees.frontier.stride(0)
        race = (
            (None, None, None, None, None)
            if races is None
            else (races.laws.numbers, races.laws.places, races.seeds, races.roots, races.is_coupled)
        )
        _children_kernel[(batch, tiles)](
            logits,
            *race,
            vocab_ids,
            trees.frontier,
            peaks,
            sums,
            values,
            children,
            draft_vocab,
            stride,
            depth,
            rows,
            draft_vocab,
            tiles,
            K=width,
            WITH_RACES=races is not None,
            TILE=tile,
            num_warps=WARPS,
        )
        limit = (limits.top_k, limits.max_depth)
        _unite_kernel[(batch, rows)](
            trees.frontier,
            trees.scores,
            *limit,
            peaks,
            sums,
            values,
            children,
            scores,
            ids,
            stride,
            capacity,
            depth,
            rows,
            tiles,
            K=width,
            SP=triton.next_power_of_2(tiles),
            SK=triton.next_power_of_2(tiles * width),
        )
        _append_kernel[(batch,)](
            trees.frontier,
            trees.num_nodes,
            *limit,
            scores,
            ids,
            vocab_ids,
            trees.token_ids,
            trees.parents,
            trees.scores,
            num_nodes,
            frontier,
            parent_rows,
            stride,
            capacity,
            depth,
            rows,
            K=width,
            CP=triton.next_power_of_2(rows * width),
            KP=triton.next_power_of_2(width),
        )
    return replace(trees, num_nodes=num_nodes, frontier=frontier), parent_rows


def compile_cases() -> list[CompileCase]:
    """Eight children of eight nodes over a draft vocabulary of 32k, with and without races."""
    law = {"number_ptr": "*fp64", "place_ptr": "*i32"}
    race = law | {"seed_ptr": "*i64", "root_ptr": "*i32", "coupled_ptr": "*i1"}
    tiles = {"peak_ptr": "*fp64", "sum_ptr": "*fp64", "value_ptr": "*fp64", "child_ptr": "*i32"}
    sizes = {"frontier_stride": "i32", "depth": "i32", "W": "i32"}
    limit = {"top_k_ptr": "*i32", "max_depth_ptr": "*i32", "capacity": "i32"}
    frontier = {"frontier_ptr": "*i32"}
    cases = []
    for name, used in (("probability", {}), ("race", race)):
        pointers = {"logit_ptr": "*bf16", "id_ptr": "*i64"} | used | frontier | tiles
        cases.append(
            CompileCase(
                name=f"growth/children-{name}",
                kernel=_children_kernel,
                signature=pointers | sizes | {"stride": "i32", "V": "i32", "S": "i32"},
                constants={key: None for key in race if key not in used}
                | {"K": 8, "WITH_RACES": name == "race", "TILE": TILE},
                aligned=("logit_ptr", "stride", "V"),
                num_warps=WARPS,
            )
        )
    cases.append(
        CompileCase(
            name="growth/unite",
            kernel=_unite_kernel,
            signature=frontier
            | tiles
            | sizes
            | limit
            | {"node_score_ptr": "*fp64", "score_ptr": "*fp64", "id_ptr": "*i32", "S": "i32"},
            constants={"K": 8, "SP": 16, "SK": 128},
        )
    )
    nodes = {"token_ptr": "*i64", "parent_ptr": "*i32", "node_score_ptr": "*fp64"}
    out = {"next_num_ptr": "*i32", "next_frontier_ptr": "*i32", "parent_row_ptr": "*i32"}
    cases.append(
        CompileCase(
            name="growth/append",
            kernel=_append_kernel,
            signature=frontier
            | sizes
            | limit
            | nodes
            | out
            | {"num_ptr": "*i32", "score_ptr": "*fp64", "child_ptr": "*i32", "id_ptr": "*i64"},
            constants={"K": 8, "CP": 64, "KP": 8},
        )
    )
    return cases
