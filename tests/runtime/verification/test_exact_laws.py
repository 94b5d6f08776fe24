"""The emitted joint law of every exact rule, enumerated through the code that serves.

Drafting, acceptance and the draw of the next token run on numbers that fork, so what is compared with the
target's law is the product's own path. That the comparison has teeth is shown in `test_mutations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specdec.exact_law import exact_law
from specdec.random_streams import RandomStream, UniformSource
from specdec.sampling import LazyProbs, draw_without_replacement, process_logits
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree, chain_tree, merge_trees, tree_from_paths
from specdec.verification.draws import draw_children
from specdec.verification.enumeration import (
    POSITION,
    TOY_KINDS,
    Branching,
    Model,
    StepLaw,
    declared_law,
    draw_tree,
    expected_length,
    law_error,
    shared_noise_step_law,
    step_law,
    toy_models,
)
from specdec.verification.laws import Law, one_hot
from specdec.verification.registry import EXACT_RULES, rule_named

# fp64 sums over a few thousand branches; measured errors stay below 1e-14
LAW_TOLERANCE = 1e-12

TOY_P = np.array([0.5, 0.3, 0.15, 0.05])
TOY_Q = np.array([0.1, 0.6, 0.2, 0.1])

EXACT_NAMES = [rule.name for rule in EXACT_RULES]
TREE_RULES = [rule.name for rule in EXACT_RULES if rule.topology == "tree"]
# exact whatever the children are, as long as they are known before verification draws
TREES_OF_ANY_ORIGIN = [rule.name for rule in EXACT_RULES if rule.draft == "any" and rule.name != "greedy"]


@dataclass(frozen=True)
class Shape:
    """A tree and the vocabulary it is small enough for."""

    vocab: int
    branching: Branching


CHAINS = {
    "chain of 1": Shape(8, [1]),
    "chain of 3": Shape(4, [1, 1, 1]),
}
TREES = {
    "3 siblings": Shape(5, [3]),
    "2 paths": Shape(4, [2, 1]),
    "7 nodes of depth 2": Shape(3, [2, 2]),
    "7 nodes of depth 3": Shape(3, [2, 1, 1]),
    # of the first child more is drafted than of the others
    "uneven": Shape(3, {(): 2, (0,): 2, (0, 0): 1}),
}


@pytest.mark.parametrize("kind", TOY_KINDS)
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        *((name, shape) for name in EXACT_NAMES for shape in CHAINS),
        *((name, shape) for name in TREE_RULES for shape in TREES),
    ],
)
def test_every_exact_rule_emits_the_target_law(rule: str, shape: str, kind: str) -> None:
    """Rules 2.1 to 2.11; a wrong residual, order, coin, weight or vocabulary map moves the joint law."""
    size = {**CHAINS, **TREES}[shape]
    assert rule_error(rule, kind, size.vocab, size.branching) < LAW_TOLERANCE


def rule_error(name: str, kind: str, vocab: int, branching: Branching) -> float:
    target, draft = toy_models(kind, vocab)
    rule = rule_named(name)
    step = step_law(lambda stream: draw_tree(stream, draft, branching, rule.rule.draft), rule, target)
    return law_error(step, declared_law(rule, target, draft, len(branching)), vocab)


DETERMINISTIC_TREES = {
    "no drafts": DraftTree(token_ids=[0], parents=[-1]),
    "chain of 3": chain_tree(0, [1, 0, 2]),
    "siblings": tree_from_paths(0, [[2], [0], [1]]),
    "every token a sibling": tree_from_paths(0, [[3], [0], [1], [2]]),
    "7 nodes": tree_from_paths(0, [[1, 2, 3], [1, 0], [2, 2]]),
    "duplicate siblings": DraftTree(token_ids=[0, 1, 1, 0], parents=[-1, 0, 0, 2]),
}


@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        (name, tree)
        for name in EXACT_NAMES
        for tree in DETERMINISTIC_TREES
        if name in TREE_RULES or DETERMINISTIC_TREES[tree].is_chain
    ],
)
def test_deterministic_children_emit_the_target_law(rule: str, tree: str) -> None:
    """Rule 2.2 under every rule, duplicates included: where a tree has no draft law, q is one-hot."""
    bound = rule_named(rule)
    for kind in ("plain", "zeros", "ties", "disjoint", "near one-hot"):
        target, draft = toy_models(kind, 4)
        step = step_law(lambda _: DETERMINISTIC_TREES[tree], bound, target)
        assert law_error(step, declared_law(bound, target, draft, 0), 4) < LAW_TOLERANCE, kind


@pytest.mark.parametrize("max_nodes", [7, 5, 4])
@pytest.mark.parametrize("lookup_first", [True, False])
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_merged_trees_emit_the_target_law(rule: str, lookup_first: bool, max_nodes: int) -> None:
    """Lookup and sampled head in one tree, overlapping and cut: a law kept for mixed children would show."""
    vocab = 3
    target, draft = toy_models("plain", vocab)
    lookup = tree_from_paths(0, [[1, 2], [1, 0]])

    def make_tree(stream: UniformSource) -> DraftTree:
        head = draw_tree(stream, draft, [2, 1], "without_replacement")
        pair = (lookup, head) if lookup_first else (head, lookup)
        return merge_trees(*pair, max_nodes)

    assert law_error(step_law(make_tree, rule_named(rule), target), target, vocab) < LAW_TOLERANCE


@pytest.mark.parametrize("rule", TREES_OF_ANY_ORIGIN)
def test_rules_that_ignore_draft_laws_are_exact_for_sampled_trees_too(rule: str) -> None:
    """What lets a merged or re-ranked tree drop its draft laws."""
    target, draft = toy_models("plain", 4)

    def best_two_of_three(stream: UniformSource) -> DraftTree:
        drawn = draw_without_replacement(draft(()), 3, stream, POSITION, 0)
        return tree_from_paths(0, [[token] for token in sorted(drawn, key=lambda t: -draft(())[t])[:2]])

    assert law_error(step_law(best_two_of_three, rule_named(rule), target), target, 4) < LAW_TOLERANCE


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_second_copy_of_a_sibling_drawn_without_replacement_is_harmless(rule: str) -> None:
    """B46: it is passed over, with what hangs below it, and the law stays p."""
    law = torch.tensor(np.array([TOY_Q] * 4))

    def make_tree(stream: UniformSource) -> DraftTree:
        (token,) = draw_without_replacement(TOY_Q, 1, stream, POSITION, 0)
        return DraftTree(token_ids=[0, token, token, 1], parents=[-1, 0, 0, 2], draft_probs=law)

    assert law_error(step_law(make_tree, rule_named(rule), lambda _: TOY_P), lambda _: TOY_P, 4) < (
        LAW_TOLERANCE
    )


@pytest.mark.parametrize("rule", EXACT_NAMES)
def test_texts_cut_at_an_end_token_have_the_target_law(rule: str) -> None:
    """EOS inside an accepted run: what would follow it is dropped, and must not steer what precedes it."""
    vocab, end = 4, 2
    bound = rule_named(rule)
    target, draft = toy_models("plain", vocab)
    step = step_law(lambda stream: draw_tree(stream, draft, [1, 1, 1], bound.rule.draft), bound, target)
    next_law = declared_law(bound, target, draft, 3)

    def ending(context: tuple[int, ...]) -> Law:
        # an ended text is padded with end tokens, so that all have one length
        return one_hot(end, vocab) if end in context else next_law(context)

    cut: StepLaw = {}
    for tokens, probability in step.items():
        kept = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        cut[kept] = cut.get(kept, 0.0) + probability
    assert law_error(cut, ending, vocab) < LAW_TOLERANCE


@pytest.mark.parametrize("kind", TOY_KINDS)
@pytest.mark.parametrize("length", [1, 2])
def test_a_drafter_that_shares_the_noise_leaves_the_law_and_matches_as_promised(
    kind: str, length: int
) -> None:
    """Rule 2.11: the draft is the winner of the same race with q."""
    vocab = 4
    target, draft = toy_models(kind, vocab)

    def make_tree(stream: UniformSource) -> DraftTree:
        tokens: list[int] = []
        for depth in range(length):
            tokens += stream.race(POSITION + depth, draft(tuple(tokens)))
        return chain_tree(0, tokens)

    step = shared_noise_step_law(make_tree, rule_named("coupled"), target)
    assert law_error(step, target, vocab) < LAW_TOLERANCE
    if length == 1:
        p, q = target(()), draft(())
        match = sum(
            1.0 / np.maximum(p / p[j], q / q[j]).sum() for j in range(vocab) if p[j] > 0.0 and q[j] > 0.0
        )
        accepted = expected_length(step) - 1.0
        distance = float(np.abs(p - q).sum() / 2)
        assert abs(accepted - match) < LAW_TOLERANCE
        assert accepted >= (1.0 - distance) / (1.0 + distance) - LAW_TOLERANCE


def test_races_on_the_same_noise_are_drawn_as_they_are_enumerated() -> None:
    """Ties the closed form of the pair of winners to the real generator."""
    num_draws = 20_000
    pairs = np.zeros((4, 4))
    stream = RandomStream(6)
    for position in range(num_draws):
        pairs[stream.race(position, TOY_Q)[0], stream.race(position, TOY_P)[0]] += 1
    step = shared_noise_step_law(
        lambda stream: chain_tree(0, stream.race(POSITION, TOY_Q)), rule_named("coupled"), lambda _: TOY_P
    )
    assert abs(np.trace(pairs) / num_draws - (expected_length(step) - 1.0)) < 0.01
    assert np.abs(pairs.sum(0) / num_draws - TOY_P).max() < 0.01
    assert np.abs(pairs.sum(1) / num_draws - TOY_Q).max() < 0.01


SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.75),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("params", SETTINGS, ids=repr)
@pytest.mark.parametrize("same_settings_for_draft", [True, False])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampling_settings_hold_at_every_position(
    rule: str, params: SamplingParams, same_settings_for_draft: bool
) -> None:
    """B41, B42: settings on the bonus only, or on one side only, change the law of position 1 or 2."""
    target_logits = torch.log(torch.tensor(np.array([TOY_P, TOY_P[::-1].copy()])))
    draft_params = params if same_settings_for_draft else SETTINGS[0]
    q = process_logits(torch.log(torch.tensor(TOY_Q))[None], draft_params)[0].numpy()
    rows = process_logits(target_logits, params).numpy()
    bound = rule_named(rule)

    def target(context: tuple[int, ...]) -> Law:
        return rows[len(context) % 2]

    def run(stream: UniformSource) -> tuple[int, ...]:
        tree = draw_tree(stream, lambda _: q, [1, 1], "sampled")
        result = bound.verify(tree, LazyProbs(target_logits[[0, 1, 0]], params), stream, POSITION)
        return (*tree.tokens_of(result.accepted_nodes), result.next_token_id)

    step = exact_law(run)
    assert law_error(step, target, 4) < LAW_TOLERANCE
    if params.top_k == 2 or params.top_p == 0.75:
        assert {tokens[0] for tokens, probability in step.items() if probability > 0.0} == {0, 1}


def test_children_are_drawn_as_a_rule_asks() -> None:
    stream = RandomStream(3)
    q = np.array([0.0, 0.2, 0.5, 0.3])
    assert draw_children(q, 3, "deterministic", stream, POSITION, 0) == [2, 3, 1]
    assert draw_children(q, 4, "any", stream, POSITION, 0) == [2, 3, 1]
    assert sorted(draw_children(q, 4, "without_replacement", stream, POSITION, 0)) == [1, 2, 3]
    assert len(draw_children(q, 4, "iid", stream, POSITION, 0)) == 4
    with pytest.raises(AssertionError, match="one child"):
        draw_children(q, 2, "sampled", stream, POSITION, 0)


def model_is_context_dependent(model: Model) -> bool:
    return not np.array_equal(model(()), model((1,)))


@pytest.mark.parametrize("kind", TOY_KINDS)
def test_toy_laws_depend_on_the_context(kind: str) -> None:
    """A rule that reads the row of another node must not get away with it."""
    target, draft = toy_models(kind, 4)
    assert model_is_context_dependent(target)
    assert kind == "exhausted" or model_is_context_dependent(draft)
