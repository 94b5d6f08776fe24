"""What a report says of bench records: gain and its certainty, acceptance, latency, where the time goes.

Owns the sentences, the tables, and the charts of time; those of acceptance are `report_acceptance.py`'s.
Figures are the record's own. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specdec.cli.paper import KeyFigures, Notes, Table, Terms
from specdec.cli.reporting.acceptance import acceptance_charts, gain_charts, length_of
from specdec.cli.reporting.charts import number_with, parts, shares
from specdec.cli.reporting.exactness import exactness_lines
from specdec.cli.reporting.grid import cell_tables, headline_rows, is_grid
from specdec.cli.reporting.parts import Part, SectionParts
from specdec.cli.reporting.records import BenchRow
from specdec.stats import DEFINITIONS

_LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per token after the first",
    "itl_ms": "gap between two steps",
    "e2el_ms": "end to end",
}
_COLUMNS = (
    *("setting", "rule", "n", "acceptance length", "interval", "acceptance rate", "tokens/s", "speedup"),
    *("interval", "identical"),
)


def bench_sentence(rows: Sequence[BenchRow]) -> str:
    """What was gained and how certain it is: of the fastest exact setting, and of the slowest."""
    drafting = [row for row in rows if row.drafts and row.lossless and row.body.get("speedup") is not None]
    if not drafting:
        return _without_gain(rows)
    ordered = sorted(drafting, key=lambda row: row.body["speedup"])
    best, worst = ordered[-1], ordered[0]
    said = (
        f"{best.label} writes {number_with(best.body['speedup'], best.body['speedup_interval'])} times the "
        f"tokens per second of {best.record.body['target']} without speculation "
        f"({gain_in_words(best.body['speedup_interval'])}); {identical_in_words(best)}; acceptance length "
        f"{length_of(best)}; n = {best.body['prompts']} prompts of {best.data}, 95 % intervals."
    )
    if len(ordered) > 1:
        said += (
            f" It is the fastest of {len(ordered)} exact settings; the slowest, {worst.label}, has "
            f"{number_with(worst.body['speedup'], worst.body['speedup_interval'])}."
        )
    return said


def _without_gain(rows: Sequence[BenchRow]) -> str:
    simulated = [row for row in rows if "simulated" in row.body]
    if simulated:
        best = max(simulated, key=lambda row: row.body.get("speedup") or 0.0)
        return (
            "Acceptance was SIMULATED, for speed alone; the texts mean nothing: at acceptance length "
            f"{length_of(best)} the speed-up is "
            f"{number_with(best.body.get('speedup'), best.body.get('speedup_interval'))}."
        )
    if any(row.drafts for row in rows):
        return "Only lossy settings speculate here: their texts are not the target's, so no gain is claimed."
    return f"Nothing speculates in this run of {rows[0].record.body['target']}: there is no gain to speak of."


def gain_in_words(interval: Sequence[float] | None) -> str:
    """What an interval of a speed-up allows to say."""
    if interval is None:
        return "one prompt: no interval, so nothing is certain"
    if interval[0] > 1:
        return "faster: the interval excludes 1"
    return (
        "slower: the interval excludes 1" if interval[1] < 1 else "no difference shown: the interval holds 1"
    )


def identical_in_words(row: BenchRow) -> str:
    """How many texts are those without speculation."""
    same, count = row.body.get("identical"), row.body.get("answers", row.body["prompts"])
    return "texts were not compared" if same is None else f"{same} of {count} texts identical"


def key_figures(rows: Sequence[BenchRow]) -> KeyFigures | None:
    """The fastest exact setting's numbers."""
    drafting = [row for row in rows if row.drafts and row.lossless and row.body.get("speedup") is not None]
    if not drafting:
        return None
    best = max(drafting, key=lambda row: row.body["speedup"])
    speed, length = best.body["speedup_interval"], best.acceptance["acceptance_length_interval"]
    count = best.body.get("answers", best.body["prompts"])
    same = best.body.get("identical")
    figures = [
        ("speedup", f"{best.body['speedup']:.2f}x", _between(speed)),
        ("acceptance length", f"{best.acceptance['acceptance_length']:.2f}", _between(length)),
        ("identical texts", "-" if same is None else f"{same}/{count}", "against no speculation"),
        (
            "tokens per second",
            f"{best.body['tokens_per_second']:.1f}",
            f"{best.label}, batch {best.batch_size}",
        ),
    ]
    return KeyFigures(figures=figures)


def _between(interval: Sequence[float] | None) -> str:
    return "no interval" if interval is None else f"95 % interval {interval[0]:.2f}..{interval[1]:.2f}"


def bench_section(rows: Sequence[BenchRow], key: str, title: str) -> SectionParts:
    """One section of the rows of one record.

    Args:
        rows: all of one record.
        key: unique in the report.
        title: of the section.
    """
    drafting = [row for row in rows if row.drafts]
    definitions = {**DEFINITIONS, **(rows[0].record.body.get("definitions") or {})}
    if is_grid(rows[0].record):
        together = headline_rows([rows[0].record])
        grid: list[Part] = [
            bench_sentence(together),
            *_warnings(together),
            settings_table(together),
            *gain_charts([row for row in together if row.drafts], key),
            *cell_tables(rows),
            _terms(definitions),
        ]
        return SectionParts(title=title, blocks=grid)
    blocks: list[Part] = [
        bench_sentence(rows),
        *_warnings(rows),
        settings_table(rows),
        *gain_charts(drafting, key),
        *acceptance_charts(drafting, key, definitions),
        *_latency(rows, key),
        *_time_and_memory(rows, key),
        _terms(definitions),
    ]
    return SectionParts(title=title, blocks=blocks)


def _terms(definitions: Mapping[str, str]) -> Terms:
    wanted = (
        *("verify_steps", "drafted", "accepted", "committed", "acceptance_length", "acceptance_rate"),
        *("acceptance_per_depth", "acceptance_per_depth_conditional", "speedup", "identical"),
    )
    return Terms(meanings=[(name, definitions[name]) for name in wanted if name in definitions])


def _warnings(rows: Sequence[BenchRow]) -> list[Part]:
    lines_of: list[str] = []
    body = rows[0].record.body
    if body.get("complete") is False:
        points = body.get("points", {})
        lines_of.append(
            f"Unfinished: {points.get('finished')} of {points.get('planned')} points were measured."
        )
    if "simulation" in body:
        lines_of.append(str(body["simulation"]))
    lines_of += exactness_lines(body)
    lines_of += [
        f"{row.label}: LOSSY rule {row.body['rule']}; its text does not have the target's law."
        for row in rows
        if not row.body.get("lossless", True)
    ]
    left = body.get("left_out") or ()
    lines_of += [f"left out: {one['data']} {one['id']} turn {one['turn']}: {one['reason']}" for one in left]
    return [Notes(lines=lines_of)] if lines_of else []


def settings_table(rows: Sequence[BenchRow]) -> Table:
    """All settings with what a reader asks first."""
    table = [
        [
            row.label,
            row.body.get("rule"),
            row.body["prompts"],
            row.acceptance["acceptance_length"],
            row.acceptance["acceptance_length_interval"],
            row.acceptance["acceptance_rate"],
            row.body["tokens_per_second"],
            row.body.get("speedup", row.body.get("relative")),
            row.body.get("speedup_interval", row.body.get("relative_interval")),
            _of_all(row),
        ]
        for row in rows
    ]
    return Table(
        columns=_COLUMNS,
        rows=table,
        caption="n: prompts. Intervals: 95 % bootstrap over prompts. Speedup and identical: against the same "
        "engine without speculation; below 1 is slower.",
    )


def _of_all(row: BenchRow) -> str | None:
    same = row.body.get("identical")
    return None if same is None else f"{same}/{row.body.get('answers', row.body['prompts'])}"


def _latency(rows: Sequence[BenchRow], key: str) -> list[Part]:
    blocks: list[Part] = []
    samples = {
        row.label: [
            1e3 * _middle(answer["seconds"]) / answer["tokens"] for answer in row.answers if answer["tokens"]
        ]
        for row in rows
    }
    samples = {label: values for label, values in samples.items() if values}
    if samples:
        blocks.append(
            shares(
                f"{key}-per-token",
                "Time per token of each answer",
                samples,
                unit="ms per token, prompt included",
                caption="Seconds of an answer (of its batch, shared equally) / its tokens; mark: the median.",
            )
        )
    firsts = {row.label: [_middle(a["ttft_ms"]) for a in row.answers if a.get("ttft_ms")] for row in rows}
    firsts = {label: values for label, values in firsts.items() if values}
    if firsts:
        blocks.append(
            shares(
                f"{key}-ttft",
                "Time to first token",
                firsts,
                unit="ms",
                caption="Batch asked for to the first token of the answer; the mark is the median.",
            )
        )
    table = []
    for row in rows:
        for name, words in _LATENCIES.items():
            spread = (row.body.get("latency") or {}).get(name)
            if spread is not None:
                table.append(
                    [row.label, words, spread["n"], *(spread[p] for p in ("mean", "p50", "p90", "p99"))]
                )
    if table:
        columns = ["setting", "latency in ms", "n", "mean", "median", "90 %", "99 %"]
        blocks.append(Table(columns=columns, rows=table, caption="Latencies, as vLLM's bench defines them."))
    return blocks


def _time_and_memory(rows: Sequence[BenchRow], key: str) -> list[Part]:
    blocks: list[Part] = []
    timed = {row.label: row.body["step_time"]["shares"] for row in rows if row.body.get("step_time")}
    if timed:
        blocks.append(
            parts(
                f"{key}-steps",
                "Where the time goes",
                timed,
                caption="Shares of wall time: draft (proposing), verify (target passes, prompts included), "
                "sample (rules and draws), commit (moving rows, writing tokens down), host (the rest).",
            )
        )
    held = [row for row in rows if row.body.get("memory") or row.body.get("energy")]
    if held:
        table = [
            [
                row.label,
                _mib((row.body.get("memory") or {}).get("total")),
                _mib((row.body.get("memory") or {}).get("draft_weights")),
                (row.body.get("energy") or {}).get("joules_per_token"),
            ]
            for row in held
        ]
        blocks.append(
            Table(columns=["setting", "memory, MiB", "of it the draft", "joules per token"], rows=table)
        )
    return blocks


def _mib(count: float | None) -> float | None:
    return None if count is None else count / 2**20


def _middle(values: Sequence[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    assert known, "an answer has a time"
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
