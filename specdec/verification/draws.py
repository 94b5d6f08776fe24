"""Draw the children of a node in the way a rule asks for.

Owns the match between `Rule.draft` and a way of drawing. Does not know models or how large trees are.
"""

from __future__ import annotations

import numpy as np

from specdec.random_streams import Purpose, UniformSource
from specdec.sampling import draw_without_replacement, sample
from specdec.verification.laws import Law
from specdec.verification.rules import DraftGuarantee


def draw_children(
    q: Law, count: int, guarantee: DraftGuarantee, stream: UniformSource, position: int, node: int
) -> list[int]:
    """Choose the tokens of up to `count` children of one node, in the order the tree must keep.

    Args:
        q: the draft's law `[vocab]`; for drawn children it is what `DraftTree.draft_probs` must hold.
        count: how many; it must not depend on drawn tokens of the same node.
        guarantee: what the rule asks for. "any" and "deterministic": the most probable ids, lowest first
            among equals, zeros left out.
        stream: the request's random numbers.
        position: absolute position of the step's root.
        node: the parent node, so that no two nodes share numbers.
    """
    if guarantee == "iid":
        return [sample(q, u) for u in stream.uniform(position, Purpose.DRAFT, count=count, node=node)]
    if guarantee in ("sampled", "without_replacement"):
        assert count <= 1 or guarantee == "without_replacement", "this rule verifies one child per node"
        return draw_without_replacement(q, count, stream, position, node)
    best = np.argsort(-q, kind="stable")[:count]
    return [int(token) for token in best if q[token] > 0.0]
