"""What is claimed of single formulas: which law is the best of its kind, which tokens a gate lets through."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.divergence import kl_divergence, overlap
from specdec.sampling import process_logits
from specdec.sampling_params import SamplingParams
from specdec.verification import lossy_laws
from specdec.verification.registry import rule_named

LAW_TOLERANCE = 1e-12

Law = np.ndarray


def random_pairs(count: int) -> list[tuple[Law, Law]]:
    """Laws of a few and of many tokens, even and uneven, every third target with zeros."""
    rng = np.random.default_rng(9)
    pairs = []
    for index in range(count):
        vocab, evenness = int(rng.integers(2, 12)), float(rng.choice([0.2, 0.7, 3.0]))
        p, q = rng.dirichlet(np.full(vocab, evenness)), rng.dirichlet(np.full(vocab, evenness))
        if index % 3 == 0:
            p = p * (np.arange(vocab) < (vocab + 1) // 2)
        pairs.append((p / p.sum(), q))
    return pairs


def scrambled(law: Law, rng: np.random.Generator) -> Law:
    weights = law * rng.gamma(1.0, size=len(law))
    return weights / weights.sum()


def test_no_law_within_the_mentored_budget_overlaps_the_draft_more() -> None:
    """Against lenience, interpolation and random laws, each drawn towards p until it keeps to the budget."""
    rng = np.random.default_rng(2)
    for p, q in random_pairs(40):
        budget = float(rng.choice([0.01, 0.1, 0.5]))
        best = lossy_laws.mentored(p, q, budget)
        assert kl_divergence(best, p) <= budget + LAW_TOLERANCE
        draft = lossy_laws.confined(q, p)
        rivals = [draft, *(lossy_laws.lenient(p, q, share) for share in (0.2, 0.5, 0.8))]
        rivals += [scrambled(draft, rng) for _ in range(10)]
        for rival in rivals:
            shares = [
                share
                for share in np.linspace(0.0, 1.0, 41)
                if kl_divergence(p + share * (rival - p), p) <= budget
            ]
            assert overlap(p + shares[-1] * (rival - p), q) <= overlap(best, q) + LAW_TOLERANCE


def test_of_all_laws_with_the_ceiling_and_the_acceptance_the_floor_is_nearest_to_the_target() -> None:
    for p, q in random_pairs(60):
        nearest = lossy_laws.lenient_floor(p, q, 0.4)
        for rival in (lossy_laws.lenient(p, q, 0.4), lossy_laws.lenient_scaled(p, q, 0.4)):
            assert overlap(rival, q) == pytest.approx(overlap(nearest, q), abs=LAW_TOLERANCE)
            assert kl_divergence(nearest, p) <= kl_divergence(rival, p) + LAW_TOLERANCE


@pytest.mark.parametrize("levels", [3, 1000])
def test_gates_allow_the_very_tokens_that_the_sampler_keeps(levels: int) -> None:
    """Few levels make ties at the border and at the top."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        logits = torch.tensor(rng.integers(0, levels, size=(1, 40)) * 3.0 / levels, dtype=torch.float32)
        p = process_logits(logits, SamplingParams(temperature=1.0))[0].numpy()
        for name, knobs, params in [
            ("top-k-gate", {"k": 7}, {"top_k": 7}),
            ("top-p-gate", {"mass": 0.55}, {"top_p": 0.55}),
            ("min-p-gate", {"min_p": 0.4}, {"min_p": 0.4}),
        ]:
            kept = process_logits(logits, SamplingParams(temperature=1.0, **params))[0].numpy() > 0.0
            law = rule_named(name, {**knobs, "fallback": "truncated"}).emitted_law(p, p)
            np.testing.assert_array_equal(law > 0.0, kept)


def test_a_confined_draft_is_the_draft_where_the_supports_agree_and_the_target_where_they_are_disjoint() -> (
    None
):
    p, q = np.array([0.2, 0.8, 0.0]), np.array([0.6, 0.4, 0.0])
    np.testing.assert_array_equal(lossy_laws.confined(q, p), q)
    np.testing.assert_array_equal(lossy_laws.confined(np.array([0.0, 0.0, 1.0]), p), p)
    # half of q lies outside and goes where p exceeds q
    np.testing.assert_allclose(lossy_laws.confined(np.array([0.3, 0.2, 0.5]), p), [0.3, 0.7, 0.0], atol=1e-15)


def test_a_mentored_law_survives_a_target_of_denormal_numbers() -> None:
    p, q = np.array([1.0, 5e-324, 0.0]), np.array([0.5, 0.4, 0.1])
    for budget in (0.0, 0.1, 100.0):
        law = lossy_laws.mentored(p, q, budget)
        assert np.isfinite(law).all()
        assert law.sum() == pytest.approx(1.0)
        assert law[2] == 0.0
