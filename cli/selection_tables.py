"""What `specdec select-layers` shows: the choice among its rivals, how sure it is, what it cost.

Owns the tables and the one-line summary. Reads only a selection document.
"""

from __future__ import annotations

from typing import Any

from specdec.cli.console import print_table

SHOWN_RIVALS = 3
REFERENCE_NAMES = {
    "default": "default [2, N/2, N-3]",
    "uniform": "uniform",
    "last_third": "last third",
    "last": "last boundary",
}
FRACTIONS = {0.125: "1/8", 0.25: "1/4", 0.5: "1/2", 1.0: "all"}


def print_selection(document: dict[str, Any]) -> None:
    """Print the tables of a selection."""
    _print_choice(document)
    _print_stability(document)
    _print_searches(document)
    _print_agreement(document["agreement"])
    print(_cost_line(document["cost"]))
    for name, computed in document["cost"]["computed_h200"].items():
        print(
            f"computed, not measured: a {name} target at these settings on one H200-class card would take "
            f"{computed['seconds']:.0f} s ({computed['peta_flop']:.2f} PFLOP), "
            f"{computed['weights_gib']:.0f} GiB of half-precision weights and "
            f"{computed['working_gib']:.1f} GiB beside them"
        )


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """The selection in a few values, for the last line."""
    bootstrap, sweep = document["stability"]["bootstrap"], document["lambda_sweep"]
    default = document["references"].get("default")
    return {
        "boundaries": document["boundaries"],
        "objective": document["objective"]["value"],
        "search": document["search"],
        "subset_frequency": None if bootstrap is None else bootstrap["subset_frequency"],
        "stable_lambda": None if sweep is None else [sweep["stable_low"], sweep["stable_high"]],
        "runner_up": document["runners_up"][0]["boundaries"] if document["runners_up"] else None,
        "default_objective": None if default is None else default["value"],
        "tokens": document["cost"]["tokens"],
        "seconds": document["cost"]["seconds"],
        "choose_seconds": document["cost"]["choose_seconds"],
        "peak_memory_gib": document["cost"]["peak_memory_gib"],
    }


def _print_choice(document: dict[str, Any]) -> None:
    rivals = document["runners_up"][:SHOWN_RIVALS]
    landscape = document["landscape"]
    ranked = document["search"] == "exhaustive"
    named = [("chosen", document["objective"]), *((f"rival {n}", each) for n, each in enumerate(rivals, 1))]
    rows = [
        (name, {**each, "better": place / landscape["sets"]} if ranked else each)
        for place, (name, each) in enumerate(named)
    ]
    references = document["references"]
    rows += [(REFERENCE_NAMES[name], reference) for name, reference in references.items()]
    probed = any(each["probe"] is not None for _, each in rows)
    sweep = document["lambda_sweep"]
    terms = ", ".join(
        name if weight == 1 else f"{name} x {weight:g}"
        for name, weight in document["objective"]["terms"].items()
    )
    title = (
        f"{document['target']['name']}: boundaries {_spelled(document['boundaries'])} of "
        f"0..{document['target']['num_layers']}, {document['search']} search, {terms}"
    )
    if sweep is not None:
        high = "any" if sweep["stable_high"] is None else f"{sweep['stable_high']:.2f}"
        title += f", lambda {sweep['used']:g} (same set from {sweep['stable_low']:.2f} to {high})"
    kind = "sampled" if landscape["sampled"] else "all"
    columns = ["set", "boundaries", "objective", "mean z", "mean CKA"]
    columns.append(f"better of {kind} {landscape['sets']:,} sets")
    print_table(
        title,
        columns + (["overlap t+1", "overlap t+2"] if probed else []),
        [
            [
                name,
                _spelled(each["boundaries"]),
                each["value"],
                each["mean_informativeness_z"],
                each["mean_pairwise_cka"],
                f"{100 * each['better']:.2f} %" if "better" in each else "-",
                *(_overlaps(each["probe"]) if probed else []),
            ]
            for name, each in rows
        ],
    )


def _overlaps(probe: dict[str, float] | None) -> list[float | None]:
    return [None, None] if probe is None else [probe["overlap_next"], probe["overlap_second"]]


def _print_stability(document: dict[str, Any]) -> None:
    stability, count = document["stability"], len(document["boundaries"])
    rows: list[list[str]] = []
    bootstrap = stability["bootstrap"]
    if bootstrap is not None:
        label = f"{bootstrap['resamples']} resamples of {bootstrap['units']} {bootstrap['unit']}"
        rows.append([label, *_most_frequent(bootstrap)])
    rows += [
        [
            f"{FRACTIONS[size['fraction']]} of the texts ({size['tokens']:,} tokens)",
            *_most_frequent(size["sample"]),
        ]
        for size in stability["sizes"]
    ]
    names = document["agreement"]["names"]
    base = names.index(document["estimator"]) if document["estimator"] in names else None
    for group, prefix in (("domains", "only "), ("estimators", "by ")):
        for choice in stability[group]:
            tokens = "" if choice["tokens"] is None else f" ({choice['tokens']:,} tokens)"
            shared = f"{round(choice['overlap'] * count)} of {count} boundaries"
            if group == "estimators" and base is not None and choice["name"] in names:
                tau = document["agreement"]["tau"][base][names.index(choice["name"])]
                shared += "" if tau is None else f", tau {tau:.2f}"
            rows.append([f"{prefix}{choice['name']}{tokens}", _spelled(choice["boundaries"]), shared])
    if rows:
        print_table("how sure: what other evidence chooses", ["evidence", "chooses", "the same"], rows)


def _most_frequent(sample: dict[str, Any]) -> list[str]:
    subset, _ = sample["most_frequent"][0]
    return [_spelled(subset), f"{100 * sample['subset_frequency']:.0f} % of draws"]


def _print_searches(document: dict[str, Any]) -> None:
    rows = [
        [
            outcome["search"],
            _spelled(outcome["boundaries"]),
            outcome["objective"],
            outcome["objective_gap"],
            outcome["criterion"],
            outcome["criterion_value"],
            outcome["criterion_best"],
        ]
        for outcome in document["searches"]
    ]
    columns = ["search", "finds", "objective", "gap", "maximises", "its value", "best of all"]
    print_table("searches on the same evidence", columns, rows)


def _print_agreement(agreement: dict[str, Any]) -> None:
    names = agreement["names"]
    if len(names) < 2:
        return
    rows = [
        [f"{row + 1} {name}", *("-" if tau is None else f"{tau:.2f}" for tau in agreement["tau"][row][:row])]
        + [""] * (len(names) - 1 - row)
        for row, name in enumerate(names)
    ]
    print_table(
        "Kendall's tau between rankings of boundaries", ["ranking", *map(str, range(1, len(names)))], rows
    )


def _cost_line(cost: dict[str, Any]) -> str:
    domains = ", ".join(f"{name} {tokens:,}" for name, tokens in cost["domains"].items())
    return (
        f"{cost['tokens']:,} tokens of {cost['texts']} texts{f' ({domains})' if domains else ''}: scored in "
        f"{cost['seconds']:.1f} s ({cost['tokens_per_second']:.0f} tokens/s, probe "
        f"{cost['probe_seconds']:.1f} s), chosen in {cost['choose_seconds']:.1f} s, "
        f"peak {cost['peak_memory_gib']:.2f} GiB"
    )


def _spelled(boundaries: list[int]) -> str:
    return ", ".join(str(boundary) for boundary in boundaries)
