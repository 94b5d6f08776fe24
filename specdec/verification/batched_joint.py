"""The joint rules over a ragged batch in torch: block verification of chains, traversal of trees.

As `batched.py`, and as little used by the engine yet: each decides as the rule of that name on one tree does
with the same random numbers, loops are static, nothing is read back. Sources and formulas:
`block.py`, `traversal.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.verification.batch import BatchResult, StepNumbers, TreeBatch
from specdec.verification.batch_laws import draw, nonzero, normalised, one_hot_like, rows_at, token_probs
from specdec.verification.batched import is_leaf


def _pass_probability(weight: Tensor, mass: Tensor) -> Tensor:
    """Return R / (R + 1 - w); 1 where nothing can be rejected."""
    denominator = mass + 1.0 - weight
    return (mass / nonzero(denominator)).masked_fill(denominator <= 0.0, 1.0)


def _next_weight(weight: Tensor, p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """Return min(1, w p(x) / q(x)); 0 where q excludes the token (rows that are no node)."""
    chance = token_probs(q, token)
    ratio = weight * token_probs(p, token) / nonzero(chance)
    return ratio.clamp(max=1.0).masked_fill(chance <= 0.0, 0.0)


def block_batch(
    tree: TreeBatch, target_probs: Tensor, draft_probs: Tensor, numbers: StepNumbers
) -> BatchResult:
    """Keep the longest prefix of every chain that passes its own test (rule 2.7).

    Args:
        tree: chains.
        target_probs: `[batch, nodes, vocab]`.
        draft_probs: `[batch, nodes, vocab]`; a zero row has a deterministic child.
        numbers: of the step.
    """
    num_rows = tree.token_ids.shape[1]
    last = torch.zeros_like(tree.num_nodes)
    weight = torch.ones_like(numbers.bonus)
    weight_at_last = weight
    for row in range(num_rows):
        height = weight
        next_weight = weight
        if row + 1 < num_rows:
            p, q = _laws_at(tree, target_probs, draft_probs, torch.full_like(last, row))
            mass = (weight.unsqueeze(1) * p - q).clamp_(min=0.0).sum(1)
            has_child = row + 1 < tree.num_nodes
            height = torch.where(has_child, _pass_probability(weight, mass), weight)
            next_weight = _next_weight(weight, p, q, tree.token_ids[:, row + 1])
        passes = (row < tree.num_nodes) & (numbers.accept[:, row] < height)
        last = last.masked_fill(passes, row)
        weight_at_last = torch.where(last == row, weight, weight_at_last)
        weight = next_weight
    is_bonus = last + 1 == tree.num_nodes
    p, q = _laws_at(tree, target_probs, draft_probs, last)
    left = (weight_at_last.unsqueeze(1) * p - q).clamp_(min=0.0)
    keeps_p = is_bonus.unsqueeze(1) | ~left.any(1, keepdim=True)
    rows = torch.arange(1, tree.max_depth + 1, device=last.device).expand(len(last), -1)
    return BatchResult(
        accepted_nodes=rows.masked_fill(rows > last.unsqueeze(1), -1),
        num_accepted=last,
        next_token_ids=draw(
            torch.where(keeps_p, p, left), torch.where(is_bonus, numbers.bonus, numbers.residual)
        ),
        is_bonus=is_bonus,
    )


def _laws_at(
    tree: TreeBatch, target_probs: Tensor, draft_probs: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return p after one row of each chain, and the law its child was drawn from."""
    p, q = rows_at(target_probs, rows), rows_at(draft_probs, rows)
    child = (rows + 1).clamp(max=tree.token_ids.shape[1] - 1).unsqueeze(1)
    certain = one_hot_like(p, tree.token_ids.gather(1, child).squeeze(1))
    return p, torch.where(q.any(1, keepdim=True), q, certain)


def traversal_batch(
    tree: TreeBatch, target_probs: Tensor, draft_probs: Tensor, numbers: StepNumbers
) -> BatchResult:
    """Judge every tree from its leaves up (rule 2.8): enter and leave its nodes as the tour says.

    Args:
        tree: the proposals.
        target_probs: `[batch, nodes, vocab]`.
        draft_probs: `[batch, nodes, vocab]`; siblings drawn without replacement; a zero row has
            deterministic children.
        numbers: of the step.
    """
    batch, _, vocab = target_probs.shape
    num_levels = tree.max_depth + 1
    level = torch.zeros_like(tree.num_nodes)
    done = torch.zeros_like(level, dtype=torch.bool)
    # of the nodes on the path judged now, by level: the law a node leaves, that of its next child, how
    # likely its path may be kept, whether it is no second copy, and which node it is
    laws = numbers.bonus.new_zeros(batch, num_levels, vocab)
    child_laws = torch.zeros_like(laws)
    laws[:, 0], child_laws[:, 0] = rows_at(target_probs, level), rows_at(draft_probs, level)
    weights = numbers.bonus.new_ones(batch, num_levels)
    counts = torch.ones_like(weights, dtype=torch.bool)
    nodes = torch.zeros_like(weights, dtype=torch.int64)
    # the root's exit ends every tour, and its entry has been made
    for step in tree.tour[:, 1:].unbind(1):
        enters, leaves = ~done & (step >= 0), ~done & (step < 0)
        node = torch.where(step >= 0, step, -1 - step)
        token = tree.token_ids.gather(1, node.unsqueeze(1)).squeeze(1)
        parent_level = torch.where(enters, level, level - 1).clamp(min=0)
        own_level = torch.where(enters, level + 1, level).clamp(max=num_levels - 1)
        above = _entry(weights, parent_level)
        p, left_of_q = normalised(_row(laws, parent_level)), _row(child_laws, parent_level)
        is_drawn = rows_at(draft_probs, _entry(nodes, parent_level)).any(1, keepdim=True)
        q = torch.where(is_drawn, left_of_q, one_hot_like(p, token))

        # on the way in: a second copy of a drawn token does not count
        own_weight = torch.where(enters, _next_weight(above, p, q, token), _entry(weights, own_level))
        own_counts = torch.where(enters, token_probs(q, token) > 0.0, _entry(counts, own_level))
        # on the way out: the path is kept, or the parent remembers
        coin = numbers.accept.gather(1, node.unsqueeze(1)).squeeze(1)
        keeps = leaves & ((level == 0) | (coin < own_weight))
        rejects = leaves & ~keeps & own_counts
        rest = (above.unsqueeze(1) * p - q).clamp_(min=0.0)
        mass = rest.sum(1)

        weights = _put(weights, own_level, own_weight)
        counts = _put(counts, own_level, own_counts)
        nodes = _put(nodes, own_level, torch.where(enters, node, _entry(nodes, own_level)))
        after = torch.where(rejects, _pass_probability(above, mass), _entry(weights, parent_level))
        weights = _put(weights, parent_level, after)
        # one row changes at most: that of the node entered, or that of the parent
        changed = torch.where(enters, own_level, parent_level)
        law = torch.where((rejects & (mass > 0.0)).unsqueeze(1), rest, _row(laws, changed))
        laws = _put_row(laws, changed, torch.where(enters.unsqueeze(1), rows_at(target_probs, node), law))
        undrawn = normalised(left_of_q.scatter(1, token.unsqueeze(1), 0.0))
        child_law = torch.where(rejects.unsqueeze(1), undrawn, _row(child_laws, changed))
        child_law = torch.where(enters.unsqueeze(1), rows_at(draft_probs, node), child_law)
        child_laws = _put_row(child_laws, changed, child_law)
        done = done | keeps
        level = level + enters.long() - (leaves & ~keeps).long()
    is_bonus = is_leaf(tree, _entry(nodes, level))
    depths = torch.arange(1, num_levels, device=level.device)
    return BatchResult(
        accepted_nodes=nodes[:, 1:].masked_fill(depths > level.unsqueeze(1), -1),
        num_accepted=level,
        next_token_ids=draw(_row(laws, level), torch.where(is_bonus, numbers.bonus, numbers.residual)),
        is_bonus=is_bonus,
    )


def _entry(table: Tensor, index: Tensor) -> Tensor:
    """Return one entry of each row of `[batch, levels]`."""
    return table.gather(1, index.unsqueeze(1)).squeeze(1)


def _put(table: Tensor, index: Tensor, value: Tensor) -> Tensor:
    return table.scatter(1, index.unsqueeze(1), value.unsqueeze(1))


def _row(stack: Tensor, index: Tensor) -> Tensor:
    """Return one law of each sequence of `[batch, levels, vocab]`."""
    return stack.gather(1, index.view(-1, 1, 1).expand(-1, 1, stack.shape[2])).squeeze(1)


def _put_row(stack: Tensor, index: Tensor, law: Tensor) -> Tensor:
    """Write one law of each sequence, in place."""
    return stack.scatter_(1, index.view(-1, 1, 1).expand(-1, 1, stack.shape[2]), law.unsqueeze(1))
