"""Level C0: a rule's emitted joint law against the one it declares, by exact enumeration of its own code.

Small vocabularies, context-dependent laws, and the awkward cases of `TOY_KINDS`. Lossless rules are held to
the target's law on chains and trees, the others to their declared law on chains (more siblings make another
law), to their overshoot bound, and to the promise that no token with p = 0 comes out. Does not load a target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.audit.levels import Figure, LevelResult, level_result
from specdec.divergence import overshoot
from specdec.verification.enumeration import (
    TOY_KINDS,
    Branching,
    Model,
    StepLaw,
    declared_law,
    draw_tree,
    law_error,
    step_law,
    toy_models,
)
from specdec.verification.rules import BoundRule

# fp64 sums over a few thousand branches; errors met stay below 1e-14
TOLERANCE = 1e-12


@dataclass(frozen=True)
class _Shape:
    """A tree and the vocabulary it is small enough for."""

    vocab: int
    branching: Branching


CHAINS = {"chain of 1": _Shape(8, [1]), "chain of 2": _Shape(4, [1, 1]), "chain of 3": _Shape(3, [1, 1, 1])}
TREES = {"3 siblings": _Shape(4, [3]), "uneven tree of 5": _Shape(3, {(): 2, (0,): 2})}


def audit_enumeration(
    rules: Sequence[BoundRule], on_progress: Callable[[str], None] = lambda _: None
) -> LevelResult:
    """Enumerate every rule on every shape and kind of law.

    Args:
        rules: rules with their knobs.
        on_progress: told the name of each rule before its turn.
    """
    figures = []
    for rule in rules:
        on_progress(rule.label)
        figures.append(_enumerate(rule))
    return level_result(
        "C0",
        figures,
        notes=(
            f"fp64; {len(TOY_KINDS)} kinds of laws ({', '.join(TOY_KINDS)}) on {', '.join(CHAINS)}, and for "
            f"lossless tree rules {', '.join(TREES)}; vocabularies of 3 to 8 tokens; drafting is enumerated "
            f"too; tolerance {TOLERANCE:g}",
        ),
    )


def _enumerate(rule: BoundRule) -> Figure:
    shapes = dict(CHAINS)
    lossless = rule.rule.is_lossless
    if lossless and rule.rule.topology == "tree":
        shapes |= TREES
    if rule.rule.emitted_law is None:
        return Figure(
            name=rule.label,
            values=_values(rule, cases=0, error=None, over=None, excluded=None),
        )
    error = over = excluded = 0.0
    for shape in shapes.values():
        for kind in TOY_KINDS:
            target, draft = toy_models(kind, shape.vocab)
            step = _step(rule, target, draft, shape.branching)
            law = declared_law(rule, target, draft, len(shape.branching))
            error = max(error, law_error(step, law, shape.vocab))
            # of the first token there is a draft for certain; a lossless rule keeps its law without one
            kept = rule.bonus_law(target(())) if lossless else target(())
            over = max(over, overshoot(law(()), kept))
            excluded = max(excluded, _excluded_mass(step, target))
    bound = rule.overshoot_bound
    bounded = bound is None or over <= bound * (1.0 + TOLERANCE)
    return Figure(
        name=rule.label,
        values=_values(rule, cases=len(shapes) * len(TOY_KINDS), error=error, over=over, excluded=excluded),
        passed=error < TOLERANCE and bounded and excluded == 0.0,
    )


def _values(
    rule: BoundRule, *, cases: int, error: float | None, over: float | None, excluded: float | None
) -> dict[str, object]:
    return {
        "kind": rule.rule.kind,
        "cases": cases,
        "largest_error": error,
        "largest_overshoot": over,
        "overshoot_bound": rule.overshoot_bound,
        "excluded_mass": excluded,
    }


def _step(rule: BoundRule, target: Model, draft: Model, branching: Branching) -> StepLaw:
    return step_law(lambda stream: draw_tree(stream, draft, branching, rule.rule.draft), rule, target)


def _excluded_mass(step: StepLaw, target: Model) -> float:
    """Probability of texts with a token that the target excludes."""
    return sum(
        probability
        for tokens, probability in step.items()
        if any(target(tokens[:index])[token] == 0.0 for index, token in enumerate(tokens))
    )
