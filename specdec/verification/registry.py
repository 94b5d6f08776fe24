"""All rules by name: what users may ask for, and what each declares.

Owns the table and the lookup with its messages. A new rule is declared in the file that holds its code and
listed here.
"""

from __future__ import annotations

from specdec.errors import SpecdecError
from specdec.verification.coupled import COUPLED
from specdec.verification.deterministic import DETERMINISTIC
from specdec.verification.greedy import GREEDY
from specdec.verification.rejection import REJECTION
from specdec.verification.rules import BoundRule, GivenKnobs, Rule, bind

EXACT_RULES: tuple[Rule, ...] = (GREEDY, DETERMINISTIC, COUPLED, REJECTION)
RULES: dict[str, Rule] = {rule.name: rule for rule in EXACT_RULES}


def rule_named(name: str, knobs: GivenKnobs | None = None) -> BoundRule:
    """Look a rule up and set its knobs; what is not given keeps its default.

    Raises:
        SpecdecError: an unknown rule or knob, or a value out of range.
    """
    if name not in RULES:
        raise SpecdecError(f"rule {name} is not known; the rules are: {', '.join(RULES)}")
    return bind(RULES[name], knobs or {})
