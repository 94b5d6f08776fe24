"""Requests made up from the server's own description: never a 5xx, always the described shape."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

pytestmark = pytest.mark.slow

OPERATIONS = (
    *("POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /detokenize"),
    *("GET /v1/models", "GET /v1/models/{name}", "POST /v1/embeddings", "GET /health", "GET /ready"),
    *("GET /metrics", "GET /version"),
)


@pytest.fixture(scope="module")
def described(make_engine: Callable[..., Any], solo: Any, serving: Any) -> Iterator[Any]:
    """The server; deadlines keep whatever is made up short."""
    with serving(make_engine(solo), max_deadline_s=0.3) as running:
        yield running


@pytest.fixture(scope="module")
def operations(described: Any) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{described.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def test_the_description_has_every_endpoint(operations: dict[str, Any]) -> None:
    assert set(operations) == set(OPERATIONS)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_made_up_request_breaks_the_server(
    operations: dict[str, Any], described: Any, label: str, mode: str
) -> None:
    from schemathesis import checks

    operation = operations[label]
    if mode == "negative" and not operation.body:
        pytest.skip("nothing in it can be wrong")
    wanted = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    if mode == "negative":
        wanted.append(checks.negative_data_rejection)
    kind = schemathesis.GenerationMode(mode)

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=kind))
    def check(case: Any) -> None:
        case.validate_response(case.call(), checks=wanted)

    check()
    described.wait_until_idle()
    assert described.service.loop.fault is None
    assert described.metric("engine_failed_steps_total") == 0
    assert described.metric("http_requests_total", code="500") == 0
