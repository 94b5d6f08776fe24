"""`specdec rules`: which verification rules there are, and what each declares.

Owns the options and what is printed; the rules are :mod:`specdec.verification.registry`'s.
"""

from typing import Annotated

import typer


def rules(
    name: Annotated[
        str | None, typer.Argument(help="One rule, with its knobs [default: all of them].")
    ] = None,
) -> None:
    """List the verification rules: exact or lossy, knobs, overshoot bound, meaning."""
    from specdec.cli.console import emit_json, print_table
    from specdec.verification.registry import RULES, describe, rule_named

    listed = list(RULES.values()) if name is None else [rule_named(name).rule]
    found = [describe(rule) for rule in listed]
    print_table(
        "Verification rules",
        ["rule", "kind", "drafts", "law", "pi/p at most", "what it means"],
        [
            [
                rule["name"],
                rule["kind"],
                f"{rule['topology']}, {rule['draft'].replace('_', ' ')}",
                "declared" if rule["declares_law"] else "none",
                rule["overshoot_bound"],
                rule["sentence"],
            ]
            for rule in found
        ],
    )
    knobs = [[rule["name"], *knob.values()] for rule in found for knob in rule["knobs"]]
    if knobs:
        print_table("Knobs", ["rule", "knob", "default", "allowed", "what it does"], knobs)
    emit_json({"schema": "specdec.rules/1", "rules": found})
