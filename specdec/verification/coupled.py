"""Coupled verification: the target's own draw at each position, followed while it was drafted (rule 2.11)."""

from __future__ import annotations

from specdec.random_streams import Purpose, UniformSource
from specdec.sampling import sample
from specdec.tree import DraftTree
from specdec.verification.result import NextKind, ProbRows, VerifyResult
from specdec.verification.rules import exact_rule


def verify_coupled(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Draw the target's own token after each node and follow it while it was drafted.

    The number of a draw depends on the absolute position of its token alone, so the text is what plain
    decoding draws with the same seed, whatever was drafted. A child y is accepted with probability p(y), as
    by `verify_deterministic`. Exact for every tree whose making did not use BONUS numbers.

    Args:
        tree: the proposals; `draft_probs` is not looked at.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    accepted: list[int] = []
    node = 0
    while True:
        (u,) = stream.uniform(position + len(accepted), Purpose.BONUS)
        token = sample(target_probs[node], u)
        children = tree.children[node]
        child = next((child for child in children if tree.token_ids[child] == token), None)
        if child is None:
            next_kind: NextKind = "recovered" if children else "bonus"
            return VerifyResult(accepted_nodes=accepted, next_token_id=token, next_kind=next_kind)
        accepted.append(child)
        node = child


COUPLED = exact_rule(
    name="coupled",
    topology="tree",
    draft="any",
    sentence="The text is the one plain decoding draws with the same seed, whatever was drafted.",
    verify=verify_coupled,
)
