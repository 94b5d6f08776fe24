"""A gate: take a drafted token if the target's law allows it, whatever the draft's probability was.

Owns how a set of allowed tokens becomes a rule, and the four fallbacks. Children are tried in draw order and
the first that the set holds is taken, without a random number; if none is, the next token has the fallback's
law, and so has the token after a leaf. With A the allowed set, one child drawn from q emits
q on A, plus (1 - q(A)) times the fallback: inside A the text is shaped like the draft, not like the target.
On a tree it is (1 - m) q_A + m fallback, q_A being q cut to A and renormalised and m the probability that
no child is allowed. Deterministic children: the same with q all on the child. A token with p = 0 is in no
set. Does not know which sets there are (`truncation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specdec.random_streams import Coin, UniformSource
from specdec.tree import DraftTree
from specdec.verification.laws import Law, argmax_law
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import Allowed, GivenKnobs, Knob, Knobs, Rule, choice_knob
from specdec.verification.walk import Choice, draft_row, walk

# (p, knobs) -> which tokens are taken
Gate = Callable[[Law, Knobs], Allowed]
FALLBACKS = ("target", "truncated", "argmax", "draft")


def fallback_law(fallback: str, p: Law, q: Law | None, allowed: Allowed) -> Law:
    """Law of the token after every child was refused, or after a leaf.

    Args:
        fallback: "target": p; "truncated": p cut to the allowed set; "argmax": the target's best token;
            "draft": q cut to the allowed set, as if drafting went on until something passed.
        p: the target's law, summing to 1.
        q: the draft's law; None where there was none.
        allowed: the set. "truncated" is p where it is empty; "draft" is "truncated" where q has nothing in
            it, or there is no q.
    """
    assert fallback in FALLBACKS, f"unknown fallback {fallback}"
    if fallback == "argmax":
        return argmax_law(p)
    if fallback == "draft" and q is not None and q[allowed].any():
        return _cut(q, allowed)
    if fallback != "target" and allowed.any():
        return _cut(p, allowed)
    return p


def _cut(law: Law, allowed: Allowed) -> Law:
    """Cut a law to the allowed tokens and renormalise."""
    kept = np.where(allowed, law, 0.0)
    return kept / kept.sum()


def gated_law(fallback: str, p: Law, q: Law, allowed: Allowed) -> Law:
    """What one child drawn from q emits."""
    passed = np.where(allowed, q, 0.0)
    # the sum of what was refused, not 1 - the sum of what passed: 0 must come out as 0
    refused = float(q[~allowed].sum())
    return passed + refused * fallback_law(fallback, p, q, allowed)


def verify_gated(
    tree: DraftTree,
    target_probs: ProbRows,
    stream: UniformSource,
    position: int,
    gate: Callable[[Law], Allowed],
    fallback: str,
) -> VerifyResult:
    """Follow the first allowed child as long as there is one.

    Args:
        tree: the proposals; `draft_probs` is looked at for the fallback "draft" only.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
        gate: p -> which tokens are taken, none with p = 0.
        fallback: see `fallback_law`.
    """

    def choose(node: int, children: list[int], p: Law, coins: Sequence[Coin]) -> Choice:
        p = p / p.sum()
        allowed = gate(p)
        child = next((child for child in children if allowed[tree.token_ids[child]]), None)
        if child is not None:
            return child, p
        return None, fallback_law(fallback, p, draft_row(tree, node), allowed)

    def bonus(p: Law) -> Law:
        p = p / p.sum()
        return fallback_law(fallback, p, None, gate(p))

    return walk(tree, target_probs, stream, position, choose, bonus)


def gate_rule(
    *,
    name: str,
    gate: Gate,
    knobs: tuple[Knob, ...],
    neutral: GivenKnobs | None,
    sentence: str,
    fallback: str | None = None,
    default_fallback: str = "target",
) -> Rule:
    """Declare a gate.

    Args:
        name: what users write.
        gate: (p, knobs) -> which tokens are taken; those with p = 0 are taken out here.
        knobs: what users may set, the fallback not among them.
        neutral: the knobs at which nothing of the draft shows.
        sentence: what the rule means.
        fallback: the only one there is; None: users choose.
        default_fallback: what they get if they do not.
    """
    if fallback is None:
        chosen = choice_knob(
            name="fallback",
            default=default_fallback,
            choices=FALLBACKS,
            meaning="law of the token where no child is allowed: p, p or q cut to the allowed, or p's best",
        )
        knobs = (*knobs, chosen)

    def fallback_of(values: Knobs) -> str:
        return FALLBACKS[int(values["fallback"])] if fallback is None else fallback

    def allowed(p: Law, values: Knobs) -> Allowed:
        return gate(p, values) & (p > 0.0)

    return Rule(
        name=name,
        kind="truncation-based",
        topology="tree",
        draft="without_replacement" if fallback is None else "any",
        knobs=knobs,
        emitted_law=lambda p, q, values: gated_law(fallback_of(values), p, q, allowed(p, values)),
        bonus_law=lambda p, values: fallback_law(fallback_of(values), p, None, allowed(p, values)),
        # the draft's shape inside the set may be any multiple of p's
        overshoot_bound=lambda values: None,
        allowed=allowed,
        neutral=neutral,
        sentence=sentence,
        verify=lambda tree, target_probs, stream, position, values: verify_gated(
            tree, target_probs, stream, position, lambda p: allowed(p, values), fallback_of(values)
        ),
    )
