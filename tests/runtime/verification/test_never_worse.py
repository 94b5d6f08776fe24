"""How many tokens the exact rules commit, enumerated: joint rules never commit fewer than local ones."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.verification.enumeration import (
    Branching,
    Model,
    draw_tree,
    expected_length,
    step_law,
    toy_models,
)
from specdec.verification.registry import rule_named

# the same sum of products in another order
LENGTH_TOLERANCE = 1e-12
NUM_PAIRS = 200


def length_of(rule: str, target: Model, draft: Model, branching: Branching) -> float:
    bound = rule_named(rule)
    return expected_length(
        step_law(lambda stream: draw_tree(stream, draft, branching, bound.rule.draft), bound, target)
    )


def test_block_verification_commits_at_least_what_token_rejection_commits() -> None:
    gains = []
    for seed in range(NUM_PAIRS):
        target, draft = toy_models("plain", 3, seed)
        branching = [1, 1, 1] if seed % 8 == 0 else [1, 1]
        gains.append(
            length_of("block", target, draft, branching) - length_of("rejection", target, draft, branching)
        )
    assert min(gains) > -LENGTH_TOLERANCE
    assert np.mean(gains) > 0.01, "the pairs must leave something to gain"


def test_traversal_verification_commits_what_block_verification_commits_on_chains() -> None:
    for seed in range(20):
        target, draft = toy_models("plain", 3, seed)
        traversal, block = (length_of(rule, target, draft, [1, 1, 1]) for rule in ("traversal", "block"))
        assert abs(traversal - block) < LENGTH_TOLERANCE


@pytest.mark.parametrize("branching", [[2, 1], {(): 2, (0,): 1}, {(): 1, (0,): 2}, [3]], ids=str)
def test_traversal_verification_commits_at_least_what_the_other_rules_commit_on_trees(
    branching: Branching,
) -> None:
    """Against recursive rejection of the same tree, and block verification of its first path."""
    depth = len(branching) if branching != [3] else 1
    gains = []
    for seed in range(25):
        target, draft = toy_models("plain", 4 if branching == [3] else 3, seed)
        traversal = length_of("traversal", target, draft, branching)
        assert traversal > length_of("block", target, draft, [1] * depth) - LENGTH_TOLERANCE
        gains.append(traversal - length_of("rejection", target, draft, branching))
    assert min(gains) > -LENGTH_TOLERANCE


def test_more_independent_siblings_never_commit_less() -> None:
    """A second sibling is a second chance; SpecTr's k-seq keeps (1 - 1/e) of what is possible."""
    for seed in range(15):
        target, draft = toy_models("plain", 4, seed)
        for rule in ("multi-round", "k-seq"):
            lengths = [length_of(rule, target, draft, [count]) for count in (1, 2, 3)]
            assert lengths[0] <= lengths[1] + LENGTH_TOLERANCE
            assert lengths[1] <= lengths[2] + LENGTH_TOLERANCE
        # no selection from k independent draws can accept more than this
        possible = float(np.minimum(target(()), 1.0 - (1.0 - draft(())) ** 3).sum())
        assert lengths[2] - 1.0 >= (1.0 - 1.0 / np.e) * possible - LENGTH_TOLERANCE
