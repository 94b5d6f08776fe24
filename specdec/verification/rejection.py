"""Token rejection on chains, recursive rejection without replacement on trees (rules 2.1 and 2.5).

Sources: token rejection: arXiv 2211.17192, 2302.01318; recursive rejection: RSD 2402.14160, Sequoia
2402.12374, EAGLE-2 2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.random_streams import Coin, UniformSource
from specdec.tree import DraftTree
from specdec.verification.deterministic import choose_deterministic
from specdec.verification.laws import Law, after_rejection
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import exact_rule
from specdec.verification.walk import Choice, draft_row, walk


def verify_rejection(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Take a child with probability min(1, p/q), then go on with what q left of p.

    Token rejection on a chain; recursive rejection without replacement on a tree, siblings in draw order
    and the whole of q subtracted. Nodes whose row of `draft_probs` is zero have deterministic children
    (rule 2.2).

    Args:
        tree: the proposals with their draft laws.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """

    def choose(node: int, children: list[int], p: Law, coins: Sequence[Coin]) -> Choice:
        q = draft_row(tree, node)
        if q is None:
            return choose_deterministic(tree, children, p, coins)
        return choose_sampled(tree, children, p, q, coins)

    return walk(tree, target_probs, stream, position, choose)


def choose_sampled(tree: DraftTree, children: list[int], p: Law, q: Law, coins: Sequence[Coin]) -> Choice:
    """Pick a child, or none and the residual of p.

    A second copy of a drawn token has no probability left in q: it tells nothing and is passed over.
    """
    p = p / p.sum()
    drawn_from = q
    for child in children:
        token = tree.token_ids[child]
        assert q[token] > 0.0, f"node {child} holds a token its draft law gives no probability"
        if drawn_from[token] == 0.0:
            continue
        if coins[child] < p[token] / drawn_from[token]:
            return child, p
        p, drawn_from = after_rejection(p, drawn_from, token)
    return None, p


REJECTION = exact_rule(
    name="rejection",
    topology="tree",
    draft="without_replacement",
    sentence="The text has the target's law; a sampled draft is taken with probability min(1, p/q).",
    verify=verify_rejection,
)
