"""`specdec rules` shows what the registry declares."""

import json

import pytest

from specdec.cli.main import main
from specdec.verification.registry import RULES


def test_every_rule_is_listed_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["rules"]
    assert [rule["name"] for rule in found] == list(RULES)
    for rule in found:
        assert rule["sentence"].endswith("."), f"{rule['name']} must say what it means in a sentence"
        assert rule["kind"] == RULES[rule["name"]].kind


def test_one_rule_is_shown_with_the_range_and_default_of_its_knobs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rules", "typical"]) == 0
    table, last = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "target | truncated | argmax | draft" in table
    (rule,) = json.loads(last)["rules"]
    assert [knob["name"] for knob in rule["knobs"]] == ["epsilon", "delta", "fallback"]
    assert (rule["knobs"][2]["default"], rule["declares_law"]) == ("argmax", True)


def test_an_unknown_rule_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "leniency"]) == 1
    assert "the rules are: greedy" in capsys.readouterr().err
