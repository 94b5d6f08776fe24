"""Block verification: accept the longest prefix that passes, judged jointly (rule 2.7; arXiv 2403.10444).

w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)): how likely, at most, prefix i may be kept. A prefix passes
with probability h_i = R_i / (R_i + 1 - w_i), R_i = sum (w_i p - q)+ over the laws after it; the whole draft
with h = w. The longest passing prefix counts even where a shorter one failed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.random_streams import Coin, Purpose, UniformSource
from specdec.sampling import as_law, sample
from specdec.tree import DraftTree
from specdec.verification.laws import Law, one_hot, residual
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import exact_rule
from specdec.verification.walk import draft_row


def verify_block(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Keep the longest prefix of a chain that passes its own test.

    Args:
        tree: a chain with its draft laws; a zero row has a deterministic child, q one-hot.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    assert tree.is_chain, "block verification judges prefixes of one chain"
    coins = stream.uniform(position, Purpose.ACCEPT, count=tree.num_nodes)
    weight = 1.0
    heights: list[float] = []
    # what the node leaves to emit if it is the last one kept
    left: list[Law] = []
    for node in range(tree.num_nodes):
        p = as_law(target_probs[node])
        p = p / p.sum()
        if node + 1 == tree.num_nodes:
            heights.append(weight)
            left.append(p)
            break
        token = tree.token_ids[node + 1]
        q = draft_row(tree, node)
        q = one_hot(token, len(p)) if q is None else q
        assert q[token] > 0.0, f"node {node + 1} holds a token its draft law gives no probability"
        heights.append(pass_probability(weight, float(np.maximum(weight * p - q, 0.0).sum())))
        left.append(residual(weight * p, q))
        weight = min(1.0, weight * p[token] / q[token])
        if weight == 0.0:
            # no longer prefix can pass
            break
    last = _longest_passing(coins, heights)
    is_leaf = last + 1 == tree.num_nodes
    (u,) = stream.uniform(position, Purpose.BONUS if is_leaf else Purpose.RESIDUAL)
    return VerifyResult(
        accepted_nodes=list(range(1, last + 1)),
        next_token_id=sample(left[last], u),
        next_kind="bonus" if is_leaf else "recovered",
    )


def pass_probability(weight: float, mass: float) -> float:
    """Return R / (R + 1 - w); 1 where nothing can be rejected.

    Args:
        weight: w, in [0, 1].
        mass: R, mass of (w p - q)+.
    """
    denominator = mass + 1.0 - weight
    return mass / denominator if denominator > 0.0 else 1.0


def _longest_passing(coins: Sequence[Coin], heights: Sequence[float]) -> int:
    """Return the last node whose number is below its height; the root always passes."""
    return max((node for node in range(1, len(heights)) if coins[node] < heights[node]), default=0)


BLOCK = exact_rule(
    name="block",
    topology="chain",
    draft="sampled",
    sentence="The text has the target's law; the longest good prefix of a drafted chain is kept.",
    verify=verify_block,
)
