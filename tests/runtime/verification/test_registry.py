"""What the registry tells: names, guarantees, knobs with ranges, and messages that say what to do."""

from __future__ import annotations

import pytest

from specdec.errors import SpecdecError
from specdec.verification.registry import EXACT_RULES, RULES, rule_named
from specdec.verification.rules import Knob


def test_every_rule_is_listed_under_its_own_name_and_explains_itself() -> None:
    for name, rule in RULES.items():
        assert name == rule.name
        assert rule.sentence.endswith(".")
        assert all(knob.contains(knob.default) for knob in rule.knobs)
        assert rule_named(name).label.startswith(name)


def test_the_exact_rules_overshoot_nothing_and_have_no_knobs() -> None:
    assert {rule.name for rule in EXACT_RULES} == {
        "greedy",
        "deterministic",
        "target-only",
        "coupled",
        "rejection",
        "block",
        "traversal",
        "multi-round",
        "k-seq",
    }
    for rule in EXACT_RULES:
        bound = rule_named(rule.name)
        assert rule.is_lossless
        assert rule.knobs == ()
        assert bound.overshoot_bound == 1.0
        assert bound.label == rule.name


def test_unknown_rules_and_knobs_are_refused_with_what_is_known() -> None:
    with pytest.raises(
        SpecdecError, match=r"rule rejektion is not known; the rules are: greedy, .*rejection"
    ):
        rule_named("rejektion")
    with pytest.raises(SpecdecError, match="rule block has no knob epsilon; it has none"):
        rule_named("block", {"epsilon": 0.1})


KNOB = Knob(name="share", default=0.5, low=0.0, high=1.0, low_open=True, meaning="how much")


@pytest.mark.parametrize("value", [0.0, -0.1, 1.1, float("nan"), float("inf"), True, "much"])
def test_a_knob_takes_no_value_out_of_its_range(value: float | str) -> None:
    assert KNOB.allowed == "(0, 1]"
    assert KNOB.value_of(value) is None
    assert KNOB.value_of(1) == 1.0
