"""Target-only tree walk: one number per level against the running sum of p over the siblings (rule 2.3).

As SGLang's `tree_speculative_sampling_target_only`. At thresholds of 1 the rule is exact; below 1 it is
lossy, and its law is declared where that rule is registered.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.random_streams import Coin, UniformSource
from specdec.tree import DraftTree
from specdec.verification.laws import Law
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import exact_rule
from specdec.verification.walk import Choice, walk


def verify_target_only(
    tree: DraftTree,
    target_probs: ProbRows,
    stream: UniformSource,
    position: int,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> VerifyResult:
    """Take the first sibling y with u < (p(siblings up to y)) / threshold_acc or p(y) >= threshold_single.

    One number u per level, that of the parent; another one draws the recovered token from p without the
    siblings. A second copy of a sibling adds nothing and is never taken.

    Args:
        tree: the proposals; `draft_probs` is not looked at.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
        threshold_single: in (0, 1].
        threshold_acc: in (0, 1].
    """

    def choose(node: int, children: list[int], p: Law, coins: Sequence[Coin]) -> Choice:
        rest = p.copy()
        masses: list[float] = []
        for child in children:
            token = tree.token_ids[child]
            masses.append(float(rest[token]))
            rest[token] = 0.0
        # a total of the very terms that are summed: with nothing left the last sibling's sum is exactly 1
        reached = 0.0
        total = sum(masses) + float(rest.sum())
        for child, mass in zip(children, masses, strict=True):
            reached += mass
            if coins[node] < reached / total / threshold_acc or mass / total >= threshold_single:
                return child, rest
        return None, rest

    return walk(tree, target_probs, stream, position, choose)


TARGET_ONLY = exact_rule(
    name="target-only",
    topology="tree",
    draft="any",
    sentence="The text has the target's law; one number per level picks among the drafted siblings.",
    verify=verify_target_only,
)
