"""The emitted law of every verification rule, enumerated exactly through the code that serves.

Drafting, acceptance and the draw of the next token run on numbers that fork (`specdec.exact_law`), so what
is compared with the target's law is the product's own path. Planted mutations show that the comparison has
teeth.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from specdec.exact_law import exact_law
from specdec.random_streams import Coin, Purpose, UniformSource
from specdec.sampling import LazyProbs, draw_without_replacement, process_logits
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree, chain_tree, merge_trees, tree_from_paths
from specdec.verification import deterministic, rejection
from specdec.verification.registry import RULES
from specdec.verification.rejection import verify_rejection
from specdec.verification.rules import Rule

# fp64 sums over a few thousand branches; measured errors stay below 1e-14
LAW_TOLERANCE = 1e-12
# a planted mutation moves the law by more than a percent; far from rounding, far from luck
MUTATION_SHIFT = 1e-3
POSITION = 11

Law = np.ndarray
Model = Callable[[tuple[int, ...]], Law]

TOY_P = np.array([0.5, 0.3, 0.15, 0.05])
TOY_Q = np.array([0.1, 0.6, 0.2, 0.1])


def context_rng(name: str, context: tuple[int, ...]) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr((name, context)).encode()))


def toy_models(kind: str, vocab: int) -> tuple[Model, Model]:
    """Target and draft whose laws depend on the whole context; `kind` names the awkward case."""

    def law(name: str, context: tuple[int, ...]) -> Law:
        return context_rng(name, context).dirichlet(np.full(vocab, 0.7))

    def normalised(weights: Law) -> Law:
        return weights / weights.sum()

    def target(context: tuple[int, ...]) -> Law:
        p = law("p", context)
        if kind == "zeros":
            p = p.copy()
            p[len(context) % vocab] = 0.0
        elif kind == "ties":
            p = np.ceil(p * 4)
        elif kind == "disjoint":
            p = p * (np.arange(vocab) < vocab // 2)
        elif kind == "near one-hot":
            p = np.where(np.arange(vocab) == len(context) % vocab, 1.0, 1e-9)
        return normalised(p)

    def draft(context: tuple[int, ...]) -> Law:
        q = law("q", context)
        if kind == "equal":
            return target(context)
        if kind == "zeros":
            q = q.copy()
            q[(len(context) + 1) % vocab] = 0.0
        elif kind == "ties":
            q = np.ceil(q * 4)
        elif kind == "disjoint":
            q = q * (np.arange(vocab) >= vocab // 2)
        elif kind == "near one-hot":
            q = np.where(np.arange(vocab) == (len(context) + 1) % vocab, 1.0, 1e-9)
        elif kind == "exhausted":
            q = np.where(np.arange(vocab) == vocab - 1, 1.0, 0.0)
        elif kind == "reduced vocabulary":
            q = q * (np.arange(vocab) % 2 == 0)
        return normalised(q)

    return target, draft


KINDS = [
    "plain",
    "equal",
    "zeros",
    "ties",
    "disjoint",
    "near one-hot",
    "exhausted",
    "reduced vocabulary",
]


def contexts(tree: DraftTree) -> list[tuple[int, ...]]:
    result: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        result.append((*result[tree.parents[node]], tree.token_ids[node]))
    return result


def target_rows(tree: DraftTree, target: Model) -> torch.Tensor:
    return torch.tensor(np.array([target(context) for context in contexts(tree)]))


def sampled_tree(stream: UniformSource, draft: Model, branching: Sequence[int]) -> DraftTree:
    """Draw a tree level by level; `branching[d]` children below each node of depth d."""
    token_ids, parents, rows = [0], [-1], []
    context: list[tuple[int, ...]] = [()]
    depth = [0]
    node = 0
    while node < len(token_ids):
        q = draft(context[node])
        if depth[node] < len(branching):
            for token in draw_without_replacement(q, branching[depth[node]], stream, POSITION, node):
                token_ids.append(token)
                parents.append(node)
                context.append((*context[node], token))
                depth.append(depth[node] + 1)
        rows.append(q)
        node += 1
    return DraftTree(token_ids=token_ids, parents=parents, draft_probs=torch.tensor(np.array(rows)))


def emitted_tokens(tree: DraftTree, rule: Rule, target: Model, stream: UniformSource) -> tuple[int, ...]:
    result = rule.verify(tree, target_rows(tree, target), stream, POSITION, {})
    return (*tree.tokens_of(result.accepted_nodes), result.next_token_id)


def law_error(
    make_tree: Callable[[UniformSource], DraftTree],
    rule: Rule,
    target: Model,
    vocab: int,
    wrap: Callable[[UniformSource], UniformSource] = lambda stream: stream,
) -> float:
    """Largest error of the joint law of the tokens one step emits, completed to full length by the target."""

    def run(stream: UniformSource) -> tuple[int, ...]:
        return emitted_tokens(make_tree(stream), rule, target, wrap(stream))

    emitted_law = rule.emitted_law
    assert emitted_law is not None
    law = exact_law(run)
    assert abs(sum(law.values()) - 1.0) < LAW_TOLERANCE, "the enumeration lost or gained probability"
    length = max(len(tokens) for tokens in law)

    def probability(tokens: tuple[int, ...], start: int) -> float:
        steps = range(start, length)
        return float(np.prod([emitted_law(target(tokens[:i]), TOY_Q, {})[tokens[i]] for i in steps]))

    error = 0.0
    for tokens in itertools.product(range(vocab), repeat=length):
        emitted = sum(law.get(tokens[:n], 0.0) * probability(tokens, n) for n in range(1, length + 1))
        error = max(error, abs(emitted - probability(tokens, 0)))
    return error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("vocab", "branching"),
    [(6, [1]), (5, [1, 1, 1]), (6, [3]), (4, [2, 1]), (3, [2, 2])],
    ids=["chain of 1", "chain of 3", "3 siblings", "2 paths", "7 nodes"],
)
def test_rejection_emits_the_target_law(kind: str, vocab: int, branching: list[int]) -> None:
    """Rules 2.1, 2.5 and 2.10; a wrong residual, order, coin or vocabulary map moves the law."""
    target, draft = toy_models(kind, vocab)
    error = law_error(
        lambda stream: sampled_tree(stream, draft, branching), RULES["rejection"], target, vocab
    )
    assert error < LAW_TOLERANCE


DETERMINISTIC_TREES = {
    "no drafts": DraftTree(token_ids=[0], parents=[-1]),
    "chain of 3": chain_tree(0, [1, 0, 2]),
    "siblings": tree_from_paths(0, [[2], [0], [1]]),
    "every token a sibling": tree_from_paths(0, [[3], [0], [1], [2]]),
    "7 nodes": tree_from_paths(0, [[1, 2, 3], [1, 0], [2, 2]]),
    "duplicate siblings": DraftTree(token_ids=[0, 1, 1, 0], parents=[-1, 0, 0, 2]),
}


@pytest.mark.parametrize("kind", ["plain", "zeros", "ties", "disjoint", "near one-hot"])
@pytest.mark.parametrize("name", DETERMINISTIC_TREES)
@pytest.mark.parametrize("rule", ["deterministic", "rejection", "coupled"])
def test_deterministic_children_emit_the_target_law(rule: str, name: str, kind: str) -> None:
    """Rule 2.2 on trees, duplicates included; a tree without draft laws verifies alike under both rules."""
    target, _ = toy_models(kind, 4)
    assert law_error(lambda _: DETERMINISTIC_TREES[name], RULES[rule], target, 4) < LAW_TOLERANCE


@pytest.mark.parametrize("max_nodes", [7, 5, 4])
@pytest.mark.parametrize("lookup_first", [True, False])
def test_merged_trees_emit_the_target_law(lookup_first: bool, max_nodes: int) -> None:
    """Lookup and sampled head in one tree, overlapping and cut: a law kept for mixed children would show."""
    vocab = 3
    target, draft = toy_models("plain", vocab)
    lookup = tree_from_paths(0, [[1, 2], [1, 0]])

    def make_tree(stream: UniformSource) -> DraftTree:
        head = sampled_tree(stream, draft, [2, 1])
        pair = (lookup, head) if lookup_first else (head, lookup)
        return merge_trees(*pair, max_nodes)

    assert law_error(make_tree, RULES["rejection"], target, vocab) < LAW_TOLERANCE


@pytest.mark.parametrize("rule", ["deterministic", "coupled"])
def test_rules_that_ignore_draft_laws_are_exact_for_sampled_trees_too(rule: str) -> None:
    """What lets a merged or re-ranked tree drop its draft laws."""
    target, draft = toy_models("plain", 4)

    def best_two_of_three(stream: UniformSource) -> DraftTree:
        drawn = draw_without_replacement(draft(()), 3, stream, POSITION, 0)
        return tree_from_paths(0, [[token] for token in sorted(drawn, key=lambda t: -draft(())[t])[:2]])

    assert law_error(best_two_of_three, RULES[rule], target, 4) < LAW_TOLERANCE


class OneCoin:
    """Mutation: every decision of verification looks at the same number."""

    def __init__(self, stream: UniformSource) -> None:
        self._stream = stream

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> list[Coin]:
        return [self._stream.uniform(position, Purpose.ACCEPT)[0]] * count


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
def test_enumeration_catches_a_wrong_residual(
    mutation: Callable[[Law, Law, int], tuple[Law, Law]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection, "after_rejection", mutation)
    # six ids: with four, the residual sits on one id and hides what is done to q
    target, draft = toy_models("plain", 6)
    error = law_error(lambda stream: sampled_tree(stream, draft, [3]), RULES["rejection"], target, 6)
    assert error > MUTATION_SHIFT


@pytest.mark.parametrize(("rule", "branching"), [("rejection", [2]), ("rejection", [1, 1])])
def test_enumeration_catches_a_reused_coin(rule: str, branching: list[int]) -> None:
    target, draft = toy_models("plain", 4)
    error = law_error(
        lambda stream: sampled_tree(stream, draft, branching), RULES[rule], target, 4, wrap=OneCoin
    )
    assert error > MUTATION_SHIFT


def test_enumeration_catches_a_reused_coin_among_deterministic_children() -> None:
    target, _ = toy_models("plain", 4)
    tree = DETERMINISTIC_TREES["siblings"]
    assert law_error(lambda _: tree, RULES["deterministic"], target, 4, wrap=OneCoin) > MUTATION_SHIFT


def reordered(tree: DraftTree, num_kept: int) -> DraftTree:
    """Mutation: siblings in the order of their draft probability instead of draw order."""
    assert tree.draft_probs is not None
    law = tree.draft_probs[0]
    tokens = sorted(tree.token_ids[1:], key=lambda token: -float(law[token]))[:num_kept]
    return DraftTree(
        token_ids=[tree.token_ids[0], *tokens],
        parents=[-1] + [0] * len(tokens),
        draft_probs=law.repeat(len(tokens) + 1, 1),
    )


@pytest.mark.parametrize(("num_drawn", "num_kept"), [(2, 2), (3, 2), (2, 1)])
def test_enumeration_catches_reordered_or_reranked_siblings(num_drawn: int, num_kept: int) -> None:
    target, draft = toy_models("plain", 4)
    error = law_error(
        lambda stream: reordered(sampled_tree(stream, draft, [num_drawn]), num_kept),
        RULES["rejection"],
        target,
        4,
    )
    assert error > MUTATION_SHIFT


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
    tree = DETERMINISTIC_TREES["siblings"]
    assert law_error(lambda _: tree, RULES["deterministic"], target, 4) > MUTATION_SHIFT


def test_enumeration_catches_a_draft_law_that_was_not_the_one_drawn_from() -> None:
    """B41: q recorded before a temperature that the draw had."""
    target, draft = toy_models("plain", 4)

    def make_tree(stream: UniformSource) -> DraftTree:
        tree = sampled_tree(stream, lambda c: draft(c) ** 2 / (draft(c) ** 2).sum(), [1])
        return chain_tree(0, tree.token_ids[1:], draft_probs=torch.tensor(draft(())).repeat(2, 1))

    assert law_error(make_tree, RULES["rejection"], target, 4) > MUTATION_SHIFT


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
def test_sampling_settings_hold_at_every_position(
    params: SamplingParams, same_settings_for_draft: bool
) -> None:
    """B41, B42: settings on the bonus only, or on one side only, change the law of position 1 or 2."""
    target_logits = torch.log(torch.tensor(np.array([TOY_P, TOY_P[::-1].copy()])))
    draft_params = params if same_settings_for_draft else SETTINGS[0]
    q = process_logits(torch.log(torch.tensor(TOY_Q))[None], draft_params)[0]
    rows = process_logits(target_logits, params).numpy()

    def target(context: tuple[int, ...]) -> Law:
        return rows[len(context) % 2]

    def run(stream: UniformSource) -> tuple[int, ...]:
        tree = sampled_tree(stream, lambda _: q.numpy(), [1, 1])
        lazy = LazyProbs(target_logits[[0, 1, 0]], params)
        result = verify_rejection(tree, lazy, stream, POSITION)
        return (*tree.tokens_of(result.accepted_nodes), result.next_token_id)

    law = exact_law(run)
    for tokens in itertools.product(range(4), repeat=3):
        wanted = float(np.prod([target(tokens[:i])[tokens[i]] for i in range(3)]))
        emitted = sum(
            law.get(tokens[:n], 0.0) * float(np.prod([target(tokens[:i])[tokens[i]] for i in range(n, 3)]))
            for n in (1, 2, 3)
        )
        assert abs(emitted - wanted) < LAW_TOLERANCE
        if params.top_k == 2 or params.top_p == 0.75:
            assert wanted == 0.0 or tokens[0] in (0, 1)


def test_duplicate_sampled_siblings_are_harmless() -> None:
    """B46: a second copy is passed over, the law stays p."""
    law = torch.tensor(np.array([TOY_Q] * 3))

    def make_tree(stream: UniformSource) -> DraftTree:
        (token,) = draw_without_replacement(TOY_Q, 1, stream, POSITION, 0)
        return DraftTree(token_ids=[0, token, token], parents=[-1, 0, 0], draft_probs=law)

    assert law_error(make_tree, RULES["rejection"], lambda _: TOY_P, 4) < LAW_TOLERANCE


def test_greedy_rule_of_the_registry_emits_the_argmax_law() -> None:
    for kind in ("plain", "ties"):
        target, draft = toy_models(kind, 4)
        error = law_error(partial(sampled_tree, draft=draft, branching=[2, 1]), RULES["greedy"], target, 4)
        assert error < LAW_TOLERANCE


def test_registry_names_its_rules_and_all_are_lossless() -> None:
    assert all(name == rule.name and rule.kind == "lossless" for name, rule in RULES.items())
