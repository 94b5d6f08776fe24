"""Coupled verification: the target's own draw at each position, followed while it was drafted (rule 2.11).

The draw after position t is an exponential race: the id with the least E_t[id] / p[id], E_t a function of
(seed, t, id) alone (Daliri, Musco, Suresh, arXiv 2408.07978). One number per id costs more than
one inverse-CDF draw, and buys that a drafter running the same race with q proposes the target's own token
with probability >= (1 - TV) / (1 + TV); an inverse-CDF number shared with the drafter promises nothing.
"""

from __future__ import annotations

from specdec.random_streams import UniformSource
from specdec.sampling import as_law
from specdec.tree import DraftTree
from specdec.verification.result import NextKind, ProbRows, VerifyResult
from specdec.verification.rules import exact_rule


def verify_coupled(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Draw the target's own token after each node and follow it while it was drafted.

    The noise of a draw depends on the absolute position of its token alone, so the text is what plain
    decoding draws with the same seed, whatever was drafted and however: a drafter may look at the noise.
    A child y whose making did not is accepted with probability p(y), as by `verify_deterministic`.

    Args:
        tree: the proposals; `draft_probs` is not looked at.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    accepted: list[int] = []
    node = 0
    while True:
        p = as_law(target_probs[node])
        winners = stream.race(position + len(accepted), p)
        assert winners, f"no token can be drawn after node {node}: its law is empty"
        children = tree.children[node]
        child = next((child for child in children if tree.token_ids[child] == winners[0]), None)
        if child is None:
            next_kind: NextKind = "recovered" if children else "bonus"
            return VerifyResult(accepted_nodes=accepted, next_token_id=winners[0], next_kind=next_kind)
        accepted.append(child)
        node = child


COUPLED = exact_rule(
    name="coupled",
    topology="tree",
    draft="any",
    sentence="The text is the one plain decoding draws with the same seed, whatever was drafted.",
    verify=verify_coupled,
)
