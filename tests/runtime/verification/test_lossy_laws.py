"""Every lossy rule emits the law it declares, and that law is the published procedure's.

Three descriptions of a rule are compared: the procedure as published, written down here once more as "accept
x with a(x), else draw from r_x" in plain loops; the closed form the rule declares; and the exact enumeration
of the code that serves. What they cost is checked against the linear front and the overshoot bounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import brentq

from specdec.divergence import front_gap, js_divergence, kl_divergence, total_variation
from specdec.verification import cascades, gates, lossy_laws, rejection, target_only
from specdec.verification.enumeration import (
    TOY_KINDS,
    draw_tree,
    step_law,
    toy_models,
)
from specdec.verification.laws import argmax_law
from specdec.verification.registry import LOSSY_RULES, rule_named
from specdec.verification.rules import BoundRule, GivenKnobs
from specdec.verification.walk import walk

LAW_TOLERANCE = 1e-12
# a planted mutation moves the law by more than a percent; far from rounding
MUTATION_SHIFT = 1e-2
# a law known to lie off the front does so by at least this much on some of the random pairs
CLEARLY_ABOVE = 1e-3
VOCAB = 6

Law = np.ndarray
# acceptance probability of each token, and the law of the token after each one's rejection
Procedure = tuple[Law, list[Law]]

SETTINGS: list[tuple[str, GivenKnobs]] = [
    ("lenience", {}),
    ("lenience", {"lenience": 0.8}),
    ("lenience-scaled", {}),
    ("lenience-floor", {}),
    ("interpolation", {}),
    ("interpolation", {"weight": 0.0}),
    ("fuzzy", {}),
    ("fuzzy", {"threshold": 0.5, "divergence": "kl"}),
    ("fuzzy", {"threshold": 0.4, "divergence": "tv"}),
    ("mentored", {}),
    ("mentored", {"budget": 0.01}),
    ("mentored", {"budget": 100.0}),
    ("cactus", {}),
    ("cactus", {"delta": 1.0}),
    ("cascade-chow", {}),
    ("cascade-diff", {}),
    ("cascade-opt", {}),
    ("cascade-token-v1", {}),
    ("cascade-token-v2", {}),
    ("cascade-token-v3", {}),
    *[("typical", {"fallback": fallback}) for fallback in gates.FALLBACKS],
    ("typical", {"epsilon": 0.4, "delta": 1.5, "fallback": "truncated"}),
    ("eta", {}),
    ("min-p-gate", {"min_p": 0.4}),
    ("top-k-gate", {"k": 2}),
    ("top-k-gate", {"k": 2, "fallback": "draft"}),
    ("top-p-gate", {"mass": 0.6}),
    ("relaxed", {"top_n": 3, "delta": 0.2}),
    ("margin", {"margin": 1.0}),
    ("thresholds", {"threshold_single": 0.3}),
    ("thresholds", {"threshold_acc": 0.5}),
    ("thresholds", {"threshold_single": 0.4, "threshold_acc": 0.7}),
]
IDS = [f"{name} {' '.join(str(value) for value in knobs.values())}".strip() for name, knobs in SETTINGS]
# what is given away in fidelity is all gained in acceptance; for cactus since every proposal but the drawn
# token's is below p and each residual's mass is at least all that is rejected, so that pi <= p where q < p
ON_THE_FRONT = {
    "cactus",
    "lenience",
    "lenience-floor",
    "interpolation",
    "fuzzy",
    "mentored",
    "cascade-chow",
    "cascade-diff",
    "cascade-opt",
}


def normalised(weights: Law, otherwise: Law) -> Law:
    return weights / weights.sum() if weights.sum() > 0.0 else otherwise


def positive(values: Law) -> Law:
    return np.maximum(values, 0.0)


def confined(p: Law, q: Law) -> Law:
    """What "keep a draft that the target may say, else recover" emits, summed over the draws."""
    law = np.zeros_like(p)
    for token, chance in enumerate(q):
        if p[token] > 0.0:
            law[token] += chance
        else:
            law += chance * normalised(positive(p - q), p)
    return law


def against(pi: Law, q: Law) -> Procedure:
    """Token rejection with pi in the target's place."""
    accept = np.array([min(1.0, pi[x] / q[x]) if q[x] > 0.0 else 0.0 for x in range(len(q))])
    return accept, [normalised(positive(pi - q), pi)] * len(q)


def floor_of(p: Law, q: Law, ceiling: float) -> float:
    """The b that makes clip(q, b p, ceiling p) a law."""

    def excess(floor: float) -> float:
        return float(np.clip(q, floor * p, ceiling * p).sum()) - 1.0

    # rounding may leave the law a hair short of 1 even at the end
    if excess(0.0) >= 0.0 or excess(1.0) <= 0.0:
        return float(excess(0.0) < 0.0)
    return brentq(excess, 0.0, 1.0, xtol=1e-16)


def lenience(p: Law, q: Law, knobs: BoundRule) -> Procedure:
    share = knobs.knobs["lenience"]
    accept = np.array([min(1.0, p[x] / (share * q[x])) if q[x] > 0.0 else 0.0 for x in range(len(q))])
    if knobs.rule.name == "lenience":
        recovered = normalised(positive(p - q), p)
    elif knobs.rule.name == "lenience-scaled":
        recovered = normalised(positive(p - share * q), p)
    else:
        recovered = normalised(positive(floor_of(p, q, 1 / share) * p - q), p)
    return accept, [recovered] * len(q)


def cascade(p: Law, q: Law, rule: BoundRule) -> Procedure:
    name, alpha = rule.rule.name, rule.knobs["alpha"]
    draft = confined(p, q)
    best, surest = max(p), max(draft)
    if name == "cascade-chow":
        pi = p if surest < 1 - alpha else draft
    elif name == "cascade-diff":
        pi = p if surest < best - alpha else draft
    elif name == "cascade-opt":
        pi = p if surest < best - alpha * abs(p - draft).sum() / 2 else draft
    else:
        limit = {"v1": best - alpha, "v2": best - alpha, "v3": best * (1 - alpha)}[name[-2:]]
        tested = draft if name.endswith("v1") else p
        handed = [x for x in range(len(p)) if tested[x] < limit]
        pi = np.array(
            [(0.0 if x in handed else draft[x]) + p[x] * sum(draft[y] for y in handed) for x in range(len(p))]
        )
    return against(pi, q)


def fuzzy(p: Law, q: Law, rule: BoundRule) -> Procedure:
    draft = confined(p, q)
    measure = (js_divergence, kl_divergence, total_variation)[int(rule.knobs["divergence"])]
    return against(draft if measure(draft, p) < rule.knobs["threshold"] else p, q)


def interpolation(p: Law, q: Law, rule: BoundRule) -> Procedure:
    weight = rule.knobs["weight"]
    return against(weight * p + (1 - weight) * confined(p, q), q)


def mentored(p: Law, q: Law, rule: BoundRule) -> Procedure:
    """The two borders by nested root finding over every ceiling, slow and without sums."""

    def clipped(ceiling: float) -> Law:
        return np.clip(q, floor_of(p, q, ceiling) * p, ceiling * p)

    def excess(log_ceiling: float) -> float:
        law = clipped(float(np.exp(log_ceiling)))
        return kl_divergence(law / law.sum(), p) - rule.knobs["budget"]

    widest = float(np.log(max(1.0, *(q[p > 0.0] / p[p > 0.0]))))
    ceiling = brentq(excess, 0.0, widest, xtol=1e-15) if widest > 0.0 and excess(widest) > 0.0 else widest
    return against(clipped(float(np.exp(ceiling))), q)


def cactus(p: Law, q: Law, rule: BoundRule) -> Procedure:
    lifted = [
        min(1.0, p_x + np.sqrt(2 * rule.knobs["delta"] * p_x * (1 - p_x))) for p_x in np.minimum(p, 1.0)
    ]
    accept = np.array([min(1.0, lifted[x] / q[x]) if q[x] > 0.0 else 0.0 for x in range(len(q))])
    recovered = []
    for x in range(len(q)):
        proposal = np.array(
            [lifted[x] if v == x else p[v] * (1 - lifted[x]) / max(1 - p[x], 1e-300) for v in range(len(p))]
        )
        recovered.append(normalised(positive(proposal - q), p))
    return accept, recovered


def allowed_tokens(p: Law, rule: BoundRule) -> list[int]:
    knobs, name = rule.knobs, rule.rule.name
    ranked = sorted(range(len(p)), key=lambda x: (-p[x], x))
    bar = 0.0
    if name in ("typical", "eta"):
        surprise = -sum(p_x * np.log(p_x) for p_x in p if p_x > 0.0)
        bar = min(knobs["epsilon"], knobs["delta"] * np.exp(-surprise))
    nucleus = [
        x for place, x in enumerate(ranked) if sum(p[y] for y in ranked[:place]) < knobs.get("mass", 0)
    ]
    kept = {
        "typical": [x for x in ranked if p[x] > bar],
        "eta": [x for x in ranked if p[x] >= bar],
        "min-p-gate": [x for x in ranked if p[x] >= knobs.get("min_p", 0.0) * max(p)],
        "top-k-gate": ranked[: int(knobs.get("k", 1))],
        "top-p-gate": nucleus,
        "relaxed": [
            x for x in ranked[: int(knobs.get("top_n", 1))] if p[x] >= max(p) - knobs.get("delta", 0)
        ],
        "margin": [x for x in ranked[:2] if p[x] > p[ranked[0]] * np.exp(-knobs.get("margin", 0.0))],
    }[name]
    return [x for x in kept if p[x] > 0.0]


def gate(p: Law, q: Law, rule: BoundRule) -> Procedure:
    allowed = np.isin(np.arange(len(p)), allowed_tokens(p, rule))
    truncated = normalised(p * allowed, p)
    fallback = gates.FALLBACKS[int(rule.knobs["fallback"])] if "fallback" in rule.knobs else "argmax"
    recovered = {
        "target": p,
        "truncated": truncated,
        "argmax": argmax_law(p),
        "draft": normalised(q * allowed, truncated),
    }[fallback]
    return allowed.astype(float), [recovered] * len(q)


def thresholds(p: Law, q: Law, rule: BoundRule) -> Procedure:
    single, accumulated = rule.knobs["threshold_single"], rule.knobs["threshold_acc"]
    accept = np.array([1.0 if p_x >= single else min(1.0, p_x / accumulated) for p_x in p])
    return accept, [normalised(p * (np.arange(len(p)) != x), p) for x in range(len(p))]


PUBLISHED: dict[str, Callable[[Law, Law, BoundRule], Procedure]] = {
    **dict.fromkeys(["lenience", "lenience-scaled", "lenience-floor"], lenience),
    "interpolation": interpolation,
    "fuzzy": fuzzy,
    "mentored": mentored,
    "cactus": cactus,
    **{rule.name: cascade for rule in cascades.CASCADES},
    **dict.fromkeys(["typical", "eta", "min-p-gate", "top-k-gate", "top-p-gate", "relaxed", "margin"], gate),
    "thresholds": thresholds,
}


def published_law(p: Law, q: Law, rule: BoundRule) -> Law:
    accept, recovered = PUBLISHED[rule.rule.name](p, q, rule)
    return sum(q[x] * (accept[x] * np.eye(len(q))[x] + (1 - accept[x]) * recovered[x]) for x in range(len(q)))


def enumerated(rule: BoundRule, kind: str) -> tuple[Law, float]:
    """Law of the first token of a step with one drafted token, and the probability of its rejection."""
    target, draft = toy_models(kind, VOCAB)
    step = step_law(lambda stream: draw_tree(stream, draft, [1], "sampled"), rule, target)
    law, rejected = np.zeros(VOCAB), 0.0
    for tokens, probability in step.items():
        law[tokens[0]] += probability
        rejected += probability * (len(tokens) == 1)
    return law, rejected


def test_every_rule_with_a_law_is_tested_here() -> None:
    assert set(PUBLISHED) == {rule.name for rule in LOSSY_RULES if rule.emitted_law is not None}
    assert {name for name, _ in SETTINGS} == set(PUBLISHED)


@pytest.mark.parametrize("kind", TOY_KINDS)
@pytest.mark.parametrize(("name", "knobs"), SETTINGS, ids=IDS)
def test_one_step_emits_the_declared_and_the_published_law(name: str, knobs: GivenKnobs, kind: str) -> None:
    rule = rule_named(name, knobs)
    target, draft = toy_models(kind, VOCAB)
    p, q = target(()), draft(())
    law, rejected = enumerated(rule, kind)
    declared = rule.emitted_law(p, q)
    assert declared is not None
    np.testing.assert_allclose(law, declared, rtol=0, atol=LAW_TOLERANCE)
    np.testing.assert_allclose(law, published_law(p, q, rule), rtol=0, atol=1e-11)
    accept, _ = PUBLISHED[name](p, q, rule)
    assert rejected == pytest.approx(1.0 - float((q * accept).sum()), abs=1e-11)
    assert (law[p == 0.0] == 0.0).all(), "a token the target excludes came out"


def random_pairs(count: int) -> list[tuple[Law, Law]]:
    """Laws of a few and of many tokens, even and uneven, some with zeros."""
    rng = np.random.default_rng(7)
    pairs = []
    while len(pairs) < count:
        vocab, evenness = int(rng.integers(2, 12)), float(rng.choice([0.2, 0.7, 3.0]))
        p, q = rng.dirichlet(np.full(vocab, evenness)), rng.dirichlet(np.full(vocab, evenness))
        if len(pairs) % 3 == 0:
            p = p * (rng.random(vocab) < 0.6)
        if p.sum() > 0.0:
            pairs.append((p / p.sum(), q))
    return pairs


@pytest.mark.parametrize(("name", "knobs"), SETTINGS, ids=IDS)
def test_no_rule_lies_below_the_linear_front(name: str, knobs: GivenKnobs) -> None:
    rule = rule_named(name, knobs)
    gaps = []
    for p, q in random_pairs(200):
        accept, _ = PUBLISHED[name](p, q, rule)
        emitted = rule.emitted_law(p, q)
        assert emitted is not None
        assert abs(emitted.sum() - 1.0) < LAW_TOLERANCE
        gaps.append(front_gap(1.0 - float((q * accept).sum()), emitted, p, q))
    # the reference's own root finding is good to 1e-11
    assert min(gaps) > -1e-10
    if name in ON_THE_FRONT:
        assert max(gaps) < 1e-10
    else:
        assert max(gaps) > CLEARLY_ABOVE


def resample_from_target(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    return p, np.zeros_like(q)


def swapped_residual(p: Law, q: Law) -> Law:
    return normalised(positive(q - p), p)


def unscaled_proposal(p: Law, token: int, delta: float) -> Law:
    law = p.copy()
    law[token] = min(1.0, p[token] + np.sqrt(2 * delta * p[token] * (1 - p[token])))
    return law / law.sum()


def keep_refused(tree, rows, stream, position, choose):
    """Descend as it should, but let the recovered token be the one that was refused."""

    def choose_from_all(node, children, p, coins):
        return choose(node, children, p, coins)[0], p

    return walk(tree, rows, stream, position, choose_from_all)


MUTATIONS = {
    "resample from p": (rejection, "after_rejection", resample_from_target, "interpolation", {}),
    "the draft's residual": (lossy_laws, "residual", swapped_residual, "lenience", {}),
    "q not confined": (lossy_laws, "confined", lambda q, p: q, "interpolation", {}),
    "cascade not confined": (cascades, "confined", lambda q, p: q, "cascade-diff", {"alpha": 1.0}),
    "others not scaled": (lossy_laws, "cactus_proposal", unscaled_proposal, "cactus", {}),
    "another fallback": (gates, "fallback_law", lambda fallback, p, q, allowed: p, "typical", {}),
    "the worst token in its stead": (gates, "argmax_law", lambda p: argmax_law(-p), "margin", {}),
    "the refused token may recover": (
        target_only,
        "walk",
        keep_refused,
        "thresholds",
        {"threshold_acc": 0.5},
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_catches(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, wrong, name, knobs = MUTATIONS[mutation]
    rule = rule_named(name, knobs)
    right = {
        kind: published_law(*(model(()) for model in toy_models(kind, VOCAB)), rule) for kind in TOY_KINDS
    }
    monkeypatch.setattr(module, attribute, wrong)
    errors = [np.abs(enumerated(rule, kind)[0] - right[kind]).max() for kind in TOY_KINDS]
    assert max(errors) > MUTATION_SHIFT
