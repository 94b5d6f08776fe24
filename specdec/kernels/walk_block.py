"""Block verification of chains as Triton kernels, without a host round trip (rule 2.7).

Owns the four launches before the draw; signature and meaning are those of `reference_walks.walk_block`. The
weight w of every prefix needs only p and q of the drafted tokens, so a program per chain finds all of them
first; then the masses (w p - q)+ of all nodes are summed side by side, and a program per chain takes the
longest prefix that passes.

Letters: V vocabulary, S tiles of a row, N the power of two at or above a chain's rows, D depth that paths are
padded to, DP the power of two at or above D.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.row_weights import NO_ID, TILE, WARPS, kept_weights, load_law, load_logits, tile_of
from specdec.kernels.streams import as_seed
from specdec.kernels.tree_records import RowLaws, TreeRows, WalkResult
from specdec.kernels.walk_draw import DRAW, WalkEnds, draft_tile, draw_ends
from specdec.kernels.walks import empty_result, load_tree, place_number
from specdec.random_streams import Purpose

_DRAW = tl.constexpr(DRAW)
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_BONUS = tl.constexpr(int(Purpose.BONUS))


@triton.jit
def _weights_kernel(
    logit_ptr,
    number_ptr,
    place_ptr,
    draft_ptr,
    mass_ptr,
    node_start_ptr,
    parent_ptr,
    token_ptr,
    weight_ptr,
    stride,
    draft_stride,
    N: tl.constexpr,
):
    """How likely, at most, the prefix up to every node may be kept: w; 0 in padding."""
    sequence = tl.program_id(0)
    nodes = tl.arange(0, N)
    first, count, parents, _ = load_tree(node_start_ptr, parent_ptr, token_ptr, sequence, nodes)
    num_nodes = tl.sum((parents >= -1).to(tl.int32), 0)
    rows = first + nodes
    has_child = nodes + 1 < num_nodes
    child = tl.load(token_ptr + rows + 1, mask=has_child, other=0)
    law = load_law(number_ptr, place_ptr, tl.where(has_child, rows, 0))
    logits = tl.load(logit_ptr + rows * stride + child, mask=has_child, other=float("-inf")).to(tl.float32)
    p = kept_weights(logits, child.to(tl.int32), law) / law[3]
    mass = tl.load(mass_ptr + rows, mask=has_child, other=0.0)
    q = tl.load(draft_ptr + rows * draft_stride + child, mask=has_child, other=0.0).to(tl.float64)
    q = tl.where(mass > 0.0, q / tl.where(mass > 0.0, mass, 1.0), 1.0)
    ratios = tl.where(has_child & (q > 0.0), p / tl.where(q > 0.0, q, 1.0), 0.0)
    weight = tl.sum(tl.where(nodes == 0, 1.0, 0.0), 0).to(tl.float64)
    weights = tl.zeros([N], tl.float64)
    for node in range(0, num_nodes):
        weights = tl.where(nodes == node, weight, weights)
        weight = tl.minimum(weight * tl.sum(tl.where(nodes == node, ratios, 0.0), 0), 1.0)
    tl.store(weight_ptr + rows, weights, mask=nodes < count)


@triton.jit
def _masses_kernel(
    logit_ptr,
    number_ptr,
    place_ptr,
    draft_ptr,
    mass_ptr,
    parent_ptr,
    token_ptr,
    weight_ptr,
    sum_ptr,
    stride,
    draft_stride,
    rows,
    V,
    S,
    TILE: tl.constexpr,
):
    """Mass of (w p - q)+ in one tile of one node; 0 for nodes without a child."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    total = tl.full([], 0.0, tl.float64)
    # in a chain the next row is a node of the same tree, or it is a root, or padding
    if tl.load(parent_ptr + row + 1, mask=row + 1 < rows, other=-1) >= 0:
        ids = tile * TILE + tl.arange(0, TILE)
        law = load_law(number_ptr, place_ptr, row)
        p = kept_weights(load_logits(logit_ptr, row, stride, ids, V), ids, law) / law[3]
        child = tl.load(token_ptr + row + 1).to(tl.int32)
        q = draft_tile(draft_ptr, mass_ptr, row, draft_stride, ids, child, V)
        total = tl.sum(tl.maximum(tl.load(weight_ptr + row) * p - q, 0.0), 0)
    tl.store(sum_ptr + row * S + tile, total)


@triton.jit
def _longest_kernel(
    place_ptr,
    node_start_ptr,
    parent_ptr,
    token_ptr,
    weight_ptr,
    rest_ptr,
    seed_ptr,
    position_ptr,
    accepted_ptr,
    num_ptr,
    bonus_ptr,
    failed_ptr,
    row_ptr,
    forced_ptr,
    coin_ptr,
    scale_ptr,
    D,
    N: tl.constexpr,
    DP: tl.constexpr,
):
    sequence = tl.program_id(0)
    nodes = tl.arange(0, N)
    first, count, parents, tokens = load_tree(node_start_ptr, parent_ptr, token_ptr, sequence, nodes)
    is_node = parents >= -1
    num_nodes = tl.sum(is_node.to(tl.int32), 0)
    seed = as_seed(tl.load(seed_ptr + sequence))
    position = tl.load(position_ptr + first, mask=count > 0, other=0).to(tl.int64)
    weights = tl.load(weight_ptr + first + nodes, mask=is_node, other=0.0)
    rest = tl.load(rest_ptr + first + nodes, mask=is_node, other=0.0)
    below = rest + 1.0 - weights
    heights = tl.where(below > 0.0, rest / tl.where(below > 0.0, below, 1.0), 1.0)
    heights = tl.where(nodes + 1 == num_nodes, weights, heights)
    passes = is_node & (place_number(nodes, _ACCEPT, position, seed) < heights)
    last = tl.max(tl.where(passes, nodes, 0), 0)
    bad = tl.load(place_ptr + (first + nodes) * 4 + 3, mask=is_node, other=0)
    first_bad = tl.min(tl.where((bad > 0) & (nodes <= last), nodes, NO_ID), 0)
    failed = tl.where(first_bad == 0, 1, 0)
    is_cut = first_bad < NO_ID
    num = tl.where(is_cut, tl.maximum(first_bad - 1, 0), last)
    forced = tl.sum(tl.where(nodes == first_bad, tokens, 0), 0)
    forced = tl.where(is_cut, forced, _DRAW)
    forced = tl.where((failed > 0) | (num_nodes == 0), -1, forced).to(tl.int64)
    is_bonus = last + 1 == num_nodes
    depths = tl.arange(0, DP)
    tl.store(accepted_ptr + sequence * D + depths, tl.where(depths < num, depths + 1, -1), mask=depths < D)
    tl.store(num_ptr + sequence, num)
    tl.store(bonus_ptr + sequence, tl.where(is_bonus, tl.where(forced == _DRAW, 1, 0), 0) > 0)
    tl.store(failed_ptr + sequence, failed > 0)
    tl.store(row_ptr + sequence, (first + last).to(tl.int32))
    tl.store(forced_ptr + sequence, forced)
    tl.store(scale_ptr + sequence, tl.sum(tl.where(nodes == last, weights, 0.0), 0))
    zero = position * 0
    tl.store(coin_ptr + sequence, place_number(zero, tl.where(is_bonus, _BONUS, _RESIDUAL), position, seed))


def walk_block(
    tree: TreeRows, logits: Tensor, laws: RowLaws, draft_probs: Tensor, seeds: Tensor, positions: Tensor
) -> WalkResult:
    """See `reference_walks.walk_block`."""
    assert logits.stride(1) == 1, "a row's logits lie side by side"
    assert draft_probs.stride(1) == 1, "a law's entries lie side by side"
    (rows, vocab), device, batch = logits.shape, logits.device, tree.batch
    result = empty_result(tree)
    ends = WalkEnds.empty(result.is_bonus)
    tile = tile_of(vocab)
    tiles = triton.cdiv(vocab, tile)
    width = triton.next_power_of_2(tree.max_nodes)
    mass = draft_probs.sum(-1, dtype=torch.float64)
    weights = torch.empty(rows, dtype=torch.float64, device=device)
    sums = torch.empty((rows, tiles), dtype=torch.float64, device=device)
    scale = torch.empty(batch, dtype=torch.float64, device=device)
    if batch and rows:
        strides = (logits.stride(0), draft_probs.stride(0))
        _weights_kernel[(batch,)](
            logits,
            laws.numbers,
            laws.places,
            draft_probs,
            mass,
            tree.node_start,
            tree.parents,
            tree.token_ids,
            weights,
            *strides,
            N=width,
        )
        _masses_kernel[(rows, tiles)](
            logits,
            laws.numbers,
            laws.places,
            draft_probs,
            mass,
            tree.parents,
            tree.token_ids,
            weights,
            sums,
            *strides,
            rows,
            vocab,
            tiles,
            TILE=tile,
            num_warps=WARPS,
        )
        _longest_kernel[(batch,)](
            laws.places,
            tree.node_start,
            tree.parents,
            tree.token_ids,
            weights,
            sums.sum(-1),
            seeds,
            positions,
            result.accepted_nodes,
            result.num_accepted,
            result.is_bonus,
            result.failed,
            ends.row,
            ends.forced,
            ends.coin,
            scale,
            tree.max_depth,
            N=width,
            DP=triton.next_power_of_2(max(1, tree.max_depth)),
        )
    block = (draft_probs, mass, scale, tree.token_ids)
    return replace(result, next_token_ids=draw_ends(ends, logits, laws, block=block))


def compile_cases() -> list[CompileCase]:
    """Chains of up to 16 rows over a vocabulary of 152k."""
    law = {"logit_ptr": "*bf16", "number_ptr": "*fp64", "place_ptr": "*i32"}
    draft = {"draft_ptr": "*fp64", "mass_ptr": "*fp64"}
    start = {"node_start_ptr": "*i32"}
    tree = {"parent_ptr": "*i32", "token_ptr": "*i64", "weight_ptr": "*fp64"}
    strides = {"stride": "i32", "draft_stride": "i32"}
    numbers = {"rest_ptr": "*fp64", "seed_ptr": "*i64", "position_ptr": "*i32"}
    out = {"accepted_ptr": "*i32", "num_ptr": "*i32", "bonus_ptr": "*i1", "failed_ptr": "*i1"}
    ends = {"row_ptr": "*i32", "forced_ptr": "*i64", "coin_ptr": "*fp64", "scale_ptr": "*fp64"}
    return [
        CompileCase(
            name="walk_block/weights",
            kernel=_weights_kernel,
            signature=law | draft | start | tree | strides,
            constants={"N": 16},
        ),
        CompileCase(
            name="walk_block/masses",
            kernel=_masses_kernel,
            signature=law
            | draft
            | tree
            | strides
            | {"sum_ptr": "*fp64", "rows": "i32", "V": "i32", "S": "i32"},
            constants={"TILE": TILE},
            aligned=("logit_ptr", "draft_ptr", "stride", "draft_stride", "V"),
            num_warps=WARPS,
        ),
        CompileCase(
            name="walk_block/longest",
            kernel=_longest_kernel,
            signature={"place_ptr": "*i32"} | start | tree | numbers | out | ends | {"D": "i32"},
            constants={"N": 16, "DP": 16},
        ),
    ]
