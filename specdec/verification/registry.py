"""All rules by name: what users may ask for, and what each declares.

Owns the table and the lookup with its messages. A new rule is declared in the file that holds its code and
listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import SpecdecError
from specdec.verification.block import BLOCK
from specdec.verification.cascades import CASCADES
from specdec.verification.collaborative import COLLABORATIVE
from specdec.verification.coupled import COUPLED
from specdec.verification.deterministic import DETERMINISTIC
from specdec.verification.greedy import GREEDY
from specdec.verification.judge import JUDGE
from specdec.verification.k_seq import K_SEQ
from specdec.verification.multi_round import MULTI_ROUND
from specdec.verification.rejection import REJECTION
from specdec.verification.rules import BoundRule, GivenKnobs, Rule, bind
from specdec.verification.target_only import TARGET_ONLY
from specdec.verification.thresholds import THRESHOLDS
from specdec.verification.traversal import TRAVERSAL
from specdec.verification.truncation import GATES
from specdec.verification.windowed import WINDOWED

EXACT_RULES: tuple[Rule, ...] = (
    GREEDY,
    DETERMINISTIC,
    TARGET_ONLY,
    COUPLED,
    REJECTION,
    BLOCK,
    TRAVERSAL,
    MULTI_ROUND,
    K_SEQ,
)
# off unless a user names one; every response and report of a run with one carries `BoundRule.label`
LOSSY_RULES: tuple[Rule, ...] = (*GATES, THRESHOLDS, WINDOWED, *COLLABORATIVE, *CASCADES, JUDGE)
RULES: dict[str, Rule] = {rule.name: rule for rule in (*EXACT_RULES, *LOSSY_RULES)}


def rule_named(name: str, knobs: GivenKnobs | None = None, rules: Mapping[str, Rule] = RULES) -> BoundRule:
    """Look a rule up and set its knobs; what is not given keeps its default.

    Raises:
        SpecdecError: an unknown rule or knob, or a value out of range.
    """
    if name not in rules:
        raise SpecdecError(f"rule {name} is not known; the rules are: {', '.join(rules)}")
    return bind(rules[name], knobs or {})


def describe(rule: Rule) -> dict[str, Any]:
    """What a rule declares, as plain values; the overshoot bound is that at the default knobs."""
    return {
        "name": rule.name,
        "kind": rule.kind,
        "topology": rule.topology,
        "draft": rule.draft,
        "declares_law": rule.emitted_law is not None,
        "overshoot_bound": bind(rule, {}).overshoot_bound,
        "neutral": None if rule.neutral is None else dict(rule.neutral),
        "sentence": rule.sentence,
        "knobs": [
            {
                "name": knob.name,
                "default": knob.text_of(knob.default),
                "allowed": knob.allowed,
                "meaning": knob.meaning,
            }
            for knob in rule.knobs
        ],
    }
