"""The statistics of the audit, against scipy and against planted faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, chi2

from specdec.audit.draws import ALPHA, draws_result, tensor_tests
from specdec.audit.enumerated import audit_enumeration
from specdec.audit.goodness import chi_square_tail, fit, holm_rejections, sign_test
from specdec.random_streams import Purpose, UniformSource
from specdec.sampling import as_law, sample
from specdec.tree import DraftTree
from specdec.verification.registry import EXACT_RULES, LOSSY_RULES, rule_named
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import BoundRule, Knobs

DRAWS = 3000
LAW = {(0,): 0.5, (1,): 0.3, (2,): 0.15, (3,): 0.05}


def drawn(law: dict[tuple[int, ...], float], count: int, seed: int) -> Counter[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    keys = list(law)
    return Counter(keys[i] for i in rng.choice(len(keys), size=count, p=list(law.values())))


@pytest.mark.parametrize(("statistic", "freedom"), [(0.0, 3), (2.5, 1), (162.5, 200), (400.0, 200), (3.0, 0)])
def test_the_tail_is_the_chi_square_law(statistic: float, freedom: int) -> None:
    expected = chi2.sf(statistic, freedom) if freedom else 1.0
    assert chi_square_tail(statistic, freedom) == pytest.approx(expected, abs=1e-9)


def test_a_right_law_is_kept_and_a_wrong_one_is_not() -> None:
    """p-values of a right law are spread over [0, 1]; a bias of 0.05 at 4,000 draws is seen every time."""
    right = [fit(drawn(LAW, 4000, seed), LAW).p_value for seed in range(60)]
    assert 0.2 < float(np.mean(right)) < 0.8
    assert min(right) > 1e-4
    wrong = {**LAW, (0,): 0.45, (3,): 0.10}
    assert max(fit(drawn(wrong, 4000, seed), LAW).p_value for seed in range(20)) < 1e-6


def test_the_expected_variation_is_that_of_sampling_noise() -> None:
    found = [fit(drawn(LAW, 2000, seed), LAW) for seed in range(60)]
    mean = float(np.mean([one.total_variation for one in found]))
    assert mean == pytest.approx(found[0].expected_variation, rel=0.15)


def test_an_impossible_draw_rejects() -> None:
    """A token with p = 0 is a fault even once in many draws, where no chi-square would see it."""
    counts = drawn(LAW, 5000, 0)
    counts[(9,)] += 1
    found = fit(counts, LAW)
    assert found.impossible == 1
    assert found.p_value == 0.0


def test_rare_cells_are_pooled() -> None:
    law = {(token,): 2.0 ** -(token + 1) for token in range(20)}
    law[(19,)] *= 2
    found = fit(drawn(law, 500, 1), law)
    assert found.freedom < 8
    assert found.p_value > 0.001


def test_holm_keeps_the_family_error_rate() -> None:
    assert holm_rejections([0.001, 0.2, 0.004], 0.01) == [True, False, True]
    assert holm_rejections([0.004, 0.004, 0.004], 0.01) == [False, False, False]
    rng = np.random.default_rng(0)
    families = [any(holm_rejections(list(rng.random(20)), 0.05)) for _ in range(2000)]
    assert float(np.mean(families)) < 0.07


@pytest.mark.parametrize(("first", "second"), [(0, 0), (3, 3), (0, 7), (9, 2), (1, 0)])
def test_the_sign_test_is_the_exact_binomial_one(first: int, second: int) -> None:
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert sign_test(first, second) == pytest.approx(expected)


def reuses_p(tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int) -> VerifyResult:
    """Token rejection that recovers from p, not from (p - q)+: the classic mistake."""
    node, accepted = 0, []
    coins = stream.uniform(position, Purpose.ACCEPT, count=tree.num_nodes)
    while tree.children[node]:
        child = tree.children[node][0]
        p = as_law(target_probs[node])
        assert tree.draft_probs is not None
        q = as_law(tree.draft_probs[node])
        if not coins[child] < min(1.0, p[tree.token_ids[child]] / q[tree.token_ids[child]]):
            (u,) = stream.uniform(position, Purpose.RESIDUAL)
            return VerifyResult(accepted_nodes=accepted, next_token_id=sample(p, u), next_kind="recovered")
        accepted.append(child)
        node = child
    (u,) = stream.uniform(position, Purpose.BONUS)
    token = sample(as_law(target_probs[node]), u)
    return VerifyResult(accepted_nodes=accepted, next_token_id=token, next_kind="bonus")


def planted() -> BoundRule:
    rejection = rule_named("rejection")

    def verify(
        tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int, knobs: Knobs
    ) -> VerifyResult:
        return reuses_p(tree, target_probs, stream, position)

    return BoundRule(rule=replace(rejection.rule, verify=verify), knobs={})


@pytest.mark.parametrize("name", [rule.name for rule in EXACT_RULES if rule.name != "greedy"])
def test_every_exact_rule_passes_on_tensors(name: str) -> None:
    result = draws_result(tensor_tests(rule_named(name), DRAWS // 3), [])
    assert result.passed, [figure for figure in result.figures if not figure.passed]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [("lenience", {"lenience": 0.4}), ("interpolation", {"weight": 0.5}), ("min-p-gate", {"min_p": 0.3})],
)
def test_a_lossy_rule_is_held_to_its_own_law(name: str, knobs: dict[str, float | str]) -> None:
    rule = rule_named(name, knobs)
    assert draws_result(tensor_tests(rule, DRAWS // 3), []).passed


def test_a_mistaken_residual_is_seen_by_enumeration_and_by_draws() -> None:
    enumerated = audit_enumeration([planted()])
    assert enumerated.passed is False
    tests = tensor_tests(planted(), DRAWS)
    assert min(test.found.p_value for test in tests) < ALPHA / len(tests)
    assert draws_result(tests, []).passed is False


def test_enumeration_passes_for_sound_rules_and_prices_lossy_ones() -> None:
    rules = [rule_named("rejection"), rule_named("lenience", {"lenience": 0.5}), rule_named("windowed")]
    result = audit_enumeration(rules)
    assert result.passed
    exact, lenient, windowed = result.figures
    assert exact.values["largest_overshoot"] == pytest.approx(1.0)
    assert 1.0 < lenient.values["largest_overshoot"] <= 2.0 + 1e-9
    assert lenient.values["excluded_mass"] == 0.0
    # without a declared law nothing is claimed, and nothing passes by default
    assert windowed.passed is None


def test_a_lossy_rule_that_declares_another_law_fails() -> None:
    lenient = rule_named("lenience", {"lenience": 0.4})
    liar = BoundRule(rule=replace(lenient.rule, emitted_law=lambda p, q, knobs: p), knobs=lenient.knobs)
    assert audit_enumeration([liar]).passed is False
    assert any(rule.name == "lenience" for rule in LOSSY_RULES)


def test_a_lossy_rule_that_declares_too_low_a_bound_fails() -> None:
    lenient = rule_named("lenience", {"lenience": 0.4})
    boastful = BoundRule(rule=replace(lenient.rule, overshoot_bound=lambda knobs: 1.1), knobs=lenient.knobs)
    assert audit_enumeration([boastful]).passed is False
