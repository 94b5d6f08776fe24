"""The level-by-level rules over a ragged batch in torch: no host round trip, no loop over sequences.

The reference of the kernels that walk trees on a device (`specdec.kernels.reference_walks`). Owns greedy,
coupled, target-only, deterministic, rejection and multi-round; each decides as the rule of that name on one
tree does with the same random numbers (float64 inside, whatever the inputs are). Loops run over depth or over
rows, both static, and every step is one tensor operation for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.verification.batch import BatchResult, StepNumbers, TreeBatch
from specdec.verification.batch_laws import draw, nonzero, normalised, one_hot_like, rows_at, token_probs

# (node of each sequence, p after it `[batch, vocab]`, which rows are its children `[batch, nodes]`) -> rows
# to take, the first of which counts, and what is left of p when there is none
ChooseChildren = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def is_leaf(tree: TreeBatch, nodes: Tensor) -> Tensor:
    """Whether one node of each tree has no children."""
    return ~(tree.parents == nodes.unsqueeze(1)).any(1)


def _follow(tree: TreeBatch, wanted_after: Callable[[int, Tensor], Tensor]) -> BatchResult:
    """Follow wanted tokens down the trees while they were drafted.

    Args:
        tree: the proposals.
        wanted_after: (depth, node of each sequence) -> the token wanted there.
    """
    node = torch.zeros_like(tree.num_nodes)
    depth = torch.zeros_like(tree.num_nodes)
    wanted = wanted_after(0, node)
    walking = torch.ones_like(node, dtype=torch.bool)
    path = []
    for level in range(tree.max_depth):
        matches = (tree.parents == node.unsqueeze(1)) & (tree.token_ids == wanted.unsqueeze(1))
        walking = walking & matches.any(1)
        # the first of equal siblings, as on one tree
        child = matches.byte().argmax(1)
        node = torch.where(walking, child, node)
        depth = depth + walking
        path.append(child.masked_fill(~walking, -1))
        wanted = torch.where(walking, wanted_after(level + 1, node), wanted)
    return BatchResult(
        accepted_nodes=torch.stack(path, 1) if path else tree.parents[:, :0],
        num_accepted=depth,
        next_token_ids=wanted,
        is_bonus=is_leaf(tree, node),
    )


def greedy_batch(tree: TreeBatch, target_argmax: Tensor) -> BatchResult:
    """Follow the target's own choices (rule 2.9).

    Args:
        tree: the proposals.
        target_argmax: int64 `[batch, nodes]`, the target's greedy token after each node.
    """
    return _follow(tree, lambda _, node: target_argmax.gather(1, node.unsqueeze(1)).squeeze(1))


def coupled_batch(tree: TreeBatch, target_probs: Tensor, exponentials: Tensor) -> BatchResult:
    """Follow the winners of the target's races (rule 2.11).

    Args:
        tree: the proposals.
        target_probs: `[batch, nodes, vocab]`.
        exponentials: float64 `[batch, max_depth + 1, vocab]`; row d is the noise of the position d after the
            root's.
    """
    return _follow(
        tree, lambda depth, node: (rows_at(target_probs, node) / exponentials[:, depth]).argmax(-1)
    )


def descend(
    tree: TreeBatch, target_probs: Tensor, numbers: StepNumbers, choose: ChooseChildren
) -> BatchResult:
    """Go down level by level while a child is taken, then draw the next token from what is left of p."""
    node = torch.zeros_like(tree.num_nodes)
    depth = torch.zeros_like(node)
    walking = torch.ones_like(node, dtype=torch.bool)
    path = []
    p = rows_at(target_probs, node)
    left = p
    for _ in range(tree.max_depth):
        children = tree.parents == node.unsqueeze(1)
        takes, rest = choose(node, p, children)
        takes = takes & children
        stops = walking & ~takes.any(1)
        walking = walking & takes.any(1)
        child = takes.byte().argmax(1)
        node = torch.where(walking, child, node)
        depth = depth + walking
        path.append(child.masked_fill(~walking, -1))
        p = rows_at(target_probs, node)
        left = torch.where(walking.unsqueeze(1), p, left)
        left = torch.where((stops & children.any(1)).unsqueeze(1), rest, left)
    return _finish(tree, path, node, depth, left, numbers)


@dataclass(frozen=True)
class SiblingMass:
    """What p gives the children of one node of each sequence.

    Attributes:
        mass: `[batch, nodes]`, p of each child, 0 for second copies and for rows that are no child.
        rest: `[batch, vocab]`, p without the children, not normalised.
    """

    mass: Tensor
    rest: Tensor

    @classmethod
    def of(cls, tree: TreeBatch, p: Tensor, children: Tensor) -> SiblingMass:
        """Gather it; `children` is bool `[batch, nodes]`."""
        copies = second_copies(tree)
        # places of other rows point at a sibling's id, which is emptied anyway
        first = children.byte().argmax(1, keepdim=True)
        tokens = torch.where(children, tree.token_ids, tree.token_ids.gather(1, first))
        return cls(
            mass=p.gather(1, tree.token_ids).masked_fill(~children | copies, 0.0),
            rest=p.scatter(1, tokens, 0.0),
        )

    def chances(self) -> Tensor:
        """Chance of each child once those before it are refused, `[batch, nodes]`."""
        # summed from the end, so that the last child with mass has exactly 1 where nothing else is left
        left = self.mass.flip(1).cumsum(1).flip(1) + self.rest.sum(1, keepdim=True)
        return self.mass / nonzero(left)


def second_copies(tree: TreeBatch) -> Tensor:
    """Rows that hold the token of a sibling before them, bool `[batch, nodes]`."""
    same = (tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)) & (
        tree.token_ids.unsqueeze(2) == tree.token_ids.unsqueeze(1)
    )
    return same.tril(-1).any(2)


def target_only_batch(
    tree: TreeBatch,
    target_probs: Tensor,
    numbers: StepNumbers,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> BatchResult:
    """Compare one number per level with the running sum of p over the siblings (rule 2.3).

    Args:
        tree: the proposals.
        target_probs: `[batch, nodes, vocab]`.
        numbers: of the step.
        threshold_single: in (0, 1]; below 1 the rule is lossy.
        threshold_acc: in (0, 1]; below 1 the rule is lossy.
    """

    def choose(node: Tensor, p: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
        siblings = SiblingMass.of(tree, p, children)
        reached = siblings.mass.cumsum(1)
        total = reached[:, -1:] + siblings.rest.sum(1, keepdim=True)
        coin = numbers.accept.gather(1, node.unsqueeze(1))
        takes = (coin < reached / total / threshold_acc) | (siblings.mass / total >= threshold_single)
        return takes, siblings.rest

    return descend(tree, target_probs, numbers, choose)


def deterministic_batch(tree: TreeBatch, target_probs: Tensor, numbers: StepNumbers) -> BatchResult:
    """Take children with the probability p gives them (rule 2.2 on trees).

    Args:
        tree: the proposals.
        target_probs: `[batch, nodes, vocab]`.
        numbers: of the step.
    """

    def choose(_: Tensor, p: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
        siblings = SiblingMass.of(tree, p, children)
        return numbers.accept < siblings.chances(), siblings.rest

    return descend(tree, target_probs, numbers, choose)


def rejection_batch(
    tree: TreeBatch, target_probs: Tensor, draft_probs: Tensor, numbers: StepNumbers
) -> BatchResult:
    """Token rejection and recursive rejection without replacement (rules 2.1 and 2.5).

    Args:
        tree: the proposals.
        target_probs: `[batch, nodes, vocab]`.
        draft_probs: `[batch, nodes, vocab]`; a zero row has deterministic children.
        numbers: of the step.
    """
    return _sweep(tree, target_probs, draft_probs, numbers, remove_drawn=True)


def multi_round_batch(
    tree: TreeBatch, target_probs: Tensor, draft_probs: Tensor, numbers: StepNumbers
) -> BatchResult:
    """Rejection of independent siblings (rule 2.4); arguments as for `rejection_batch`."""
    return _sweep(tree, target_probs, draft_probs, numbers, remove_drawn=False)


def _sweep(
    tree: TreeBatch,
    target_probs: Tensor,
    draft_probs: Tensor,
    numbers: StepNumbers,
    remove_drawn: bool,
) -> BatchResult:
    """Try every row in order: children stand after their parent, so one sweep is the whole walk."""
    node = torch.zeros_like(tree.num_nodes)
    depth = torch.zeros_like(node)
    path = tree.parents.new_full((len(node), tree.max_depth + 1), -1)
    p = rows_at(target_probs, node)
    q = rows_at(draft_probs, node)
    has_law = q.any(1)
    for row in range(1, tree.token_ids.shape[1]):
        here = torch.full_like(node, row)
        token = tree.token_ids[:, row]
        is_child = tree.parents[:, row] == node
        # a deterministic child was drawn from the law that is sure of it
        drawn_from = torch.where(has_law.unsqueeze(1), q, one_hot_like(p, token))
        chance = token_probs(drawn_from, token)
        # a second copy of a drawn token has no chance left and is passed over
        is_tried = is_child & (chance > 0.0)
        accepts = is_tried & (numbers.accept[:, row] < token_probs(p, token) / nonzero(chance))
        rejects = (is_tried & ~accepts).unsqueeze(1)
        left = (p - drawn_from).clamp_(min=0.0)
        has_left = left.sum(1, keepdim=True) > 0.0
        p = torch.where(rejects & has_left, normalised(left), p)
        if remove_drawn:
            undrawn = normalised(q.scatter(1, token.unsqueeze(1), 0.0))
            q = torch.where(rejects, undrawn, q)
        path.scatter_(1, depth.unsqueeze(1), here.masked_fill(~accepts, -1).unsqueeze(1))
        depth = depth + accepts
        node = torch.where(accepts, here, node)
        p = torch.where(accepts.unsqueeze(1), rows_at(target_probs, node), p)
        q = torch.where(accepts.unsqueeze(1), rows_at(draft_probs, node), q)
        has_law = torch.where(accepts, q.any(1), has_law)
    return _finish(tree, list(path[:, : tree.max_depth].unbind(1)), node, depth, p, numbers)


def _finish(
    tree: TreeBatch, path: list[Tensor], node: Tensor, depth: Tensor, law: Tensor, numbers: StepNumbers
) -> BatchResult:
    """Draw the next token of every sequence from what its walk left."""
    is_bonus = is_leaf(tree, node)
    return BatchResult(
        accepted_nodes=torch.stack(path, 1) if path else tree.parents[:, :0],
        num_accepted=depth,
        next_token_ids=draw(law, torch.where(is_bonus, numbers.bonus, numbers.residual)),
        is_bonus=is_bonus,
    )
