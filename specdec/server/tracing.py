"""One OpenTelemetry span for each generating request, under the attribute names of vLLM (`gen_ai.*`).

Owns those names. A span holds counts and times, never texts. A collector that
is slow or gone costs nothing but its spans: they wait in a bounded queue of the SDK's own thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from specdec.server.otlp import check_tracing, make_exporter
from specdec.server.service import RequestRecord

SPAN = "llm_request"
_FLUSH_MS = 3000


class Tracer:
    """Makes spans of finished requests.

    Args:
        endpoint: see `check_tracing`.
        model: what stands in `gen_ai.response.model`.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "specdec"}))
        self._provider.add_span_processor(BatchSpanProcessor(make_exporter(check_tracing(endpoint))))
        self._tracer = self._provider.get_tracer("specdec.server")
        self._parents = TraceContextTextMapPropagator()

    def note(self, record: RequestRecord, headers: Mapping[str, str], status: int) -> None:
        """A request is over; its span has the client's for parent where its headers name one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        now, elapsed = time.time_ns(), time.perf_counter() - record.arrived
        span = self._tracer.start_span(
            SPAN,
            context=self._parents.extract(headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(record, status, elapsed),
            start_time=now - int(elapsed * 1e9),
        )
        if status >= 500 or not status:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    def close(self) -> None:
        """Send what there is, for a moment."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _attributes(self, record: RequestRecord, status: int, elapsed: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.request.id": record.id,
            "gen_ai.response.model": self._model,
            "gen_ai.usage.prompt_tokens": record.fields.get("prompt_tokens"),
            "gen_ai.usage.completion_tokens": record.fields.get("completion_tokens"),
            "gen_ai.usage.num_sequences": record.fields.get("choices"),
            "gen_ai.latency.e2e": elapsed,
            "gen_ai.response.finish_reasons": record.fields.get("finish_reasons"),
            "specdec.acceptance_length": record.fields.get("acceptance_length"),
            "specdec.verification": record.fields.get("verification"),
            "http.response.status_code": status or None,
        }
        if record.params is not None:
            found |= {
                "gen_ai.request.temperature": record.params.temperature,
                "gen_ai.request.top_p": record.params.top_p,
                "gen_ai.request.max_tokens": record.params.max_tokens,
            }
        if record.ticket is not None:
            found["gen_ai.request.n"] = record.ticket.num_choices
            found |= self._latencies(record)
        return {name: value for name, value in found.items() if value is not None}

    def _latencies(self, record: RequestRecord) -> dict[str, float]:
        assert record.ticket is not None, "it came to the engine"
        marks = record.ticket.marks
        begun = min((each.begun for each in marks if each.begun is not None), default=None)
        first = min((each.first for each in marks if each.first is not None), default=None)
        last = max((each.last for each in marks if each.last is not None), default=None)
        found = {}
        if begun is not None:
            found["gen_ai.latency.time_in_queue"] = begun - record.arrived
        if first is not None and begun is not None and last is not None:
            found |= {
                "gen_ai.latency.time_to_first_token": first - record.arrived,
                "gen_ai.latency.time_in_model_prefill": first - begun,
                "gen_ai.latency.time_in_model_decode": last - first,
                "gen_ai.latency.time_in_model_inference": last - begun,
            }
        return found
