"""Deterministic children: each is taken with the probability p gives it (rule 2.2, on trees)."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.random_streams import Coin, UniformSource
from specdec.tree import DraftTree
from specdec.verification.laws import Law, without
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import exact_rule
from specdec.verification.walk import Choice, walk


def choose_deterministic(tree: DraftTree, children: list[int], p: Law, coins: Sequence[Coin]) -> Choice:
    """Pick a child, or none and the rest of p.

    A rejected token leaves p; what stays is renormalised by its own sum rather than by a difference, so that
    p = 0 is never accepted and the last id with mass always is.
    """
    rest = p.copy()
    mass = rest.sum()
    for child in children:
        token = tree.token_ids[child]
        if coins[child] < rest[token] / mass:
            return child, rest
        rest, mass = without(rest, token)
    return None, rest


def verify_deterministic(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Take the children one by one with the probability p gives them.

    Exact for every tree, however it was made, as long as making it did not use the numbers drawn here.

    Args:
        tree: the proposals; `draft_probs` is not looked at.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    return walk(
        tree,
        target_probs,
        stream,
        position,
        lambda node, children, p, coins: choose_deterministic(tree, children, p, coins),
    )


DETERMINISTIC = exact_rule(
    name="deterministic",
    topology="tree",
    draft="any",
    sentence="The text has the target's law; a drafted token is taken as often as the target would draw it.",
    verify=verify_deterministic,
)
