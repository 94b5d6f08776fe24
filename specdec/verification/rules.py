"""What a verification rule declares: its knobs, what drafting owes it, the law it emits, what it means.

Owns the record types only; the rules themselves are declared beside their code and collected by
`registry.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdec.errors import SpecdecError
from specdec.random_streams import UniformSource
from specdec.tree import DraftTree
from specdec.verification.laws import Law
from specdec.verification.result import ProbRows, VerifyResult

RuleKind = Literal["lossless", "truncation-based", "collaborative"]
Topology = Literal["chain", "tree"]
# what the children of a node must be for the emitted law to hold:
#   any: whatever, as long as their making used no number that verification draws;
#   sampled: one child, drawn from the node's row of `draft_probs`;
#   iid: siblings drawn from that row one by one, independently, duplicates kept, their number fixed;
#   without_replacement: siblings drawn from that row one by one, each without those before it, in draw order;
#   deterministic: fixed by the context alone.
# a node whose row is zero has deterministic children, and every rule is exact for those too
DraftGuarantee = Literal["any", "sampled", "iid", "without_replacement", "deterministic"]
Knobs = Mapping[str, float]
# as users write them: words for the knobs that are choices
GivenKnobs = Mapping[str, float | str]
# which tokens of the vocabulary a gate takes
Allowed = NDArray[np.bool_]
VerifyFunction = Callable[[DraftTree, ProbRows, UniformSource, int, Knobs], VerifyResult]


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One number a user may set on a rule.

    Attributes:
        name: what users write.
        default: value when it is not given.
        low: least value; `low_open` excludes it.
        high: greatest value; `high_open` excludes it.
        integral: whether only whole numbers are allowed.
        choices: words that users write instead of a number; the value is then the word's place, from 0.
        meaning: what turning it does, in half a sentence.
    """

    name: str
    default: float
    low: float
    high: float
    low_open: bool = False
    high_open: bool = False
    integral: bool = False
    choices: tuple[str, ...] = ()
    meaning: str

    @property
    def allowed(self) -> str:
        """The range as people write it, `(0, 1]` or `p | q`."""
        if self.choices:
            return " | ".join(self.choices)
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        whole = ", a whole number" if self.integral else ""
        return f"{left}{self.low:g}, {self.high:g}{right}{whole}"

    def contains(self, value: float) -> bool:
        """Whether a value is in range; NaN never is."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and (not self.integral or (math.isfinite(value) and value == int(value)))

    def value_of(self, given: float | str) -> float | None:
        """The value for what a user wrote, None when it is not allowed."""
        if isinstance(given, bool) or not isinstance(given, int | float | str):
            return None
        if self.choices:
            return float(self.choices.index(given)) if given in self.choices else None
        return float(given) if not isinstance(given, str) and self.contains(given) else None

    def text_of(self, value: float) -> str:
        """A value as users write it."""
        return self.choices[int(value)] if self.choices else f"{value:g}"


def choice_knob(*, name: str, default: str, choices: tuple[str, ...], meaning: str) -> Knob:
    """Declare a knob that takes one of some words."""
    return Knob(
        name=name,
        default=float(choices.index(default)),
        low=0.0,
        high=len(choices) - 1.0,
        integral=True,
        choices=choices,
        meaning=meaning,
    )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way to verify.

    Attributes:
        name: what users write.
        kind: lossless rules emit the law of plain decoding; the others do not.
        topology: "chain": every node has at most one child; "tree": any tree, chains included.
        draft: what drafting must guarantee (see `DraftGuarantee`).
        knobs: what users may set.
        emitted_law: law of one emitted token that had a draft, given the tokens before it, from p and from
            the law q that draft was drawn from, one-hot for a deterministic one; None: no law of p and q
            alone describes it, measure instead. Of truncation-based rules it is the law with one child: more
            siblings make another. Collaborative rules emit p where the children are deterministic.
        bonus_law: law of a token that had no draft: the bonus, and the first token of a step without drafts.
        overshoot_bound: least upper bound of pi/p over tokens, laws and drafts; None: there is none.
        allowed: of a rule that takes exactly the drafted tokens of a set: the set, from p; None: it is no
            such rule.
        neutral: knobs, as users write them, at which the rule emits `bonus_law` whatever was drafted, which
            is then the target's law or its greedy choice; None: it has no such setting.
        sentence: what the rule means to who reads the text, in one sentence.
        verify: (tree, law after each node, random numbers, position of the root, knobs) -> result.
    """

    name: str
    kind: RuleKind
    topology: Topology
    draft: DraftGuarantee
    knobs: tuple[Knob, ...] = ()
    emitted_law: Callable[[Law, Law, Knobs], Law] | None
    bonus_law: Callable[[Law, Knobs], Law] = lambda p, knobs: p
    overshoot_bound: Callable[[Knobs], float | None]
    allowed: Callable[[Law, Knobs], Allowed] | None = None
    neutral: GivenKnobs | None = None
    sentence: str
    verify: VerifyFunction

    @property
    def is_lossless(self) -> bool:
        """Whether text verified so has the law of plain decoding."""
        return self.kind == "lossless"

    @property
    def uses_draft_probs(self) -> bool:
        """Whether it needs `DraftTree.draft_probs` to be more than the deterministic rule."""
        return self.draft not in ("any", "deterministic")


@dataclass(frozen=True, kw_only=True)
class BoundRule:
    """A rule with a value for each of its knobs.

    Attributes:
        rule: the rule.
        knobs: value of every knob, defaults filled in.
    """

    rule: Rule
    knobs: Knobs

    @property
    def label(self) -> str:
        """Name and knobs, `lenience(l=0.4)`: what reports and responses of a lossy run carry."""
        values = ", ".join(f"{knob.name}={knob.text_of(self.knobs[knob.name])}" for knob in self.rule.knobs)
        return f"{self.rule.name}({values})" if values else self.rule.name

    @property
    def overshoot_bound(self) -> float | None:
        """Least upper bound of pi/p at these knobs, None when there is none."""
        return self.rule.overshoot_bound(self.knobs)

    def emitted_law(self, p: Law, q: Law) -> Law | None:
        """Law of one token that had a draft, None when the rule declares none."""
        return None if self.rule.emitted_law is None else self.rule.emitted_law(p, q, self.knobs)

    def bonus_law(self, p: Law) -> Law:
        """Law of one token that had no draft."""
        return self.rule.bonus_law(p, self.knobs)

    def verify(
        self, tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
    ) -> VerifyResult:
        """Verify one tree; `position` is the absolute position of its root."""
        return self.rule.verify(tree, target_probs, stream, position, self.knobs)


def bind(rule: Rule, knobs: GivenKnobs) -> BoundRule:
    """Give a rule its knobs.

    Raises:
        SpecdecError: an unknown knob, or a value out of range.
    """
    known = {knob.name: knob for knob in rule.knobs}
    values = {knob.name: knob.default for knob in rule.knobs}
    for name, given in knobs.items():
        if name not in known:
            has = f"its knobs are: {', '.join(known)}" if known else "it has none"
            raise SpecdecError(f"rule {rule.name} has no knob {name}; {has}")
        value = known[name].value_of(given)
        if value is None:
            what = "one of" if known[name].choices else "a number in"
            raise SpecdecError(
                f"rule {rule.name}: {name} ({given!r}) must be {what} {known[name].allowed}; "
                f"{known[name].meaning}"
            )
        values[name] = value
    return BoundRule(rule=rule, knobs=values)


def exact_rule(
    *,
    name: str,
    topology: Topology,
    draft: DraftGuarantee,
    sentence: str,
    verify: Callable[[DraftTree, ProbRows, UniformSource, int], VerifyResult],
    emitted_law: Callable[[Law], Law] = lambda p: p,
) -> Rule:
    """Declare a lossless rule: no knobs, its law does not look at q, nothing is overshot."""
    return Rule(
        name=name,
        kind="lossless",
        topology=topology,
        draft=draft,
        emitted_law=lambda p, q, knobs: emitted_law(p),
        bonus_law=lambda p, knobs: emitted_law(p),
        overshoot_bound=lambda knobs: 1.0,
        sentence=sentence,
        verify=lambda tree, target_probs, stream, position, knobs: verify(
            tree, target_probs, stream, position
        ),
    )
