"""Endpoints for those who run the server: health, readiness, metrics, version, models; what is not here."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

import specdec
from specdec.server.problems import Problem
from specdec.server.service import Service

NOT_GENERATED = (
    "this server writes text; {what} are not supported. Use /v1/completions or /v1/chat/completions"
)


def add_operations(router: APIRouter, service: Service) -> None:
    """Put the endpoints on a router."""

    @router.head("/health", include_in_schema=False)
    @router.get("/health", tags=["operations"])
    async def health() -> Response:
        """Liveness: 200 while the process serves and its engine's thread lives."""
        if service.loop.fault is not None:
            raise Problem(503, f"the engine died: {service.loop.fault}", code="engine_error")
        return JSONResponse({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", tags=["operations"])
    async def ready() -> Response:
        """Readiness: 200 while new requests are welcome; a full queue still is, for it answers at once."""
        reason = service.not_ready
        if reason is not None:
            raise Problem(503, reason, code="not_ready", retry_after_s=service.config.retry_after_s)
        return JSONResponse({"status": "ready"})

    @router.get("/metrics", tags=["operations"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters and gauges in Prometheus' text format."""
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/version", tags=["operations"])
    async def version() -> Response:
        """Version of the server."""
        return JSONResponse({"version": specdec.__version__})

    @router.get("/v1/models", tags=["openai"])
    async def models() -> Response:
        """The names this server answers to."""
        listed = [_model(service, name) for name in service.config.model_names]
        return JSONResponse({"object": "list", "data": listed})

    # names may hold slashes
    @router.get("/v1/models/{name:path}", tags=["openai"])
    async def model(name: str) -> Response:
        """One of them."""
        return JSONResponse(_model(service, service.check_model(name)))

    @router.post("/v1/embeddings", tags=["openai"])
    async def embeddings() -> Response:
        """Refused: this server writes text."""
        raise Problem(400, NOT_GENERATED.format(what="embeddings"), code="unsupported")


def _model(service: Service, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "specdec",
        "root": service.config.model_names[0],
        "parent": None,
        "max_model_len": service.engine.max_model_len,
    }
