"""What lossy rules promise beyond one drafted token: joint laws, trees, bounds, neutral knobs, p = 0."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from specdec.divergence import overshoot
from specdec.errors import SpecdecError
from specdec.exact_law import exact_law
from specdec.random_streams import RandomStream
from specdec.tree import DraftTree, chain_tree, tree_from_paths
from specdec.verification.enumeration import (
    POSITION,
    TOY_KINDS,
    StepLaw,
    declared_law,
    draw_tree,
    law_error,
    step_law,
    target_rows,
    toy_models,
)
from specdec.verification.gates import FALLBACKS
from specdec.verification.judge import judge_by_score, judge_rule
from specdec.verification.laws import argmax_law
from specdec.verification.registry import LOSSY_RULES, RULES, rule_named
from specdec.verification.rules import BoundRule, GivenKnobs, Rule, bind

LAW_TOLERANCE = 1e-12

Law = np.ndarray

# where the defaults are exact, or let everything pass on a few tokens
KNOBS: dict[str, GivenKnobs] = {
    "thresholds": {"threshold_acc": 0.6, "threshold_single": 0.45},
    "top-k-gate": {"k": 2},
    "top-p-gate": {"mass": 0.6},
    "min-p-gate": {"min_p": 0.4},
    "relaxed": {"top_n": 2, "delta": 0.3},
}
# the deeper and wider cases cost most and add only depth; all kinds are met at the first levels
DEEP_KINDS = ("plain", "zeros")
WITH_LAW = [rule.name for rule in LOSSY_RULES if rule.emitted_law is not None]
ON_TREES = [
    name for name in WITH_LAW if RULES[name].kind == "collaborative" and RULES[name].topology == "tree"
]


def lossy(name: str) -> BoundRule:
    return rule_named(name, KNOBS.get(name))


def chain_step(rule: BoundRule, kind: str, vocab: int, depth: int) -> StepLaw:
    target, draft = toy_models(kind, vocab)
    return step_law(lambda stream: draw_tree(stream, draft, [1] * depth, "sampled"), rule, target)


@pytest.mark.parametrize("kind", TOY_KINDS)
@pytest.mark.parametrize("name", WITH_LAW)
def test_chains_emit_the_declared_joint_law(name: str, kind: str) -> None:
    """Drafted tokens have the emitted law, the bonus the bonus law, each given the tokens before it."""
    rule = lossy(name)
    for vocab, depth in ((4, 2), (3, 3)) if kind in DEEP_KINDS else ((4, 2),):
        target, draft = toy_models(kind, vocab)
        step = chain_step(rule, kind, vocab, depth)
        declared = declared_law(rule, target, draft, depth, "sampled")
        assert law_error(step, declared, vocab) < LAW_TOLERANCE


@pytest.mark.parametrize("name", [name for name in WITH_LAW if RULES[name].draft == "any"])
def test_the_most_probable_drafts_emit_the_declared_law_too(name: str) -> None:
    """What these rules ask of drafting, and how an audit drafts for them."""
    rule = lossy(name)
    for kind in TOY_KINDS:
        target, draft = toy_models(kind, 4)
        step = step_law(
            lambda stream, draft=draft: draw_tree(stream, draft, [1, 1], rule.rule.draft), rule, target
        )
        assert law_error(step, declared_law(rule, target, draft, 2), 4) < LAW_TOLERANCE


@pytest.mark.parametrize("kind", TOY_KINDS)
@pytest.mark.parametrize("name", ON_TREES)
def test_collaborative_rules_emit_the_same_law_on_trees(name: str, kind: str) -> None:
    rule = lossy(name)
    for vocab, branching in ((5, [3]), (3, [2, 1])) if kind in DEEP_KINDS else ((5, [3]),):
        target, draft = toy_models(kind, vocab)
        step = step_law(
            lambda stream, draft=draft, branching=branching: draw_tree(
                stream, draft, branching, "without_replacement"
            ),
            rule,
            target,
        )
        assert law_error(step, declared_law(rule, target, draft, len(branching)), vocab) < LAW_TOLERANCE


def probability_of_no_hit(q: Law, allowed: Law, count: int) -> float:
    """Chance that `count` draws without replacement all miss, summed over the orders they can come in."""
    total = 0.0
    support = [x for x in range(len(q)) if q[x] > 0.0]
    for order in itertools.permutations(support, min(count, len(support))):
        chance, left = 1.0, 1.0
        for token in order:
            chance, left = chance * q[token] / left, left - q[token]
        total += chance * (not allowed[list(order)].any())
    return total


@pytest.mark.parametrize("kind", [kind for kind in TOY_KINDS if kind != "near one-hot"])
@pytest.mark.parametrize("fallback", FALLBACKS)
def test_a_gate_on_siblings_emits_the_cut_draft_or_the_fallback(fallback: str, kind: str) -> None:
    """(1 - m) q_A + m fallback, m the probability that no sibling is allowed."""
    vocab = 5
    target, draft = toy_models(kind, vocab)
    p, q = target(()), draft(())
    rule = rule_named("top-k-gate", {"k": 2, "fallback": fallback})
    allowed = np.isin(np.arange(vocab), np.argsort(-p, kind="stable")[:2]) & (p > 0.0)
    missed = probability_of_no_hit(q, allowed, 3)
    step = step_law(lambda stream: draw_tree(stream, draft, [3], "without_replacement"), rule, target)
    law = np.zeros(vocab)
    for tokens, probability in step.items():
        law[tokens[0]] += probability
    truncated = p * allowed / p[allowed].sum()
    drafted = q * allowed / q[allowed].sum() if q[allowed].any() else truncated
    last = {"target": p, "truncated": truncated, "argmax": argmax_law(p), "draft": drafted}[fallback]
    np.testing.assert_allclose(law, (1.0 - missed) * drafted + missed * last, rtol=0, atol=LAW_TOLERANCE)


def first_token_law(rule: BoundRule, tree: DraftTree, rows: torch.Tensor) -> Law:
    law = np.zeros(rows.shape[1])

    def first(stream) -> int:
        result = rule.verify(tree, rows, stream, POSITION)
        return [*tree.tokens_of(result.accepted_nodes), result.next_token_id][0]

    for token, probability in exact_law(first).items():
        law[token] += probability
    return law


@pytest.mark.parametrize("accumulated", [1.0, 0.7, 0.4])
def test_thresholds_share_out_siblings_as_derived(accumulated: float) -> None:
    """pi(y_i) is the step of min(1, c / threshold); the others share the rest in proportion to p."""
    p = np.array([0.3, 0.15, 0.25, 0.2, 0.1])
    siblings = [2, 4, 1]
    tree = tree_from_paths(0, [[token] for token in siblings])
    rule = rule_named("thresholds", {"threshold_acc": accumulated})
    reached = np.minimum(1.0, np.cumsum(p[siblings]) / accumulated)
    expected = p * (1.0 - reached[-1]) / (1.0 - p[siblings].sum())
    expected[siblings] = np.diff(reached, prepend=0.0)
    law = first_token_law(rule, tree, torch.tensor(np.tile(p, (4, 1))))
    np.testing.assert_allclose(law, expected, rtol=0, atol=LAW_TOLERANCE)


def test_a_sibling_over_the_single_threshold_is_taken_for_sure() -> None:
    p = np.array([0.3, 0.15, 0.25, 0.2, 0.1])
    tree = tree_from_paths(0, [[4], [2], [0]])
    rule = rule_named("thresholds", {"threshold_single": 0.25})
    law = first_token_law(rule, tree, torch.tensor(np.tile(p, (4, 1))))
    np.testing.assert_allclose(law, [0.0, 0.0, 0.9, 0.0, 0.1], rtol=0, atol=LAW_TOLERANCE)


def random_pairs(count: int) -> list[tuple[Law, Law]]:
    rng = np.random.default_rng(3)
    shapes = [(int(rng.integers(2, 12)), float(rng.choice([0.2, 0.7, 3.0]))) for _ in range(count)]
    return [
        (rng.dirichlet(np.full(vocab, evenness)), rng.dirichlet(np.full(vocab, evenness)))
        for vocab, evenness in shapes
    ]


@pytest.mark.parametrize(
    ("name", "knobs", "bound"),
    [
        ("lenience", {"lenience": 0.4}, 2.5),
        ("lenience", {"lenience": 0.8}, 1.25),
        ("lenience-scaled", {"lenience": 0.4}, 2.5),
        ("lenience-floor", {"lenience": 0.4}, 2.5),
        ("thresholds", {"threshold_acc": 0.25, "threshold_single": 0.5}, 4.0),
        ("thresholds", {"threshold_acc": 0.5, "threshold_single": 0.25}, 4.0),
    ],
)
def test_overshoot_keeps_to_its_bound_and_reaches_it(name: str, knobs: GivenKnobs, bound: float) -> None:
    rule = rule_named(name, knobs)
    assert rule.overshoot_bound == pytest.approx(bound)
    at_the_bound = (np.array([1.0 / bound, 1.0 - 1.0 / bound]), np.array([1.0, 0.0]))
    reached = [overshoot(rule.emitted_law(p, q), p) for p, q in [*random_pairs(300), at_the_bound]]
    assert max(reached) == pytest.approx(bound)


@pytest.mark.parametrize("name", ["interpolation", "mentored", "cactus", "cascade-opt", "top-k-gate"])
def test_a_rule_that_declares_no_bound_has_none(name: str) -> None:
    rule = lossy(name)
    assert rule.overshoot_bound is None
    q = np.array([0.9, 0.1])
    seen = [
        overshoot(rule.emitted_law(p, q), p) for p in (np.array([x, 1.0 - x]) for x in (1e-2, 1e-4, 1e-8))
    ]
    assert seen[0] * 2 < seen[1] < seen[2] / 2


@pytest.mark.parametrize("rule", [r for r in LOSSY_RULES if r.neutral is not None], ids=lambda r: r.name)
def test_at_its_neutral_knobs_a_rule_is_exact(rule: Rule) -> None:
    """The text is then the target's, sampled or greedy, whatever was drafted."""
    bound = bind(rule, rule.neutral or {})
    for kind in TOY_KINDS:
        target, _ = toy_models(kind, 4)
        for context in [(), (1,), (2, 0)]:
            p = target(context)
            assert any(np.array_equal(bound.bonus_law(p), law) for law in (p, argmax_law(p)))
        step = chain_step(bound, kind, 4, 2)
        assert law_error(step, lambda context, t=target: bound.bonus_law(t(context)), 4) < LAW_TOLERANCE


@pytest.mark.parametrize("kind", TOY_KINDS)
@pytest.mark.parametrize("name", [rule.name for rule in LOSSY_RULES if rule.name != "judge"])
def test_deterministic_children_keep_a_lossy_rule_within_what_it_declares(name: str, kind: str) -> None:
    """Collaborative rules are exact there; the others see a child that was drawn from a one-hot q."""
    rule, vocab = lossy(name), 4
    target, _ = toy_models(kind, vocab)
    tree = chain_tree(0, [2])
    law = first_token_law(rule, tree, target_rows(tree, target))
    declared = rule.emitted_law(target(()), np.eye(vocab)[2])
    if RULES[name].kind == "collaborative":
        declared = target(())
    elif declared is None:
        declared = argmax_law(target(()))
    np.testing.assert_allclose(law, declared, rtol=0, atol=LAW_TOLERANCE)


class ExtremeNumbers(RandomStream):
    """Every number is the least or the greatest there is."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self._value = value

    def uniform(self, position: int, purpose: object, count: int = 1, node: int = 0) -> list[float]:
        return [self._value] * count


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].draft != "iid"])
def test_a_token_the_target_excludes_never_comes_out(name: str, u: float) -> None:
    """Drafted with certainty, alone or before siblings, and whatever the numbers (faults B43, B45, B76)."""
    rule = bind(judge_rule(lambda tree, node: True), {}) if name == "judge" else lossy(name)
    rng = np.random.default_rng(5)
    for case in range(12):
        p = rng.dirichlet(np.full(6, 0.6), size=4) * (rng.random((4, 6)) < 0.5)
        # what stays is token 5 in most rows, so that most drafted tokens are excluded ones
        p[:, 5] += 0.01
        p /= p.sum(axis=1, keepdims=True)
        drafted = rng.permutation(5)[:3]
        q = torch.full((4, 6), 1e-3, dtype=torch.float64)
        q[:, 5] = 0.0
        is_chain = case % 2 == 0 or rule.rule.topology == "chain"
        for row in range(4):
            q[row, int(drafted[row % 3] if is_chain else drafted[0])] = 1.0
        q /= q.sum(dim=1, keepdim=True)
        parents = [-1, 0, 1, 2] if is_chain else [-1, 0, 0, 1]
        tokens = [0, *(int(token) for token in drafted)]
        tree = DraftTree(token_ids=tokens, parents=parents, draft_probs=q)
        result = rule.verify(tree, torch.tensor(p), ExtremeNumbers(u), POSITION)
        node = 0
        for child in result.accepted_nodes:
            assert p[node, tokens[child]] > 0.0
            node = child
        assert p[node, result.next_token_id] > 0.0


UNDECIDED = [0.3, 0.28, 0.22, 0.2]
SURE = [0.97, 0.01, 0.01, 0.01]


@pytest.mark.parametrize(
    ("drafted", "laws", "window", "accepted"),
    [
        ([0, 0, 0], [SURE] * 4, 1, 3),
        # undecided at the mismatch, and the next token is the target's choice
        ([0, 1, 0], [UNDECIDED] * 4, 1, 3),
        # two tokens are wanted after it and one is there
        ([0, 1, 0], [UNDECIDED] * 4, 2, 1),
        # the target was sure
        ([0, 1, 0], [SURE] * 4, 1, 1),
        # a second mismatch inside the window
        ([1, 0, 1, 0], [UNDECIDED] * 5, 2, 0),
        # the last token has no window
        ([0, 0, 1], [UNDECIDED] * 4, 1, 2),
        # excluded by the target
        ([0, 3, 0], [[0.4, 0.3, 0.3, 0.0]] * 4, 1, 1),
    ],
)
def test_a_mismatch_stands_where_the_target_is_undecided_and_agrees_again(
    drafted: list[int], laws: list[list[float]], window: int, accepted: int
) -> None:
    rule = rule_named("windowed", {"theta": 0.5, "window": window})
    result = rule.verify(chain_tree(0, drafted), torch.tensor(laws), RandomStream(0), POSITION)
    assert result.accepted_nodes == list(range(1, accepted + 1))
    assert result.next_token_id == 0
    assert result.next_kind == ("bonus" if accepted == len(drafted) else "recovered")


def test_without_a_judge_the_judge_rule_refuses_to_run() -> None:
    rule = rule_named("judge")
    with pytest.raises(SpecdecError, match="judge_rule"):
        rule.verify(chain_tree(0, [1]), torch.tensor([UNDECIDED] * 2), RandomStream(0), POSITION)


@pytest.mark.parametrize("kind", TOY_KINDS)
@pytest.mark.parametrize("branching", [[1, 1], [2, 1]])
def test_a_judge_that_never_passes_a_token_leaves_the_rule_exact(branching: list[int], kind: str) -> None:
    target, draft = toy_models(kind, 4)
    rule = bind(judge_rule(lambda tree, node: False), {})
    step = step_law(lambda stream: draw_tree(stream, draft, branching, "without_replacement"), rule, target)
    assert law_error(step, target, 4) < LAW_TOLERANCE


def test_a_judge_scores_the_states_of_the_drafted_nodes() -> None:
    states = torch.tensor([[9.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    judge = judge_by_score(lambda rows: rows[:, 1], lambda tree: states, threshold=0.5)
    rule = bind(judge_rule(judge), {})
    rows = torch.tensor([[0.98, 0.01, 0.01, 0.0]] * 3)
    result = rule.verify(tree_from_paths(0, [[2, 1]]), rows, ExtremeNumbers(0.99), POSITION)
    # the first is called correct; the second is not, and p says no
    assert result.accepted_nodes == [1]


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("lenience", {"lenience": 0.0}, r"lenience \(0.0\) must be a number in \(0, 1\]"),
        ("lenience", {"lenience": float("nan")}, "must be a number"),
        ("typical", {"fallback": "greedy"}, r"target \| truncated \| argmax \| draft"),
        ("top-k-gate", {"k": 1.5}, "a whole number"),
        ("cactus", {"lenience": 0.5}, "its knobs are: delta"),
        ("fuzzy", {"divergence": 1}, "must be one of js"),
    ],
)
def test_a_wrong_knob_is_refused_with_what_is_allowed(name: str, knobs: GivenKnobs, message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        rule_named(name, knobs)


def test_the_label_of_a_lossy_run_names_rule_and_knobs() -> None:
    assert rule_named("fuzzy", {"threshold": 0.25}).label == "fuzzy(threshold=0.25, divergence=js)"
    assert rule_named("typical").label == "typical(epsilon=0.09, delta=0.3, fallback=argmax)"
