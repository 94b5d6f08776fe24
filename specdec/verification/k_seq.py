"""SpecTr's k-sequential selection of independent siblings (rule 2.6; arXiv 2310.15141).

Each of the k siblings is taken with probability min(1, p / (rho q)). With beta = sum min(q, p / rho) and
g = 1 + (1 - beta) + ... + (1 - beta)^(k - 1), token x is emitted by a sibling with probability
min(q, p / rho) g, which never exceeds p where rho >= g: the rest of p is the residual's. The least such rho
accepts most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.random_streams import Coin, UniformSource
from specdec.tree import DraftTree
from specdec.verification.deterministic import choose_deterministic
from specdec.verification.laws import Law, residual
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import exact_rule
from specdec.verification.walk import Choice, draft_row, walk

# any rho >= g is exact, so this buys acceptance only
_RHO_TOLERANCE = 1e-9


def verify_k_seq(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Take each child with probability min(1, p / (rho q)), rho from p, q and the number of children.

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
        p = p / p.sum()
        rho = least_rho(p, q, len(children))
        for child in children:
            token = tree.token_ids[child]
            assert q[token] > 0.0, f"node {child} holds a token its draft law gives no probability"
            if coins[child] < p[token] / (rho * q[token]):
                return child, p
        taken = np.minimum(q, p / rho)
        return None, residual(p, taken * _num_tries(float(taken.sum()), len(children)))

    return walk(tree, target_probs, stream, position, choose)


def least_rho(p: Law, q: Law, k: int) -> float:
    """Least rho in [1, k] with rho >= g(rho), from above (false position, Illinois variant)."""

    def excess(rho: float) -> float:
        return rho - _num_tries(float(np.minimum(q, p / rho).sum()), k)

    low, high = 1.0, float(k)
    weight_low, weight_high = -excess(low), excess(high)
    if weight_low <= 0.0:
        return low
    gap, stayed = weight_high, 0
    while gap > _RHO_TOLERANCE and high - low > _RHO_TOLERANCE:
        middle = (low * weight_high + high * weight_low) / (weight_low + weight_high)
        value = excess(middle)
        # an end that stays twice in a row loses half of its pull
        if value >= 0.0:
            high, weight_high, gap = middle, value, value
            weight_low, stayed = (weight_low / 2.0 if stayed < 0 else weight_low), -1
        else:
            low, weight_low = middle, -value
            weight_high, stayed = (weight_high / 2.0 if stayed > 0 else weight_high), 1
    return high


def _num_tries(beta: float, k: int) -> float:
    """Expected number of siblings looked at when each is taken with probability beta."""
    return float(sum((1.0 - beta) ** tried for tried in range(k)))


K_SEQ = exact_rule(
    name="k-seq",
    topology="tree",
    draft="iid",
    sentence="The text has the target's law; independent siblings share one acceptance scale rho.",
    verify=verify_k_seq,
)
