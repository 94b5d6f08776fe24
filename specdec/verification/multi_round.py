"""Multi-round rejection of independent siblings (rule 2.4; SpecInfer, arXiv 2305.09781)."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.random_streams import Coin, UniformSource
from specdec.tree import DraftTree
from specdec.verification.deterministic import choose_deterministic
from specdec.verification.laws import Law, residual
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import exact_rule
from specdec.verification.walk import Choice, draft_row, walk


def verify_multi_round(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Take a child with probability min(1, p/q); every rejection leaves norm((p - q)+) and the same q.

    Args:
        tree: the proposals with their draft laws; siblings independent draws, duplicates kept.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """

    def choose(node: int, children: list[int], p: Law, coins: Sequence[Coin]) -> Choice:
        q = draft_row(tree, node)
        if q is None:
            return choose_deterministic(tree, children, p, coins)
        left = p / p.sum()
        for child in children:
            token = tree.token_ids[child]
            assert q[token] > 0.0, f"node {child} holds a token its draft law gives no probability"
            if coins[child] < left[token] / q[token]:
                return child, left
            left = residual(left, q)
        return None, left

    return walk(tree, target_probs, stream, position, choose)


MULTI_ROUND = exact_rule(
    name="multi-round",
    topology="tree",
    draft="iid",
    sentence="The text has the target's law; independent siblings are tried one after the other.",
    verify=verify_multi_round,
)
