"""Verification walks over ragged trees in plain torch: what the kernels of `walks` must equal.

Owns the way from ragged rows to the padded records of `specdec.verification.batched`, whose rules decide, and
what becomes of rows no token can be chosen from. A walk takes the numbers that `specdec.random_streams` names
for it: ACCEPT number i belongs to node i, one RESIDUAL or BONUS number ends the step, all at the root's
position. Nothing is read on the host; shapes come from `TreeRows`' static sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference_sampling_rows import row_probs
from specdec.kernels.reference_streams import uniforms
from specdec.kernels.tree_records import NO_PARENT, RowLaws, TreeRows, WalkResult
from specdec.random_streams import Purpose
from specdec.verification.batch import BatchResult, StepNumbers, TreeBatch
from specdec.verification.batched import greedy_batch, target_only_batch
from specdec.verification.batched_joint import block_batch


def _rows(tree: TreeRows) -> tuple[Tensor, Tensor]:
    """Row of each place `[batch, max_nodes]`, some row where there is none, and which places are rows."""
    start, end = tree.node_start[:-1].long(), tree.node_start[1:].long()
    places = torch.arange(tree.max_nodes, device=start.device)
    rows = start.unsqueeze(1) + places
    return rows.clamp(max=tree.parents.shape[0] - 1), rows < end.unsqueeze(1)


def _padded(tree: TreeRows) -> tuple[TreeBatch, Tensor]:
    rows, inside = _rows(tree)
    parents = tree.parents[rows].long().masked_fill(~inside, NO_PARENT)
    is_node = parents >= -1
    batch = TreeBatch(
        token_ids=tree.token_ids[rows].masked_fill(~is_node, 0),
        parents=parents,
        num_nodes=is_node.sum(1),
        # only traversal verification makes a tour
        tour=rows[:, :0],
        max_depth=tree.max_depth,
    )
    return batch, rows


def _numbers(tree: TreeRows, seeds: Tensor, positions: Tensor) -> StepNumbers:
    roots = positions[tree.node_start[:-1].long().clamp(max=positions.shape[0] - 1)]
    no_node = torch.zeros_like(roots)

    def drawn(purpose: Purpose, count: int) -> Tensor:
        return uniforms(seeds, roots, no_node, purpose=purpose, count=count)

    return StepNumbers(
        accept=drawn(Purpose.ACCEPT, tree.max_nodes),
        residual=drawn(Purpose.RESIDUAL, 1).squeeze(1),
        bonus=drawn(Purpose.BONUS, 1).squeeze(1),
    )


def _before_bad_rows(tree: TreeBatch, found: BatchResult, bad: Tensor) -> WalkResult:
    """End every path before the first node whose row is bad; `bad` is `[batch, nodes]`, of all rows."""
    path, is_empty = found.accepted_nodes, tree.num_nodes == 0
    failed = bad[:, 0] & ~is_empty
    on_path = path >= 0
    is_cut_here = bad.gather(1, path.clamp(min=0)) & on_path
    kept = on_path & (is_cut_here.long().cumsum(1) == 0) & ~(failed | is_empty).unsqueeze(1)
    num_accepted = kept.sum(1)
    is_cut = is_cut_here.any(1)
    # a path of no length has nothing to look up
    following = (
        torch.nn.functional.pad(path, (0, 1), value=0).gather(1, num_accepted.unsqueeze(1)).clamp(min=0)
    )
    next_token_ids = torch.where(is_cut, tree.token_ids.gather(1, following).squeeze(1), found.next_token_ids)
    return WalkResult(
        accepted_nodes=path.masked_fill(~kept, -1).int(),
        num_accepted=num_accepted.int(),
        next_token_ids=next_token_ids.masked_fill(failed | is_empty, -1),
        is_bonus=found.is_bonus & ~is_cut & ~failed & ~is_empty,
        failed=failed,
    )


def walk_choices(tree: TreeRows, choices: Tensor, bad: Tensor) -> WalkResult:
    """Follow the token chosen after each node while it was drafted: rules greedy (2.9) and coupled (2.11).

    Args:
        tree: the proposals.
        choices: int64 `[rows]`, from `greedy_choices` or `race_winners`.
        bad: bool `[rows]`, rows no token can be chosen from.
    """
    padded, rows = _padded(tree)
    return _before_bad_rows(padded, greedy_batch(padded, choices[rows]), bad[rows])


def walk_target_only(
    tree: TreeRows, logits: Tensor, laws: RowLaws, seeds: Tensor, positions: Tensor
) -> WalkResult:
    """Compare one number per level with the running sum of p over the siblings (rule 2.3, exact thresholds).

    A tree of a root alone is plain sampling.

    Args:
        tree: the proposals.
        logits: `[rows, vocab]`.
        laws: of the rows.
        seeds: int64 `[batch]`.
        positions: integers `[rows]`, absolute position of each node; the roots' are read.
    """
    padded, rows = _padded(tree)
    numbers = _numbers(tree, seeds, positions)
    found = target_only_batch(padded, row_probs(logits, laws)[rows], numbers)
    return _before_bad_rows(padded, found, laws.bad[rows])


def walk_block(
    tree: TreeRows, logits: Tensor, laws: RowLaws, draft_probs: Tensor, seeds: Tensor, positions: Tensor
) -> WalkResult:
    """Keep the longest prefix of every chain that passes its own test (rule 2.7).

    Args:
        tree: chains, `max_depth` at least `max_nodes` - 1.
        logits: `[rows, vocab]`.
        laws: of the rows.
        draft_probs: floating point `[rows, vocab]`, the law the child of each row was drawn from, not
            necessarily normalised; a row of zeros has a deterministic child.
        seeds: int64 `[batch]`.
        positions: integers `[rows]`, absolute position of each node; the roots' are read.
    """
    padded, rows = _padded(tree)
    numbers = _numbers(tree, seeds, positions)
    found = block_batch(padded, row_probs(logits, laws)[rows], draft_probs[rows].double(), numbers)
    return _before_bad_rows(padded, found, laws.bad[rows])
