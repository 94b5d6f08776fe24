"""SpecTr's k-sequential selection over a ragged batch in torch (rule 2.6); formulas: `k_seq.py`.

As `batched.py`, and as little used by the engine yet: decides as the rule on one tree does with the same
random numbers. The scale rho is found by a fixed number of halvings, each a pass over the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.verification.batch import BatchResult, StepNumbers, TreeBatch
from specdec.verification.batch_laws import nonzero, rows_at
from specdec.verification.batched import SiblingMass, descend

# rho lies in an interval as long as the number of siblings: 40 halvings leave less than a billionth of it
_HALVINGS = 40


def k_seq_batch(
    tree: TreeBatch, target_probs: Tensor, draft_probs: Tensor, numbers: StepNumbers
) -> BatchResult:
    """Take each child with probability min(1, p / (rho q)), rho by sequence and level.

    Args:
        tree: the proposals.
        target_probs: `[batch, nodes, vocab]`.
        draft_probs: `[batch, nodes, vocab]`; siblings drawn independently; a zero row has deterministic
            children.
        numbers: of the step.
    """

    def choose(node: Tensor, p: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
        q = rows_at(draft_probs, node)
        count = children.sum(1)
        rho = _least_rho(p, q, count)
        scaled = p / rho.unsqueeze(1)
        chance = q.gather(1, tree.token_ids)
        takes = numbers.accept * chance < scaled.gather(1, tree.token_ids)
        taken = torch.minimum(q, scaled)
        rest = (p - taken * _num_tries(taken.sum(1), count).unsqueeze(1)).clamp_(min=0.0)
        rest = torch.where(rest.any(1, keepdim=True), rest, p)
        fixed = SiblingMass.of(tree, p, children)
        is_drawn = q.any(1, keepdim=True)
        return (
            torch.where(is_drawn, takes, numbers.accept < fixed.chances()),
            torch.where(is_drawn, rest, fixed.rest),
        )

    return descend(tree, target_probs, numbers, choose)


def _least_rho(p: Tensor, q: Tensor, count: Tensor) -> Tensor:
    """Least rho in [1, count] with rho >= g(rho), from above."""
    low = torch.ones_like(p[:, 0])
    high = count.clamp(min=1).to(p.dtype)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        beta = torch.minimum(q, p / middle.unsqueeze(1)).sum(1)
        is_enough = middle >= _num_tries(beta, count)
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return high


def _num_tries(beta: Tensor, count: Tensor) -> Tensor:
    """Expected number of siblings looked at when each is taken with probability beta."""
    refused = 1.0 - beta.clamp(max=1.0)
    return torch.where(beta > 0.0, (1.0 - refused**count) / nonzero(beta), count.to(beta.dtype))
