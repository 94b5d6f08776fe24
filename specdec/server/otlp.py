"""Where spans go: an OTLP collector over HTTP, and whether it can be spoken to at all.

Imports nothing heavy, so that a wrong address or a missing package is known at once.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from specdec.errors import SpecdecError

_PACKAGES = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_EXPORT_TIMEOUT_S = 5


def check_tracing(endpoint: str) -> str:
    """The address spans go to.

    Raises:
        SpecdecError: no http address, or the packages are missing.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SpecdecError(f"otlp_traces_endpoint ({endpoint}) must be http://HOST:PORT/v1/traces")
    try:
        missing = [name for name in _PACKAGES if find_spec(name) is None]
    except ModuleNotFoundError as error:
        missing = [str(error.name)]
    if missing:
        raise SpecdecError(
            f'otlp_traces_endpoint needs {missing[0]}; install it with pip install "specdec[otel]"'
        )
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def make_exporter(endpoint: str) -> Any:
    """What sends spans away."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
