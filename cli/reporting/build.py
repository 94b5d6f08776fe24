"""From records to a report: which sections, in which order, and the summary on top.

Owns the order and the summary. What a section says is its own module's. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specdec.cli.paper import KeyFigures, Notes, Paper
from specdec.cli.reporting.bench import bench_section, bench_sentence, key_figures
from specdec.cli.reporting.fidelity import audit_section, audit_sentence, sweep_section, sweep_sentence
from specdec.cli.reporting.grid import headline_rows
from specdec.cli.reporting.layers import (
    selection_section,
    selection_sentence,
    study_section,
    study_sentence,
    training_section,
    training_sentence,
)
from specdec.cli.reporting.parts import Part, SectionParts
from specdec.cli.reporting.records import RUN, TRAINING, BenchRow, Record, bench_rows
from specdec.cli.reporting.speed import (
    compare_section,
    compare_sentence,
    load_section,
    load_sentence,
    load_sweep_section,
    load_sweep_sentence,
    micro_section,
    micro_sentence,
)
from specdec.cli.reporting.stack import stack_section


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report before its charts are drawn."""

    title: str
    lead: str
    sections: Sequence[SectionParts]

    def paper(self, stem: str) -> Paper:
        """The report, its charts drawn; their PNG files are named after `stem`."""
        return Paper(
            title=self.title, lead=self.lead, sections=[section.section(stem) for section in self.sections]
        )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    title: str
    sentence: Callable[[Record], str]
    section: Callable[[Record, str, str], SectionParts]


# in the order of a report; benches come before these, trainings behind
_KINDS: dict[str, _Kind] = {
    "compare": _Kind(title="Other engines", sentence=compare_sentence, section=compare_section),
    "load": _Kind(title="Under load", sentence=load_sentence, section=load_section),
    "load_sweep": _Kind(
        title="From one client to many", sentence=load_sweep_sentence, section=load_sweep_section
    ),
    "audit": _Kind(title="Is the text unchanged", sentence=audit_sentence, section=audit_section),
    "sweep": _Kind(title="Cost, acceptance, fidelity", sentence=sweep_sentence, section=sweep_section),
    "micro": _Kind(title="Cost of verifying", sentence=micro_sentence, section=micro_section),
    "verify-cost": _Kind(title="Cost of verifying", sentence=micro_sentence, section=micro_section),
    "selection": _Kind(title="Which layers", sentence=selection_sentence, section=selection_section),
    "study": _Kind(title="Heads at equal budgets", sentence=study_sentence, section=study_section),
}


def build_report(records: Sequence[Record], title: str | None = None) -> Report:
    """Every record's section, what was gained first.

    Args:
        records: at least one.
        title: of the report; made from the records when None.
    """
    rows = headline_rows(records)
    sections: list[SectionParts] = []
    said: list[str] = []
    for record in (one for one in records if one.kind == "bench"):
        # names that differ among its own rows are enough inside its section
        own = bench_rows([record])
        said.append(_named(record, bench_sentence(headline_rows([record])), records))
        sections.append(
            bench_section(own, f"r{len(sections)}", _titled("Acceptance and speed", record, records))
        )
    for kind, how in _KINDS.items():
        for record in (one for one in records if one.kind == kind):
            said.append(_named(record, how.sentence(record), records))
            heading = _titled(how.title, record, records)
            sections.append(how.section(record, f"r{len(sections)}", heading))
    trained = [record for record in records if record.kind == TRAINING]
    if trained:
        said.append(training_sentence(trained))
        sections.append(training_section(trained, f"r{len(sections)}", "How drafts grew"))
    sections.append(stack_section(records))
    lead = _lead(rows, said)
    # what stands on top is not said again
    said = [one for one in said if not one.endswith(lead)]
    sections = [replace(one, blocks=[block for block in one.blocks if block != lead]) for one in sections]
    return Report(
        title=title or f"specdec report: {_subject(records)}",
        lead=lead,
        sections=[*_summary(rows, said), *sections],
    )


def _lead(rows: Sequence[BenchRow], said: Sequence[str]) -> str:
    """What was gained, over all benches; without one, the first thing there is to say."""
    if rows:
        return bench_sentence(rows)
    return said[0] if said else "Run records alone: what was run and on what, without figures."


def _summary(rows: Sequence[BenchRow], said: Sequence[str]) -> list[SectionParts]:
    blocks: list[Part] = []
    figures: KeyFigures | None = key_figures(rows) if rows else None
    if figures:
        blocks.append(figures)
    if said:
        blocks.append(Notes(lines=said))
    return [SectionParts(title="In short", blocks=blocks)] if blocks else []


def _titled(title: str, record: Record, records: Sequence[Record]) -> str:
    return f"{title}: {record.name}" if len(records) > 1 else title


def _named(record: Record, sentence: str, records: Sequence[Record]) -> str:
    return f"{record.name}: {sentence}" if len(records) > 1 else sentence


def _subject(records: Sequence[Record]) -> str:
    """The targets the records are about."""
    names = []
    for record in records:
        target = record.body.get("target", record.body.get("model"))
        if isinstance(target, dict):
            target = target.get("name")
        if isinstance(target, str) and record.kind != RUN:
            names.append(target.rstrip("/").split("/")[-1])
    return ", ".join(dict.fromkeys(names)) or ", ".join(record.name for record in records)
