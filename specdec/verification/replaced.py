"""Verify the draft against another law than the target's: what makes a law of p and q a rule.

Owns how: at each node whose children were drawn from q, the target's law is replaced by the one that is to
come out, and the exact rejection rule does the rest, on chains and trees alike. Nodes with deterministic
children have no q to listen to and are verified exactly; the token after a leaf is the target's own. Does
not know which laws there are (`lossy_laws`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.random_streams import UniformSource
from specdec.sampling import as_law
from specdec.tree import DraftTree
from specdec.verification.laws import Law
from specdec.verification.rejection import verify_rejection
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import GivenKnobs, Knob, Knobs, Rule
from specdec.verification.walk import draft_row

# (p, q, the first child's token) -> the law its node is verified against
Replacement = Callable[[Law, Law, int], Law]


class _ReplacedRows:
    """The target's rows, with another law wherever the draft has a say."""

    def __init__(self, tree: DraftTree, target_probs: ProbRows, replacement: Replacement) -> None:
        self._tree = tree
        self._target_probs = target_probs
        self._replacement = replacement

    def __getitem__(self, node: int) -> Tensor:
        row = self._target_probs[node]
        children = self._tree.children[node]
        q = draft_row(self._tree, node) if children else None
        if q is None:
            return row
        p = as_law(row)
        return torch.from_numpy(self._replacement(p / p.sum(), q, self._tree.token_ids[children[0]]))


def verify_against(
    tree: DraftTree,
    target_probs: ProbRows,
    stream: UniformSource,
    position: int,
    replacement: Replacement,
) -> VerifyResult:
    """Verify sampled children against a law of p and q.

    Args:
        tree: the proposals with their draft laws.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
        replacement: the law; it may look at the drafted token on chains only.
    """
    return verify_rejection(tree, _ReplacedRows(tree, target_probs, replacement), stream, position)


def collaborative_rule(
    *,
    name: str,
    law: Callable[[Law, Law, Knobs], Law],
    knobs: tuple[Knob, ...],
    neutral: GivenKnobs,
    sentence: str,
    overshoot_bound: Callable[[Knobs], float | None] | None = None,
) -> Rule:
    """Declare a rule that verifies against one law of p and q.

    Args:
        name: what users write.
        law: (p, q, knobs) -> the law that comes out.
        knobs: what users may set.
        neutral: the knobs at which the law is p.
        sentence: what the rule means.
        overshoot_bound: knobs -> bound; by default there is one at the neutral knobs only.
    """
    return Rule(
        name=name,
        kind="collaborative",
        topology="tree",
        draft="without_replacement",
        knobs=knobs,
        emitted_law=law,
        overshoot_bound=overshoot_bound or bounded_at(neutral, knobs),
        neutral=neutral,
        sentence=sentence,
        verify=lambda tree, target_probs, stream, position, values: verify_against(
            tree, target_probs, stream, position, lambda p, q, token: law(p, q, values)
        ),
    )


def bounded_at(neutral: GivenKnobs, knobs: tuple[Knob, ...]) -> Callable[[Knobs], float | None]:
    """Make the overshoot bound of a rule that has one, 1, at its neutral knobs only."""
    values = {knob.name: knob.value_of(neutral[knob.name]) for knob in knobs if knob.name in neutral}
    return lambda given: 1.0 if all(given[name] == value for name, value in values.items()) else None
