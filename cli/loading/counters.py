"""Do a server's counters agree with what its clients saw? Exactly, or it is said where not.

Owns the reading of Prometheus' text and the table of names (ours are vLLM's behind another prefix). A request
whose end no client saw (cut off, timed out) makes some counts unknowable; those are named, not guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.cli.loading.drive import LoadRecord
from specdec.cli.loading.figures import acceptance_of

PREFIXES = ("specdec:", "vllm:")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# counter, and the field of a whole answer that it sums
_TOKENS = {"prompt_tokens_total": "prompt_tokens", "generation_tokens_total": "completion_tokens"}
_FINISHED = {"specdec:": "request_finished_total", "vllm:": "request_success_total"}
_SPECULATION = {
    "spec_decode_num_verify_steps_total": "verify_steps",
    "spec_decode_num_draft_tokens_total": "drafted",
    "spec_decode_num_accepted_tokens_total": "accepted",
    "spec_decode_num_committed_tokens_total": "committed",
}


@dataclass(frozen=True)
class Sample:
    """One line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Counters:
    """A server's metrics at one moment.

    Args:
        text: in Prometheus' format.
    """

    def __init__(self, text: str) -> None:
        self.samples = [
            Sample(found[1], dict(_LABEL.findall(found[2] or "")), float(found[3]))
            for line in text.splitlines()
            if (found := _SAMPLE.match(line))
        ]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples that carry these labels."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and all(sample.labels.get(key) == text for key, text in labels.items())
        )

    def has(self, name: str) -> bool:
        return any(sample.name == name for sample in self.samples)

    def label_values(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.samples if sample.name == name}

    @property
    def prefix(self) -> str | None:
        """Whose names these are, None for nobody's we know."""
        return next((each for each in PREFIXES if self.has(f"{each}generation_tokens_total")), None)

    @property
    def num_here(self) -> float:
        """Requests that run or wait."""
        return self.total(f"{self.prefix}num_requests_running") + self.total(
            f"{self.prefix}num_requests_waiting"
        )


def reconcile(
    before: Counters, after: Counters, records: Sequence[LoadRecord], path: str
) -> dict[str, Any] | None:
    """Each counter's growth beside what the clients saw; None when the names are nobody's we know.

    Args:
        before: metrics of the idle server before the load.
        after: those after it.
        records: every request in between.
        path: the endpoint they went to, as the server labels it.
    """
    prefix = after.prefix
    if prefix is None:
        return None
    whole = [record for record in records if record.error is None]
    # an error event or a broken stream came with a 200; without any answer nobody knows
    codes = Counter(
        "unknown"
        if record.error in ("timeout", "connection")
        else record.error.removeprefix("http ")
        if record.error is not None and record.error.startswith("http ")
        else "200"
        for record in records
    )
    seen: dict[str, tuple[float, float]] = {}

    def compare(name: str, clients: float, counter: str, **labels: str) -> None:
        grown = after.total(prefix + counter, **labels) - before.total(prefix + counter, **labels)
        seen[name] = (grown, clients)

    if prefix == PREFIXES[0]:
        responses = "http_requests_total"
        for code in sorted(after.label_values(prefix + responses, "code") | codes.keys() - {"unknown"}):
            compare(f"responses {code}", codes[code], responses, route=path, code=code)
    for counter, field in _TOKENS.items():
        compare(field, sum(getattr(record, field) or 0 for record in whole), counter)
    finished = _FINISHED[prefix]
    reasons = Counter(record.finish_reason for record in whole)
    for reason in sorted(after.label_values(prefix + finished, "finished_reason")):
        # a call read out of an answer ended with a stop
        calls = reasons["tool_calls"] if reason == "stop" else 0
        compare(f"finished {reason}", reasons[reason] + calls, finished, finished_reason=reason)
    told = acceptance_of(whole)
    if told is not None and prefix == PREFIXES[0]:
        for counter, field in _SPECULATION.items():
            compare(field, told[field], counter)
    unseen = (
        len(records)
        - len(whole)
        - sum(count for code, count in codes.items() if code not in ("200", "unknown"))
    )
    return {
        "counts": {
            name: {"server": server, "clients": clients, "equal": server == clients}
            for name, (server, clients) in seen.items()
        },
        "ends_no_client_saw": unseen,
        "equal": all(server == clients for server, clients in seen.values()),
    }
