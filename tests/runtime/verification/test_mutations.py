"""Mistakes that verifiers in the field have made, planted: the enumeration must see every one.

A mutation that no rule's law notices would mean that `test_exact_laws.py` proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.random_streams import Coin, Purpose, UniformSource
from specdec.sampling import as_law, sample
from specdec.tree import DraftTree, chain_tree, tree_from_paths
from specdec.verification import block, deterministic, rejection
from specdec.verification.enumeration import (
    POSITION,
    Branching,
    declared_law,
    draw_tree,
    law_error,
    step_law,
    toy_models,
)
from specdec.verification.laws import Law
from specdec.verification.registry import EXACT_RULES, RULES
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import BoundRule, Knobs, Rule
from specdec.verification.walk import draft_row

# a planted mutation moves the law by more than this; exact rules stay a billion times below
MUTATION_SHIFT = 1e-3
# six ids: with four, the residual often sits on one id and hides what is done to q
VOCAB = 6

TREE_RULES = [rule.name for rule in EXACT_RULES if rule.topology == "tree"]
SAMPLED = [rule.name for rule in EXACT_RULES if rule.name != "greedy"]
DRAWS_FROM_Q = [rule.name for rule in EXACT_RULES if rule.uses_draft_probs]
SIBLINGS_FROM_Q = [name for name in DRAWS_FROM_Q if name in TREE_RULES]


def error_of(
    rule: Rule,
    branching: Branching,
    vocab: int = VOCAB,
    change_tree: Callable[[DraftTree], DraftTree] = lambda tree: tree,
) -> float:
    target, draft = toy_models("plain", vocab)
    bound = BoundRule(rule=rule, knobs={})

    def make_tree(stream: UniformSource) -> DraftTree:
        return change_tree(draw_tree(stream, draft, branching, rule.draft))

    step = step_law(make_tree, bound, target)
    return law_error(step, declared_law(bound, target, draft, len(branching)), vocab)


class OneCoin:
    """Every decision of a step looks at the same number."""

    def __init__(self, stream: UniformSource) -> None:
        self._stream = stream

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> Sequence[Coin]:
        return [self._stream.uniform(POSITION, Purpose.ACCEPT)[0]] * count

    def race(self, position: int, rates: Law, count: int = 1) -> list[int]:
        (u,) = self._stream.uniform(POSITION, Purpose.ACCEPT)
        return [sample(rates, u)]


@pytest.mark.parametrize(
    ("rule", "branching"),
    [
        *((name, [1, 1]) for name in SAMPLED),
        # the coupled rule draws one number per level: among siblings there is none to reuse
        *((name, [2]) for name in SAMPLED if name in TREE_RULES and name != "coupled"),
    ],
)
def test_enumeration_catches_a_reused_coin(rule: str, branching: list[int]) -> None:
    """SGLang PR #7231, and acceptance of the second token on the number of the first."""

    def reuse(
        tree: DraftTree, rows: ProbRows, stream: UniformSource, position: int, knobs: Knobs
    ) -> VerifyResult:
        return RULES[rule].verify(tree, rows, OneCoin(stream), position, knobs)

    assert error_of(replace(RULES[rule], verify=reuse), branching, vocab=4) > MUTATION_SHIFT


@pytest.mark.parametrize("rule", SAMPLED)
def test_enumeration_catches_a_recovered_token_drawn_from_p(rule: str) -> None:
    def resample(
        tree: DraftTree, rows: ProbRows, stream: UniformSource, position: int, knobs: Knobs
    ) -> VerifyResult:
        result = RULES[rule].verify(tree, rows, stream, position, knobs)
        if result.next_kind == "bonus":
            return result
        last = result.accepted_nodes[-1] if result.accepted_nodes else 0
        (_, u) = stream.uniform(position, Purpose.RESIDUAL, count=2)
        return replace(result, next_token_id=sample(rows[last], u))

    assert error_of(replace(RULES[rule], verify=resample), [1]) > MUTATION_SHIFT


@pytest.mark.parametrize("rule", [rule.name for rule in EXACT_RULES])
def test_enumeration_catches_rows_read_one_node_off(rule: str) -> None:
    """The verifier looks at p after the node before the one it means."""

    def shifted(
        tree: DraftTree, rows: ProbRows, stream: UniformSource, position: int, knobs: Knobs
    ) -> VerifyResult:
        assert isinstance(rows, Tensor)
        return RULES[rule].verify(tree, rows.roll(1, 0), stream, position, knobs)

    branching = [1, 1] if RULES[rule].topology == "chain" else [2, 1]
    assert error_of(replace(RULES[rule], verify=shifted), branching, vocab=4) > MUTATION_SHIFT


@pytest.mark.parametrize("rule", TREE_RULES)
def test_enumeration_catches_a_parent_off_by_one(rule: str) -> None:
    """The walk goes down a tree whose parents are not those under which the target's rows were computed."""

    def rewired(
        tree: DraftTree, rows: ProbRows, stream: UniformSource, position: int, knobs: Knobs
    ) -> VerifyResult:
        parents = [-1, *(max(parent - 1, 0) for parent in tree.parents[1:])]
        return RULES[rule].verify(replace(tree, parents=parents), rows, stream, position, knobs)

    mutated = replace(RULES[rule], verify=rewired)
    if rule != "greedy":
        assert error_of(mutated, [2, 1], vocab=4) > MUTATION_SHIFT
        return
    # the second token of this chain is the root's greedy choice, and must not be taken for it
    target, _ = toy_models("plain", 4)
    best = int(target(()).argmax())
    tree = chain_tree(0, [(best + 1) % 4, best])
    bound = BoundRule(rule=mutated, knobs={})
    step = step_law(lambda _: tree, bound, target)
    assert law_error(step, declared_law(bound, target, target, 0), 4) > MUTATION_SHIFT


@pytest.mark.parametrize(
    ("rule", "branching"),
    [*((name, [1]) for name in DRAWS_FROM_Q), *((name, [2]) for name in SIBLINGS_FROM_Q)],
)
def test_enumeration_catches_a_residual_that_subtracts_only_the_drawn_token(
    rule: str, branching: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance looks at q of the drawn tokens, as it should; the residual sees nothing else of q."""

    def drawn_tokens_only(tree: DraftTree, node: int) -> Law | None:
        q = draft_row(tree, node)
        tokens = [tree.token_ids[child] for child in tree.children[node]]
        return None if q is None else np.where(np.isin(np.arange(len(q)), tokens), q, 0.0)

    module = import_module(f"specdec.verification.{rule.replace('-', '_')}")
    monkeypatch.setattr(module, "draft_row", drawn_tokens_only)
    assert error_of(RULES[rule], branching) > MUTATION_SHIFT


def by_score(num_kept: int) -> Callable[[DraftTree], DraftTree]:
    """Siblings in the order of their draft probability instead of draw order, the best ones kept."""

    def reordered(tree: DraftTree) -> DraftTree:
        assert tree.draft_probs is not None
        law = as_law(tree.draft_probs[0])
        tokens = sorted(tree.token_ids[1:], key=lambda token: -law[token])[:num_kept]
        return DraftTree(
            token_ids=[0, *tokens],
            parents=[-1] + [0] * len(tokens),
            draft_probs=torch.tensor(np.array([law] * (len(tokens) + 1))),
        )

    return reordered


@pytest.mark.parametrize(("num_drawn", "num_kept"), [(2, 2), (3, 2), (2, 1)])
@pytest.mark.parametrize("rule", SIBLINGS_FROM_Q)
def test_enumeration_catches_reordered_or_reranked_siblings(rule: str, num_drawn: int, num_kept: int) -> None:
    assert error_of(RULES[rule], [num_drawn], change_tree=by_score(num_kept)) > MUTATION_SHIFT


def test_enumeration_catches_block_verification_that_stops_at_the_first_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm-ascend #7807 shipped a wrong one; here a failed prefix ends the search."""

    def stops_early(coins: Sequence[Coin], heights: Sequence[float]) -> int:
        last = 0
        for node in range(1, len(heights)):
            if not coins[node] < heights[node]:
                break
            last = node
        return last

    monkeypatch.setattr(block, "_longest_passing", stops_early)
    assert error_of(RULES["block"], [1, 1, 1], vocab=4) > MUTATION_SHIFT


def subtract_only_the_token(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    rest = p.copy()
    rest[token] = max(p[token] - q[token], 0.0)
    left = np.where(np.arange(len(q)) == token, 0.0, q)
    return rest / rest.sum(), left / max(left.sum(), 1e-300)


def keep_the_target(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    left = np.where(np.arange(len(q)) == token, 0.0, q)
    return p, left / max(left.sum(), 1e-300)


def keep_the_drawn_token(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    rest = np.maximum(p - q, 0.0)
    return rest / rest.sum(), q


@pytest.mark.parametrize("mutation", [subtract_only_the_token, keep_the_target, keep_the_drawn_token])
def test_enumeration_catches_a_wrong_state_after_a_rejection(
    mutation: Callable[[Law, Law, int], tuple[Law, Law]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "after_rejection", mutation)
    assert error_of(RULES["rejection"], [3]) > MUTATION_SHIFT


@pytest.mark.parametrize(
    "mutation",
    [lambda law, token: (law, 1.0), lambda law, token: (np.where(np.arange(4) == token, 0.0, law), 1.0)],
    ids=["the token stays", "the rest is not renormalised"],
)
def test_enumeration_catches_a_wrong_rest_after_a_deterministic_rejection(
    mutation: Callable[[Law, int], tuple[Law, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deterministic, "without", mutation)
    target, _ = toy_models("plain", 4)
    tree = tree_from_paths(0, [[2], [0], [1]])
    step = step_law(lambda _: tree, BoundRule(rule=RULES["deterministic"], knobs={}), target)
    assert law_error(step, target, 4) > MUTATION_SHIFT


@pytest.mark.parametrize("rule", DRAWS_FROM_Q)
def test_enumeration_catches_a_draft_law_that_was_not_the_one_drawn_from(rule: str) -> None:
    """B41: q recorded before a temperature that the draw had."""
    target, draft = toy_models("plain", 4)

    def make_tree(stream: UniformSource) -> DraftTree:
        tree = draw_tree(stream, lambda c: draft(c) ** 2 / (draft(c) ** 2).sum(), [1], "sampled")
        return chain_tree(0, tree.token_ids[1:], draft_probs=torch.tensor(draft(())).repeat(2, 1))

    step = step_law(make_tree, BoundRule(rule=RULES[rule], knobs={}), target)
    assert law_error(step, target, 4) > MUTATION_SHIFT
