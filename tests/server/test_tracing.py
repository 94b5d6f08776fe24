"""One span a request: under vLLM's names, with the client's for parent, and without texts."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TEXT = "/v1/completions"
BODY = {"prompt": "the in", "max_tokens": 8, "ignore_eos": True, "temperature": 0, "n": 2}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr("specdec.server.tracing.make_exporter", lambda endpoint: exporter)
    return exporter


def test_a_request_is_one_span_with_its_counts_and_times(
    make_engine: Callable[..., Any], solo: Any, serving: Any, spans: Any
) -> None:
    from opentelemetry.trace import SpanKind, StatusCode

    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(make_engine(solo), otlp_traces_endpoint="http://127.0.0.1:9", max_waiting=0) as server:
        before = time.time_ns()
        assert server.request("POST", TEXT, BODY, {"traceparent": parent, "x-request-id": "mine"})[0] == 200
        server.events(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        )
        assert server.post(TEXT, {**BODY, "top_p": 7})[0] == 400
        assert server.request("GET", "/v1/models")[0] == 200
        after = time.time_ns()
    whole, chat, wrong = sorted(spans.get_finished_spans(), key=lambda span: span.start_time)
    said = dict(whole.attributes)
    assert whole.name == "llm_request"
    assert whole.kind is SpanKind.SERVER
    assert f"{whole.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == parent.split("-")[2]
    assert before <= whole.start_time < whole.end_time <= after
    assert said["gen_ai.request.id"] == "mine"
    assert said["gen_ai.request.n"] == said["gen_ai.usage.num_sequences"] == 2
    assert said["gen_ai.usage.completion_tokens"] == 16
    assert said["gen_ai.usage.prompt_tokens"] > 0
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (8, 0.0)
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    waited, first, total = (
        said[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= waited <= first <= total
    inference = said["gen_ai.latency.time_in_model_inference"]
    parts = said["gen_ai.latency.time_in_model_prefill"] + said["gen_ai.latency.time_in_model_decode"]
    assert inference == pytest.approx(parts)
    assert dict(chat.attributes)["gen_ai.usage.completion_tokens"] == 3
    assert dict(wrong.attributes)["http.response.status_code"] == 400
    assert wrong.status.status_code is StatusCode.UNSET, "the server did nothing wrong"
    assert "the in" not in str([dict(span.attributes) for span in (whole, chat, wrong)])


def test_spans_go_out_over_http_and_a_collector_that_is_gone_holds_nobody_up(
    make_engine: Callable[..., Any], solo: Any, serving: Any
) -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    collector = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    with serving(
        make_engine(solo), otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}"
    ) as server:
        assert server.post(TEXT, BODY)[0] == 200
    collector.shutdown()
    thread.join()
    collector.server_close()
    [(path, data)] = received
    assert path == "/v1/traces"
    assert b"llm_request" in data
    with serving(
        make_engine(solo), otlp_traces_endpoint=f"http://127.0.0.1:{collector.server_port}"
    ) as server:
        status, _, answer = server.request("POST", TEXT, BODY)
        assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 16)


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    from specdec.errors import SpecdecError
    from specdec.server.otlp import check_tracing

    with pytest.raises(SpecdecError, match="must be http://HOST:PORT/v1/traces"):
        check_tracing(endpoint)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.errors import SpecdecError
    from specdec.server import otlp

    monkeypatch.setattr(otlp, "_PACKAGES", ("opentelemetry", "nowhere.sdk"))
    with pytest.raises(SpecdecError, match=r'needs nowhere; install it with pip install "specdec\[otel\]"'):
        otlp.check_tracing("http://localhost:4318")
