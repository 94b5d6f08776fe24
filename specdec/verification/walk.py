"""The descent that the level-by-level rules share: choose a child or stop, then draw the next token.

Owns which number is drawn when; how a child is chosen is the rule's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.random_streams import Coin, Purpose, UniformSource
from specdec.sampling import as_law, sample
from specdec.tree import DraftTree
from specdec.verification.laws import Law
from specdec.verification.result import ProbRows, VerifyResult

# the accepted child, or None; and what is left to emit if it is None
Choice = tuple[int | None, Law]
# (node, its children, p after it, number of each node) -> choice
ChooseChild = Callable[[int, list[int], Law, Sequence[Coin]], Choice]


def draft_row(tree: DraftTree, node: int) -> Law | None:
    """Law the children of a node were drawn from, summing to 1; None where they are deterministic."""
    if tree.draft_probs is None:
        return None
    q = as_law(tree.draft_probs[node])
    mass = q.sum()
    return q / mass if mass > 0.0 else None


def walk(
    tree: DraftTree,
    target_probs: ProbRows,
    stream: UniformSource,
    position: int,
    choose: ChooseChild,
    bonus: Callable[[Law], Law] = lambda p: p,
) -> VerifyResult:
    """Descend while a child is accepted, then draw the next token from what is left of p.

    Args:
        tree: the proposals.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
        choose: the rule at one node; called only for nodes with children.
        bonus: law of the token after a leaf, from p there.
    """
    coins = stream.uniform(position, Purpose.ACCEPT, count=tree.num_nodes)
    accepted: list[int] = []
    node = 0
    while children := tree.children[node]:
        child, rest = choose(node, children, as_law(target_probs[node]), coins)
        if child is None:
            (u,) = stream.uniform(position, Purpose.RESIDUAL)
            return VerifyResult(accepted_nodes=accepted, next_token_id=sample(rest, u), next_kind="recovered")
        accepted.append(child)
        node = child
    (u,) = stream.uniform(position, Purpose.BONUS)
    next_token_id = sample(bonus(as_law(target_probs[node])), u)
    return VerifyResult(accepted_nodes=accepted, next_token_id=next_token_id, next_kind="bonus")
