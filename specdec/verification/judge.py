"""A learned judge: drafted tokens that a classifier of the user's calls correct stand as they are.

Owns the hook, after Judge Decoding (arXiv 2501.19309): a child stands if the judge says so or if the exact
rejection rule takes it. The judge is a function of the tree and a node; `judge_by_score` makes one from a
scoring head over the target's states. There is no default judge: the rule as listed refuses to run, and
`judge_rule` makes one that runs. No law is declared, since what comes out is what the judge lets pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.errors import SpecdecError
from specdec.random_streams import Coin, UniformSource
from specdec.tree import DraftTree
from specdec.verification.deterministic import choose_deterministic
from specdec.verification.laws import Law
from specdec.verification.rejection import choose_sampled
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import Rule
from specdec.verification.walk import Choice, draft_row, walk

# (tree, drafted node) -> whether its token may stand
Judge = Callable[[DraftTree, int], bool]


def judge_by_score(
    score: Callable[[Tensor], Tensor], states_of: Callable[[DraftTree], Tensor], threshold: float
) -> Judge:
    """Make a judge that scores the target's state at each drafted node.

    Args:
        score: a head, `[nodes, hidden]` -> `[nodes]`.
        states_of: the target's states at the nodes of a tree, `[nodes, hidden]`, the root's first.
        threshold: a token stands if its score is above it.
    """

    def judge(tree: DraftTree, node: int) -> bool:
        return bool(score(states_of(tree)[node : node + 1])[0] > threshold)

    return judge


def verify_judged(
    tree: DraftTree,
    target_probs: ProbRows,
    stream: UniformSource,
    position: int,
    judge: Judge,
) -> VerifyResult:
    """Verify exactly up to the first child that the judge lets pass.

    Args:
        tree: the proposals with their draft laws.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
        judge: asked once for each child met, never for tokens with p = 0.
    """

    def choose(node: int, children: list[int], p: Law, coins: Sequence[Coin]) -> Choice:
        passed = next(
            (
                place
                for place, child in enumerate(children)
                if p[tree.token_ids[child]] > 0.0 and judge(tree, child)
            ),
            len(children),
        )
        before = children[:passed]
        q = draft_row(tree, node)
        if q is None:
            child, rest = choose_deterministic(tree, before, p, coins)
        else:
            child, rest = choose_sampled(tree, before, p, q, coins)
        if child is None and passed < len(children):
            child = children[passed]
        return child, rest

    return walk(tree, target_probs, stream, position, choose)


def judge_rule(judge: Judge | None) -> Rule:
    """Make the rule with a judge; without one it refuses to run.

    Args:
        judge: (tree, node) -> whether the node's token may stand.
    """

    def verify(tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int) -> VerifyResult:
        if judge is None:
            raise SpecdecError(
                "rule judge needs a judge, and none is built in; make the rule in Python with "
                "specdec.verification.judge.judge_rule(judge)"
            )
        return verify_judged(tree, target_probs, stream, position, judge)

    return Rule(
        name="judge",
        kind="collaborative",
        topology="tree",
        draft="without_replacement",
        emitted_law=None,
        overshoot_bound=lambda knobs: None,
        sentence="A drafted token stands if your judge calls it correct, whatever the target's law says; "
        "otherwise it is verified exactly.",
        verify=lambda tree, target_probs, stream, position, knobs: verify(
            tree, target_probs, stream, position
        ),
    )


JUDGE = judge_rule(None)
