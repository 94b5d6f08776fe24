"""All endpoints as one ASGI application, with its OpenAPI description.

Owns how the parts hang together. Bodies are read and checked by `bodies`, so the description of each is added
by hand, from the same models.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import specdec
from specdec.server.access import Access, Keys, problem_response
from specdec.server.chat import Chats
from specdec.server.completions import Completions
from specdec.server.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    Fields,
    GeneratingFields,
    TokenizeFields,
)
from specdec.server.gauges import EngineGauges
from specdec.server.operations import add_operations
from specdec.server.page import add_page
from specdec.server.problems import Problem
from specdec.server.prompts import Prompts
from specdec.server.service import Service
from specdec.server.tokenizing import Tokenizing
from specdec.server.tracing import Tracer

BODIES: tuple[type[Fields], ...] = (CompletionFields, ChatFields, TokenizeFields, DetokenizeFields)
_PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    400: "A field is wrong; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    405: "Another method is needed.",
    408: "The client was too slow.",
    413: "The body is too long.",
    429: "The server is full; Retry-After says when to come again.",
    500: "The engine failed.",
    503: "The server is shutting down, or not ready.",
}


def make_app(service: Service) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread."""
    endpoint = service.config.otlp_traces_endpoint
    tracer = None if endpoint is None else Tracer(endpoint, service.config.model_names[0])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.loop.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(
        title="specdec",
        version=specdec.__version__,
        lifespan=lifespan,
        # their pages load scripts from elsewhere
        docs_url=None,
        redoc_url=None,
        responses={status: _described(text) for status, text in _STATUSES.items()},
    )
    service.metrics.registry.register(EngineGauges(service.loop))
    router = APIRouter()
    prompts = Prompts(service.encoder, service.tokens, service.engine.max_model_len)
    Completions(service, prompts).add_to(router, tags=["openai"], openapi_extra=_body(CompletionFields))
    Chats(service, prompts).add_to(router, tags=["openai"], openapi_extra=_body(ChatFields))
    Tokenizing(service, prompts).add_to(
        router,
        tokenize={"tags": ["tokens"], "openapi_extra": _body(TokenizeFields)},
        detokenize={"tags": ["tokens"], "openapi_extra": _body(DetokenizeFields)},
    )
    add_operations(router, service)
    if service.config.page:
        add_page(router, service)
    routes = frozenset(route.path for route in router.routes if isinstance(route, APIRoute))
    app.include_router(router)
    app.add_exception_handler(HTTPException, _no_such_page)
    app.add_exception_handler(Problem, _problem)
    app.add_middleware(
        Access,
        keys=Keys(service.config.api_keys),
        metrics=service.metrics,
        routes=routes,
        tracer=tracer,
    )
    if service.config.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.allow_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=[
                "x-request-id",
                "x-specdec-verification",
                "x-specdec-exact-against",
                "x-specdec-ignored",
                "retry-after",
            ],
        )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem), "registered for problems"
    return problem_response(error)


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTP errors"
    text = f"{request.method} {request.url.path:.200} is not served here: {error.detail}"
    response = problem_response(Problem(error.status_code, text, code="unknown_url"))
    response.headers.update(error.headers or {})
    return response


def _described(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _PROBLEM}}}


def _body(model: type[Fields]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    described: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
    }
    if issubclass(model, GeneratingFields):
        events = {"schema": {"type": "string"}}
        described["responses"] = {"200": {"description": "OK", "content": {"text/event-stream": events}}}
    return described


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = described.setdefault("components", {}).setdefault("schemas", {})
        for model in BODIES:
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        app.openapi_schema = described
    return app.openapi_schema
