"""Verification walks over ragged trees as Triton kernels, without a host round trip.

Owns the walks that follow chosen tokens (greedy, coupled) and the target-only walk, one sequence a program;
signatures and meaning are those of `reference_walks`. Laws are not written out: a walk reads the logits of
the siblings it looks at, and only the token that ends it is drawn over the whole vocabulary (`walk_draw`).

Letters: N the power of two at or above a tree's rows, D depth that paths are padded to.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.row_weights import NO_ID, kept_weights, load_law
from specdec.kernels.streams import as_seed, as_uniform, words_at
from specdec.kernels.tree_records import NO_PARENT, RowLaws, TreeRows, WalkResult
from specdec.kernels.walk_draw import DRAW, WalkEnds, draw_ends
from specdec.random_streams import Purpose

_NO_PARENT = tl.constexpr(NO_PARENT)
_DRAW = tl.constexpr(DRAW)
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_RESIDUAL = tl.constexpr(int(Purpose.RESIDUAL))
_BONUS = tl.constexpr(int(Purpose.BONUS))


@triton.jit
def load_tree(node_start_ptr, parent_ptr, token_ptr, sequence, nodes):
    """First row, number of rows, parents and tokens of one tree; `NO_PARENT` beyond it."""
    first = tl.load(node_start_ptr + sequence).to(tl.int64)
    count = (tl.load(node_start_ptr + sequence + 1) - first).to(tl.int32)
    inside = nodes < count
    parents = tl.load(parent_ptr + first + nodes, mask=inside, other=_NO_PARENT)
    tokens = tl.load(token_ptr + first + nodes, mask=inside, other=-1)
    return first, count, parents, tokens


@triton.jit
def place_number(index, purpose, position, seed):
    """Uniform number(s) `index` of one purpose at the root's position."""
    zero = position * 0
    return as_uniform(words_at(index, zero, zero + purpose, position, seed))


@triton.jit
def _choices_kernel(
    node_start_ptr,
    parent_ptr,
    token_ptr,
    choice_ptr,
    bad_ptr,
    accepted_ptr,
    num_ptr,
    next_ptr,
    bonus_ptr,
    failed_ptr,
    D,
    N: tl.constexpr,
):
    sequence = tl.program_id(0)
    nodes = tl.arange(0, N)
    first, count, parents, tokens = load_tree(node_start_ptr, parent_ptr, token_ptr, sequence, nodes)
    failed = tl.load(bad_ptr + first, mask=count > 0, other=0).to(tl.int32)
    wanted = tl.load(choice_ptr + first, mask=count > 0, other=-1)
    walking = tl.where(count > 0, 1 - failed, 0)
    node = count * 0
    num = count * 0
    cut = count * 0
    for level in range(0, D):
        child = tl.min(tl.where((parents == node) & (tokens == wanted), nodes, NO_ID), 0)
        found = tl.where(child < NO_ID, walking, 0)
        is_bad = tl.load(bad_ptr + first + child, mask=found > 0, other=0).to(tl.int32)
        takes = found * (1 - is_bad)
        cut += found * is_bad
        tl.store(accepted_ptr + sequence * D + level, tl.where(takes > 0, child, -1))
        num += takes
        node = tl.where(takes > 0, child, node)
        after = tl.load(choice_ptr + first + child, mask=takes > 0, other=-1)
        wanted = tl.where(takes > 0, after, wanted)
        walking = takes
    has_children = tl.max((parents == node).to(tl.int32), 0)
    stands = tl.where(count > 0, 1 - failed, 0)
    tl.store(num_ptr + sequence, num)
    tl.store(next_ptr + sequence, tl.where(stands > 0, wanted, -1))
    tl.store(bonus_ptr + sequence, (stands * (1 - has_children) * (1 - cut)) > 0)
    tl.store(failed_ptr + sequence, failed > 0)


@triton.jit
def _target_only_kernel(
    logit_ptr,
    number_ptr,
    place_ptr,
    node_start_ptr,
    parent_ptr,
    token_ptr,
    seed_ptr,
    position_ptr,
    accepted_ptr,
    num_ptr,
    bonus_ptr,
    failed_ptr,
    row_ptr,
    forced_ptr,
    coin_ptr,
    taken_ptr,
    num_taken_ptr,
    stride,
    D,
    N: tl.constexpr,
):
    sequence = tl.program_id(0)
    nodes = tl.arange(0, N)
    first, count, parents, tokens = load_tree(node_start_ptr, parent_ptr, token_ptr, sequence, nodes)
    seed = as_seed(tl.load(seed_ptr + sequence))
    position = tl.load(position_ptr + first, mask=count > 0, other=0).to(tl.int64)
    coins = place_number(nodes, _ACCEPT, position, seed)
    # a second copy of a sibling adds nothing
    is_copy = nodes < 0
    for other in range(0, count):
        same = (parents == tl.load(parent_ptr + first + other)) & (
            tokens == tl.load(token_ptr + first + other)
        )
        is_copy = is_copy | (same & (nodes > other))
    failed = tl.load(place_ptr + first * 4 + 3, mask=count > 0, other=0)
    walking = tl.where(count > 0, 1 - failed, 0)
    stands = walking
    node = count * 0
    num = count * 0
    forced = tl.where(stands > 0, _DRAW, -1).to(tl.int64)
    for level in range(0, D):
        children = parents == tl.where(walking > 0, node, NO_ID)
        row = first + node
        logits = tl.load(logit_ptr + row * stride + tokens, mask=children, other=float("-inf")).to(tl.float32)
        child = count * 0 + NO_ID
        if walking > 0:
            law = load_law(number_ptr, place_ptr, row)
            mass = kept_weights(logits, tokens.to(tl.int32), law) / law[3]
            reached = tl.cumsum(tl.where(children & (is_copy == 0), mass, 0.0), 0)
            coin = tl.sum(tl.where(nodes == node, coins, 0.0), 0)
            child = tl.min(tl.where(children & (coin < reached), nodes, NO_ID), 0)
        found = tl.where(child < NO_ID, walking, 0)
        is_bad = tl.load(place_ptr + (first + child) * 4 + 3, mask=found > 0, other=0)
        takes = found * (1 - is_bad)
        token = tl.load(token_ptr + first + child, mask=found > 0, other=-1)
        forced = tl.where(found * is_bad > 0, token, forced)
        tl.store(accepted_ptr + sequence * D + level, tl.where(takes > 0, child, -1))
        num += takes
        node = tl.where(takes > 0, child, node)
        walking = takes
    children = parents == node
    num_children = tl.sum(children.to(tl.int32), 0)
    is_bonus = num_children == 0
    draws = tl.where(forced == _DRAW, 1, 0)
    tl.store(num_ptr + sequence, num)
    tl.store(bonus_ptr + sequence, tl.where(is_bonus, draws, 0) > 0)
    tl.store(failed_ptr + sequence, failed > 0)
    tl.store(row_ptr + sequence, (first + node).to(tl.int32))
    tl.store(forced_ptr + sequence, forced)
    zero = position * 0
    tl.store(coin_ptr + sequence, place_number(zero, tl.where(is_bonus, _BONUS, _RESIDUAL), position, seed))
    order = tl.cumsum(children.to(tl.int32), 0) - 1
    tl.store(taken_ptr + sequence * N + order, tokens.to(tl.int32), mask=children)
    tl.store(num_taken_ptr + sequence, num_children)


def empty_result(tree: TreeRows) -> WalkResult:
    """Tensors for kernels to fill."""
    device, batch = tree.parents.device, tree.batch
    return WalkResult(
        accepted_nodes=torch.empty((batch, tree.max_depth), dtype=torch.int32, device=device),
        num_accepted=torch.empty(batch, dtype=torch.int32, device=device),
        next_token_ids=torch.empty(batch, dtype=torch.int64, device=device),
        is_bonus=torch.empty(batch, dtype=torch.bool, device=device),
        failed=torch.empty(batch, dtype=torch.bool, device=device),
    )


def walk_choices(tree: TreeRows, choices: Tensor, bad: Tensor) -> WalkResult:
    """See `reference_walks.walk_choices`."""
    result = empty_result(tree)
    if tree.batch:
        _choices_kernel[(tree.batch,)](
            tree.node_start,
            tree.parents,
            tree.token_ids,
            choices,
            bad,
            result.accepted_nodes,
            result.num_accepted,
            result.next_token_ids,
            result.is_bonus,
            result.failed,
            tree.max_depth,
            N=triton.next_power_of_2(tree.max_nodes),
        )
    return result


def walk_target_only(
    tree: TreeRows, logits: Tensor, laws: RowLaws, seeds: Tensor, positions: Tensor
) -> WalkResult:
    """See `reference_walks.walk_target_only`."""
    result, device, batch = empty_result(tree), logits.device, tree.batch
    width = triton.next_power_of_2(tree.max_nodes)
    ends = WalkEnds.empty(result.is_bonus)
    taken = torch.empty((batch, width), dtype=torch.int32, device=device)
    num_taken = torch.empty(batch, dtype=torch.int32, device=device)
    if batch:
        _target_only_kernel[(batch,)](
            logits,
            laws.numbers,
            laws.places,
            tree.node_start,
            tree.parents,
            tree.token_ids,
            seeds,
            positions,
            result.accepted_nodes,
            result.num_accepted,
            result.is_bonus,
            result.failed,
            ends.row,
            ends.forced,
            ends.coin,
            taken,
            num_taken,
            logits.stride(0),
            tree.max_depth,
            N=width,
        )
    next_token_ids = draw_ends(ends, logits, laws, taken=(taken, num_taken))
    return replace(result, next_token_ids=next_token_ids)


def compile_cases() -> list[CompileCase]:
    """Trees of 64 nodes."""
    tree = {"node_start_ptr": "*i32", "parent_ptr": "*i32", "token_ptr": "*i64"}
    out = {"accepted_ptr": "*i32", "num_ptr": "*i32", "bonus_ptr": "*i1", "failed_ptr": "*i1"}
    law = {"logit_ptr": "*bf16", "number_ptr": "*fp64", "place_ptr": "*i32"}
    ends = {"row_ptr": "*i32", "forced_ptr": "*i64", "coin_ptr": "*fp64"}
    numbers = {"seed_ptr": "*i64", "position_ptr": "*i32"}
    return [
        CompileCase(
            name="walks/choices",
            kernel=_choices_kernel,
            signature={**tree, "choice_ptr": "*i64", "bad_ptr": "*i1", "next_ptr": "*i64", "D": "i32"} | out,
            constants={"N": 64},
        ),
        CompileCase(
            name="walks/target_only",
            kernel=_target_only_kernel,
            signature=law
            | tree
            | numbers
            | out
            | ends
            | {"taken_ptr": "*i32", "num_taken_ptr": "*i32", "stride": "i32", "D": "i32"},
            constants={"N": 64},
        ),
    ]
