"""What a report says of other engines, of a server under load, and of the machine.

Owns the sections of compare, load, micro and verify-cost records. Figures are the records' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.cli.paper import Notes, Table, Terms
from specdec.cli.reporting.acceptance import pair
from specdec.cli.reporting.charts import Mark, forest, lines, number_with, parts
from specdec.cli.reporting.parts import Part, SectionParts
from specdec.cli.reporting.records import Record


def compare_sentence(record: Record) -> str:
    """Every other engine's speed against ours without speculation."""
    told = [
        f"{one['engine']} {number_with(one['relative'], one['relative_interval'])}"
        for one in record.body["engines"]
        if one["relative"] is not None
    ]
    first = record.body["engines"][0]
    return (
        f"Tokens per second relative to {first['engine']} on the same token ids ({first['prompts']} "
        "prompts): " + ("; ".join(told) if told else "no other engine was measured") + "."
    )


def compare_section(record: Record, key: str, title: str) -> SectionParts:
    """Engines on the same prompts."""
    engines = record.body["engines"]
    table = Table(
        columns=[
            *("engine", "weights", "tokens/s", "interval", "relative", "interval", "speedup", "interval"),
            *("identical", "acceptance length"),
        ],
        rows=[
            [
                one["engine"],
                one["engine_facts"].get("weights"),
                one["tokens_per_second"],
                one["tokens_per_second_interval"],
                one["relative"],
                one["relative_interval"],
                one["speedup"],
                one["speedup_interval"],
                f"{one['identical']}/{one['prompts']}",
                one["acceptance_length"],
            ]
            for one in engines
        ],
        caption="Relative, identical: against the first engine. Speedup: against the same engine without "
        "speculation. Intervals: 95 % bootstrap over prompts.",
    )
    chart = forest(
        f"{key}-speed",
        "Tokens per second",
        [
            Mark(
                label=one["engine"],
                value=one["tokens_per_second"],
                interval=pair(one["tokens_per_second_interval"]),
            )
            for one in engines
        ],
        unit="tokens per second",
        caption="New tokens / seconds of the engine's own calls, the same token ids for all, turn by turn. "
        "Lines: 95 % bootstrap intervals over prompts.",
    )
    return SectionParts(
        title=title, blocks=[compare_sentence(record), table, chart, *_terms(record.body.get("definitions"))]
    )


def load_sentence(record: Record) -> str:
    """The most that came out, and what was lost."""
    points = record.body["points"]
    best = max(points, key=lambda point: point["output_throughput"] or 0.0)
    failed = sum(sum(point["errors"].values()) for point in points)
    said = "no request failed" if not failed else f"{failed} requests failed"
    return (
        f"{record.body['model']} gives {best['output_throughput'] or 0.0:.1f} tokens per second at most, "
        f"with {_clients(best)}; {said}."
    )


def _clients(point: dict[str, object]) -> str:
    count = point["concurrency"]
    return "no bound on clients" if count is None else f"{count} clients at once"


def load_section(record: Record, key: str, title: str) -> SectionParts:
    """A server under load: throughput and latencies over clients."""
    points = record.body["points"]
    spreads = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
    rows = [
        [
            point["concurrency"],
            f"{point['completed']}/{point['requests']}",
            sum(point["errors"].values()),
            point["output_throughput"],
            point["request_goodput"],
            *((point[name] or {}).get(at) for name in spreads for at in ("p50", "p99")),
            (point["acceptance"] or {}).get("acceptance_length"),
        ]
        for point in points
    ]
    columns = ["clients", "whole answers", "errors", "tokens/s", "goodput"]
    columns += [f"{name.removesuffix('_ms')} {at}" for name in spreads for at in ("median", "99 %")]
    blocks: list[Part] = [
        load_sentence(record),
        Table(columns=[*columns, "acceptance length"], rows=rows, caption="Latencies in ms, over requests."),
    ]
    counted = sorted((p for p in points if p["concurrency"] is not None), key=lambda p: p["concurrency"])
    if len(counted) > 1:
        blocks.append(
            lines(
                f"{key}-throughput",
                "Throughput over clients",
                {"tokens": [(float(p["concurrency"]), p["output_throughput"] or 0.0, None) for p in counted]},
                x="clients at once",
                y="output tokens per second",
                log_x=True,
                caption="Completion tokens of whole answers / duration; higher is better.",
            )
        )
        for name, words in (("ttft_ms", "Time to first token"), ("tpot_ms", "Time per token")):
            known = [p for p in counted if p[name]]
            if known:
                blocks.append(
                    lines(
                        f"{key}-{name.removesuffix('_ms')}",
                        f"{words} over clients",
                        {
                            words_of: [(float(p["concurrency"]), p[name][at], None) for p in known]
                            for at, words_of in (("p50", "median"), ("p99", "99th percentile"))
                        },
                        x="clients at once",
                        y="ms",
                        log_x=True,
                        caption="Over requests; lower is better.",
                    )
                )
    return SectionParts(title=title, blocks=[*blocks, *_terms(record.body.get("definitions"))])


def micro_sentence(record: Record) -> str:
    """What verifying more rows costs here."""
    rows = record.body["verify_cost" if record.kind == "micro" else "passes"]
    told = [f"{one['rows']} rows {one['relative']:.2f}" for one in rows if one["rows"] > 1][:4]
    return f"A target pass over more rows of a sequence costs, in passes over one row: {', '.join(told)}."


def micro_section(record: Record, key: str, title: str) -> SectionParts:
    """Kernels, steps, and T(m)/T(1)."""
    body = record.body
    cost = body["verify_cost" if record.kind == "micro" else "passes"]
    curves: dict[str, list[tuple[float, float, tuple[float, float] | None]]] = {}
    for one in cost:
        name = f"batch {one['batch']}, context {one['context']}" if "batch" in one else "one sequence"
        spread = (one["relative_low"], one["relative_high"]) if "relative_low" in one else None
        curves.setdefault(name, []).append((float(one["rows"]), one["relative"], spread))
    blocks: list[Part] = [
        micro_sentence(record),
        lines(
            f"{key}-verify-cost",
            "Cost of verifying m rows",
            curves,
            x="rows m of a sequence",
            y="T(m) / T(1)",
            log_x=True,
            caption="Median time of a target pass over m rows / over one row. A draft pays while the "
            "acceptance length exceeds this, drafting included.",
        ),
    ]
    if record.kind == "micro":
        steps = {f"batch {one['batch']}, {one['step_ms']:.1f} ms": one["shares"] for one in body["steps"]}
        blocks.append(
            parts(
                f"{key}-steps",
                "Parts of a speculative step",
                steps,
                caption="Shares of a step's time; acceptance SIMULATED, random head; medians of rounds.",
            )
        )
        blocks += [_kernels(record), *([Notes(lines=body["left_out"])] if body.get("left_out") else [])]
    return SectionParts(title=title, blocks=blocks)


def _kernels(record: Record) -> Table:
    return Table(
        columns=[
            "kernel",
            "size",
            "ms",
            "GB/s",
            "of copy",
            "TFLOP/s",
            "of matrix",
            "baselines' time over ours",
        ],
        rows=[
            [
                *(one[name] for name in ("kernel", "size", "ms", "gb_per_s", "bandwidth_share")),
                *(one[name] for name in ("tflop_per_s", "matrix_share")),
                ", ".join(f"{name} {base['speedup']:.2f}" for name, base in one["baselines"].items()) or None,
            ]
            for one in record.body["kernels"]
        ],
        caption=f"Kernels on {record.body['device']}, medians; shares are of the copy bandwidth and matrix "
        "rate of the same run.",
    )


def _terms(definitions: dict[str, str] | None) -> Sequence[Part]:
    return [Terms(meanings=list(definitions.items()))] if definitions else []


def load_sweep_sentence(record: Record) -> str:
    """Where adaptive speculation gains and loses against none, over all points."""
    ratios = [
        (point, point["adaptive_over_off"]) for point in record.body["points"] if point["adaptive_over_off"]
    ]
    if not ratios:
        return "No point was measured with and without speculation."
    low, high = (pick(ratios, key=lambda one: one[1]["value"]) for pick in (min, max))

    def told(one: tuple[Mapping[str, Any], Mapping[str, Any]]) -> str:
        point, ratio = one
        return (
            f"{number_with(ratio['value'], ratio['interval'])} ({point['data']}, {point['clients']} clients)"
        )

    return (
        f"Adaptive speculation with {record.body['draft']} over none on {record.body['target']}: "
        f"from {told(low)} to {told(high)} times the tokens per second."
    )


def load_sweep_section(record: Record, key: str, title: str) -> SectionParts:
    """Adaptive speculation against none and the best fixed setting, from one client to many."""
    points = record.body["points"]
    blocks: list[Part] = [load_sweep_sentence(record)]
    for name, words in (
        ("adaptive_over_off", "Adaptive over no speculation"),
        ("adaptive_over_best_fixed", "Adaptive over the best fixed setting"),
    ):
        curves: dict[str, list[tuple[float, float, tuple[float, float] | None]]] = {}
        for point in sorted((p for p in points if p[name]), key=lambda p: int(p["clients"])):
            mark = (float(point["clients"]), point[name]["value"], pair(point[name]["interval"]))
            curves.setdefault(point["data"], []).append(mark)
        if curves:
            blocks.append(
                lines(
                    f"{key}-{name.replace('_', '-')}",
                    words,
                    curves,
                    x="clients at once",
                    y="times the tokens per second",
                    log_x=True,
                    bottom=None,
                    caption="Same requests, in turn; below 1 is slower. Lines: 95 % bootstrap intervals "
                    "over turns; none with one turn.",
                )
            )
    rows = [
        [
            point["data"],
            point["clients"],
            name,
            one["tokens_per_second"],
            (one["over_off"] or {}).get("value"),
            (one["over_off"] or {}).get("interval"),
            one["acceptance_length"],
            f"{one['identical']}/{one['compared']}",
        ]
        for point in points
        for name, one in point["settings"].items()
    ]
    columns = [
        "data",
        "clients",
        "setting",
        "tokens/s",
        "over none",
        "interval",
        "acceptance length",
        "identical",
    ]
    blocks.append(Table(columns=columns, rows=rows, caption="All settings"))
    return SectionParts(title=title, blocks=[*blocks, *_terms(record.body.get("definitions"))])
