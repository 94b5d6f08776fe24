"""Greedy verification: commit the longest path of the target's own choices (rule 2.9)."""

from __future__ import annotations

import numpy as np

from specdec.random_streams import UniformSource
from specdec.sampling import as_law
from specdec.tree import DraftTree
from specdec.verification.laws import argmax_law
from specdec.verification.result import ChoiceRows, ProbRows, VerifyResult
from specdec.verification.rules import exact_rule


def verify_greedy(tree: DraftTree, target_argmax: ChoiceRows) -> VerifyResult:
    """Follow the target's own choices down the tree (rule 2.9).

    Args:
        tree: the proposals.
        target_argmax: the target's greedy token after each node (lowest id among equals).
    """
    node, wanted, has_children = 0, target_argmax[0], False
    accepted: list[int] = []
    token_ids, parents = tree.token_ids, tree.parents
    # children stand after their parent, so one sweep is the whole walk
    for child in range(1, len(parents)):
        if parents[child] != node:
            continue
        if token_ids[child] == wanted:
            accepted.append(child)
            node, wanted, has_children = child, target_argmax[child], False
        else:
            has_children = True
    return VerifyResult(
        accepted_nodes=accepted,
        next_token_id=int(wanted),
        next_kind="recovered" if has_children else "bonus",
    )


def _greedy_from_probs(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Give `verify_greedy` the signature of the registry; the numbers are not used."""
    choices = [int(np.argmax(as_law(target_probs[node]))) for node in range(tree.num_nodes)]
    return verify_greedy(tree, choices)


GREEDY = exact_rule(
    name="greedy",
    topology="tree",
    draft="any",
    sentence="The text is the target's greedy text, token for token.",
    verify=_greedy_from_probs,
    emitted_law=argmax_law,
)
