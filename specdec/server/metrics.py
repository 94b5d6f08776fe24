"""What the server counts, under the names Prometheus reads.

Owns the names: `specdec:` and then vLLM's, with its meanings, where vLLM has the thing (its dashboards need a
new prefix and no more). Counters only, so that rates are the reader's division. Acceptance length is
`num_committed_tokens / num_verify_steps`; it counts the bonus token and stops at the end of the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

PREFIX = "specdec:"
# seconds; vLLM's buckets, with finer ones below for small models
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SPEC_LABELS = ("rule", "lossy")


@dataclass(frozen=True)
class SpeculationCounters:
    """Counters of one verification rule."""

    counters: tuple[Counter, ...]
    per_depth: Counter
    labels: dict[str, str]

    def at_depth(self, depth: int) -> Counter:
        """Accepted tokens at a depth, 0 for the first drafted one."""
        child: Counter = self.per_depth.labels(**self.labels, position=str(depth))
        return child


class ServerMetrics:
    """All counters and histograms, in a registry of their own."""

    def __init__(self) -> None:
        # the time each counter was made doubles the page and tells nothing
        disable_created_metrics()
        self.registry = CollectorRegistry()
        # memory, open files and processor time of the process, under Prometheus' own names
        ProcessCollector(registry=self.registry)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens read, once for each prompt.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens written.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to the first token.", _LONG
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time of a step over the tokens it committed.", _SHORT
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds", "First to last token, over the tokens after the first.", _SHORT
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to the first step.", _LONG)
        self.end_to_end = self._histogram("e2e_request_latency_seconds", "Arrival to the last token.", _LONG)
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Length of prompts.", _TOKENS)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Length of answers.", _TOKENS
        )
        self._ended = self._counter("request_finished", "Sequences ended.", ("finished_reason",))
        self._refused = self._counter("requests_refused", "Requests ended by a limit.", ("reason",))
        self._responses = self._counter("http_requests", "HTTP responses.", ("route", "code"))
        # known reasons are there from the start, so that the first of them is a rate too
        for reason in ("stop", "length", "timeout", "abort", "error"):
            self._ended.labels(finished_reason=reason)
        for reason in ("queue_full", "slow_reader", "slow_headers", "connections"):
            self._refused.labels(reason=reason)
        self._failed_steps = self._counter("engine_failed_steps", "Engine steps that raised.")
        # in the order of SequenceMeter's counts
        self._speculation = tuple(
            self._counter(f"spec_decode_{name}", text, _SPEC_LABELS)
            for name, text in (
                ("num_verify_steps", "Target passes, one for each sequence, prompts' passes not counted."),
                ("num_drafts", "Those of them that verified drafted tokens."),
                ("num_draft_tokens", "Tokens drafted."),
                ("num_accepted_tokens", "Drafted tokens that the rule accepted."),
                ("num_committed_tokens", "Tokens that verify steps added to texts."),
            )
        )
        self._per_depth = self._counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted a token at a depth.",
            (*_SPEC_LABELS, "position"),
        )
        self._by_rule: dict[str, SpeculationCounters] = {}

    def speculation_of(self, rule: str, *, lossy: bool) -> SpeculationCounters:
        """Counters of a rule."""
        if rule not in self._by_rule:
            labels = {"rule": rule, "lossy": "true" if lossy else "false"}
            children = tuple(counter.labels(**labels) for counter in self._speculation)
            self._by_rule[rule] = SpeculationCounters(children, self._per_depth, labels)
        return self._by_rule[rule]

    def ended(self, reason: str) -> None:
        """A sequence ended."""
        self._ended.labels(finished_reason=reason).inc()

    def refused(self, reason: str) -> None:
        """A request met a limit of the server."""
        self._refused.labels(reason=reason).inc()

    def responded(self, route: str, status: int) -> None:
        """A response was begun."""
        self._responses.labels(route=route, code=str(status)).inc()

    def failed_step(self) -> None:
        """A step of the engine raised."""
        self._failed_steps.inc()

    def totals(self) -> dict[str, int]:
        """The main counts, for the end of a run."""
        sums: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                sums[name] = sums.get(name, 0) + sample.value
        names = {
            "sequences": "request_finished_total",
            "prompt_tokens": "prompt_tokens_total",
            "completion_tokens": "generation_tokens_total",
            "verify_steps": "spec_decode_num_verify_steps_total",
            "drafted": "spec_decode_num_draft_tokens_total",
            "accepted": "spec_decode_num_accepted_tokens_total",
            "committed": "spec_decode_num_committed_tokens_total",
        }
        return {shown: int(sums.get(name, 0)) for shown, name in names.items()}

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)
