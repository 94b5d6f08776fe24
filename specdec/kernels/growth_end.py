"""The end of best-first growth as Triton kernels: the best nodes stay, and who sees whom.

Owns the launches; signatures and meaning are those of `reference_growth`. A first launch ranks every node of
a tree against all others, a second one counts the kept nodes before each and moves it there.

Letters: B trees, N nodes there is room for, R rows of a finished tree, RP the power of two at or above R,
NODES nodes of one program, OTHERS nodes they are compared with at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.tree_records import NO_PARENT, GrowingTrees, GrownTrees, GrowthLimits

_NO_PARENT = tl.constexpr(NO_PARENT)
# 32 comparisons for each of 128 threads
NODES = 128
OTHERS = 32
WORD_BITS = 64


@triton.jit
def _keep_kernel(score_ptr, num_ptr, max_nodes_ptr, kept_ptr, N, NODES: tl.constexpr, OTHERS: tl.constexpr):
    """Whether each node is the root or among the best."""
    tree = tl.program_id(0).to(tl.int64)
    nodes = tl.program_id(1) * NODES + tl.arange(0, NODES)
    num_nodes = tl.load(num_ptr + tree)
    scores = tl.load(score_ptr + tree * N + nodes, mask=nodes < num_nodes, other=float("-inf"))
    rank = tl.zeros([NODES], tl.int32)
    for start in range(0, num_nodes, OTHERS):
        others = start + tl.arange(0, OTHERS)
        drafted = (others > 0) & (others < num_nodes)
        values = tl.load(score_ptr + tree * N + others, mask=drafted, other=float("-inf"))
        equal = (values[None, :] == scores[:, None]) & (others[None, :] < nodes[:, None])
        before = ((values[None, :] > scores[:, None]) | equal) & drafted[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
    stays = (nodes == 0) | ((nodes < num_nodes) & (rank < tl.load(max_nodes_ptr + tree)))
    tl.store(kept_ptr + tree * N + nodes, stays.to(tl.int32), mask=nodes < N)


@triton.jit
def _move_kernel(
    token_ptr,
    parent_ptr,
    score_ptr,
    kept_ptr,
    out_token_ptr,
    out_parent_ptr,
    out_score_ptr,
    out_num_ptr,
    N,
    R,
    NODES: tl.constexpr,
    OTHERS: tl.constexpr,
    RP: tl.constexpr,
):
    """Put every kept node where it belongs, parents by their new place; fill up with padding."""
    tree = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    nodes = part * NODES + tl.arange(0, NODES)
    kept = tl.load(kept_ptr + tree * N + nodes, mask=nodes < N, other=0) > 0
    parents = tl.load(parent_ptr + tree * N + nodes, mask=kept, other=-1)
    place = tl.zeros([NODES], tl.int32)
    parent_place = tl.zeros([NODES], tl.int32)
    total = part * 0
    for start in range(0, N, OTHERS):
        others = start + tl.arange(0, OTHERS)
        counts = tl.load(kept_ptr + tree * N + others, mask=others < N, other=0)
        place += tl.sum(tl.where(others[None, :] < nodes[:, None], counts[None, :], 0), 1)
        parent_place += tl.sum(tl.where(others[None, :] < parents[:, None], counts[None, :], 0), 1)
        total += tl.sum(counts, 0)
    out = tree * R + place
    tl.store(out_token_ptr + out, tl.load(token_ptr + tree * N + nodes, mask=kept, other=0), mask=kept)
    tl.store(out_parent_ptr + out, tl.where(parents < 0, parents, parent_place), mask=kept)
    tl.store(out_score_ptr + out, tl.load(score_ptr + tree * N + nodes, mask=kept, other=0.0), mask=kept)
    if part == 0:
        rows = tl.arange(0, RP)
        padding = (rows >= total) & (rows < R)
        tl.store(out_token_ptr + tree * R + rows, tl.zeros([RP], tl.int64), mask=padding)
        tl.store(out_parent_ptr + tree * R + rows, tl.full([RP], _NO_PARENT, tl.int32), mask=padding)
        tl.store(out_score_ptr + tree * R + rows, tl.full([RP], float("-inf"), tl.float64), mask=padding)
        tl.store(out_num_ptr + tree, total)


@triton.jit
def _masks_kernel(parent_ptr, depth_ptr, word_ptr, R, WORDS, max_depth, RP: tl.constexpr):
    """One word of the ancestors of every node of a tree, and, with the first word, the depths."""
    tree = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    rows = tl.arange(0, RP)
    inside = rows < R
    node = tl.where(inside, rows, -1)
    seen = tl.zeros([RP], tl.int64)
    depth = tl.full([RP], -1, tl.int32)
    for _ in range(0, max_depth + 1):
        is_node = node >= 0
        bit = tl.full([RP], 1, tl.int64) << (node & 63).to(tl.int64)
        seen |= tl.where(is_node & (node // 64 == word), bit, 0)
        depth += is_node.to(tl.int32)
        node = tl.load(parent_ptr + tree * R + node, mask=is_node, other=-1)
    tl.store(word_ptr + (tree * R + rows) * WORDS + word, seen, mask=inside)
    if word == 0:
        tl.store(depth_ptr + tree * R + rows, depth, mask=inside)


def prune_trees(trees: GrowingTrees, limits: GrowthLimits, *, rows: int) -> GrownTrees:
    """See `reference_growth.prune_trees`."""
    (batch, capacity), device = trees.scores.shape, trees.scores.device
    grown = GrownTrees(
        token_ids=torch.empty((batch, rows), dtype=torch.int64, device=device),
        parents=torch.empty((batch, rows), dtype=torch.int32, device=device),
        log_probs=torch.empty((batch, rows), dtype=torch.float64, device=device),
        num_nodes=torch.empty(batch, dtype=torch.int32, device=device),
    )
    kept = torch.empty((batch, capacity), dtype=torch.int32, device=device)
    if batch:
        grid = (batch, triton.cdiv(capacity, NODES))
        _keep_kernel[grid](
            trees.scores, trees.num_nodes, limits.max_nodes, kept, capacity, NODES=NODES, OTHERS=OTHERS
        )
        _move_kernel[grid](
            trees.token_ids,
            trees.parents,
            trees.scores,
            kept,
            grown.token_ids,
            grown.parents,
            grown.log_probs,
            grown.num_nodes,
            capacity,
            rows,
            NODES=NODES,
            OTHERS=OTHERS,
            RP=triton.next_power_of_2(rows),
        )
    return grown


def tree_masks(parents: Tensor, *, max_depth: int) -> tuple[Tensor, Tensor]:
    """See `reference_growth.tree_masks`."""
    assert parents.is_contiguous(), "trees lie one after the other"
    batch, rows = parents.shape
    num_words = (rows + WORD_BITS - 1) // WORD_BITS
    depths = torch.empty((batch, rows), dtype=torch.int32, device=parents.device)
    words = torch.empty((batch, rows, num_words), dtype=torch.int64, device=parents.device)
    if batch:
        _masks_kernel[(batch, num_words)](
            parents, depths, words, rows, num_words, max_depth, RP=triton.next_power_of_2(rows)
        )
    return depths, words


def compile_cases() -> list[CompileCase]:
    """Trees of 64 rows out of some hundred candidates."""
    nodes = {"token_ptr": "*i64", "parent_ptr": "*i32", "score_ptr": "*fp64"}
    out = {
        "out_token_ptr": "*i64",
        "out_parent_ptr": "*i32",
        "out_score_ptr": "*fp64",
        "out_num_ptr": "*i32",
    }
    kept = {"kept_ptr": "*i32", "N": "i32"}
    parts = {"NODES": NODES, "OTHERS": OTHERS}
    return [
        CompileCase(
            name="growth_end/keep",
            kernel=_keep_kernel,
            signature={"score_ptr": "*fp64", "num_ptr": "*i32", "max_nodes_ptr": "*i32"} | kept,
            constants=parts,
        ),
        CompileCase(
            name="growth_end/move",
            kernel=_move_kernel,
            signature=nodes | out | kept | {"R": "i32"},
            constants=parts | {"RP": 64},
        ),
        CompileCase(
            name="growth_end/masks",
            kernel=_masks_kernel,
            signature={"parent_ptr": "*i32", "depth_ptr": "*i32", "word_ptr": "*i64"}
            | dict.fromkeys(("R", "WORDS", "max_depth"), "i32"),
            constants={"RP": 64},
        ),
    ]
