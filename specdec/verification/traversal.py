"""Traversal verification: a tree judged from its leaves up (rule 2.8; arXiv 2505.12398).

A node's weight w is how likely, at most, the path to it may be kept: w_child = min(1, w p(x) / q(x)). The
first leaf is accepted with its whole path with probability w. A rejected leaf is taken off and its parent
remembers: with R = (w p - q)+ and S its mass, w becomes S / (S + 1 - w), p becomes R / S, q loses the token.
Then the next sibling has its turn, or the parent is the leaf. The root is accepted always. On a chain it
keeps as much as block verification.
"""

from __future__ import annotations

import numpy as np

from specdec.random_streams import Purpose, UniformSource
from specdec.sampling import as_law, sample
from specdec.tree import DraftTree
from specdec.verification.block import pass_probability
from specdec.verification.laws import Law, one_hot, without
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import exact_rule
from specdec.verification.walk import draft_row


class _OpenNode:
    """A node on the path that is judged now.

    Args:
        tree: the proposals.
        node: the node.
        weight: how likely, at most, the path to it may be kept.
        p: the target's law after it.
    """

    def __init__(self, tree: DraftTree, node: int, weight: float, p: Law) -> None:
        self.node = node
        self.weight = weight
        self.p = p / p.sum()
        self._tree = tree
        self._waiting = list(reversed(tree.children[node]))
        self._row = draft_row(tree, node) if self._waiting else None
        self._left = self._row

    def next_child(self) -> int | None:
        """Return the next child to judge; a second copy of a drawn token tells nothing and is passed over."""
        while self._waiting:
            child = self._waiting.pop()
            token = self._tree.token_ids[child]
            assert self._row is None or self._row[token] > 0.0, (
                f"node {child} holds a token its draft law gives no probability"
            )
            if self._left is None or self._left[token] > 0.0:
                return child
        return None

    def weight_of(self, token: int) -> float:
        """Weight of the child that holds a token, at what this node is now."""
        return float(min(1.0, self.weight * self.p[token] / self._drawn_from(token)[token]))

    def reject(self, token: int) -> None:
        """Take a rejected child into account."""
        rest = np.maximum(self.weight * self.p - self._drawn_from(token), 0.0)
        mass = float(rest.sum())
        self.weight = pass_probability(self.weight, mass)
        # without mass the rejection was impossible, or the weight is now 0 and p is never drawn from
        self.p = rest / mass if mass > 0.0 else self.p
        if self._left is not None:
            left, mass = without(self._left, token)
            self._left = left / mass if mass > 0.0 else left

    def _drawn_from(self, token: int) -> Law:
        return one_hot(token, len(self.p)) if self._left is None else self._left


def verify_traversal(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Accept the first path, from the first leaf on, that passes.

    Args:
        tree: the proposals with their draft laws; siblings drawn without replacement, in draw order. A zero
            row has deterministic children.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    coins = stream.uniform(position, Purpose.ACCEPT, count=tree.num_nodes)
    path = [_OpenNode(tree, 0, 1.0, as_law(target_probs[0]))]
    while True:
        tip = path[-1]
        child = tip.next_child()
        if child is not None:
            token = tree.token_ids[child]
            weight = tip.weight_of(token)
            if weight > 0.0:
                path.append(_OpenNode(tree, child, weight, as_law(target_probs[child])))
            else:
                # nothing below it can be kept either
                tip.reject(token)
        elif len(path) == 1 or coins[tip.node] < tip.weight:
            break
        else:
            path.pop()
            path[-1].reject(tree.token_ids[tip.node])
    is_leaf = not tree.children[tip.node]
    (u,) = stream.uniform(position, Purpose.BONUS if is_leaf else Purpose.RESIDUAL)
    return VerifyResult(
        accepted_nodes=[kept.node for kept in path[1:]],
        next_token_id=sample(tip.p, u),
        next_kind="bonus" if is_leaf else "recovered",
    )


TRAVERSAL = exact_rule(
    name="traversal",
    topology="tree",
    draft="without_replacement",
    sentence="The text has the target's law; a drafted tree is judged from its leaves up.",
    verify=verify_traversal,
)
