"""Who may come in, under which request id, and the log line each request leaves.

Owns keys (compared in constant time), request ids, the count of responses, and the last resort: what escapes
an endpoint becomes a 500 in OpenAI's shape. Log lines are JSON and hold no text of prompts or answers.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.metrics import ServerMetrics
from specdec.server.page import PAGE_PATHS, PAGE_STATE
from specdec.server.problems import Problem
from specdec.server.service import RequestRecord
from specdec.server.tracing import Tracer

logger = logging.getLogger("specdec.server")

# a load balancer and Prometheus carry no key; none of these shows a text
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/ready", "/version"}) | PAGE_PATHS
_QUIET_PATHS = frozenset({"/health", "/metrics", "/ready", PAGE_STATE})
GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Keys:
    """The keys that open the API."""

    def __init__(self, keys: Iterable[str]) -> None:
        # of equal length, so that comparing takes the same time for every key
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: str | None) -> None:
        """Let a bearer of a key pass.

        Raises:
            Problem: 401.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        # every key is compared, whichever fits
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(fits):
            what = "is wrong" if authorization else "is missing"
            message = f"the API key {what}; send Authorization: Bearer KEY"
            raise Problem(401, message, code="invalid_api_key")


class Access:
    """Middleware around every endpoint.

    Args:
        app: what comes next.
        keys: who may pass.
        metrics: counts responses.
        routes: paths that get a label of their own.
        tracer: makes spans of generating requests; None: nobody does.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        metrics: ServerMetrics,
        routes: frozenset[str],
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = RequestRecord(id=given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16))
        scope["specdec_record"] = record
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                self._keys.check(headers.get("authorization"))
            await self._app(scope, receive, send_with_id)
        except Problem as problem:
            await problem_response(problem)(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed", extra={"fields": {"request_id": record.id}})
            if status:
                raise
            failed = Problem(500, "the server failed to answer; its log says why", code="internal_error")
            await problem_response(failed)(scope, receive, send_with_id)
        finally:
            self._note(scope, record, status)
            if self._tracer is not None and scope["path"] in GENERATING_PATHS:
                self._tracer.note(record, headers, status)

    def _note(self, scope: Scope, record: RequestRecord, status: int) -> None:
        path = scope["path"]
        self._metrics.responded(path if path in self._routes else "other", status)
        level = logging.DEBUG if path in _QUIET_PATHS and status == 200 else logging.INFO
        fields: dict[str, Any] = {
            "request_id": record.id,
            "method": scope["method"],
            "path": path if path in self._routes else "other",
            "status": status,
            "seconds": round(time.perf_counter() - record.arrived, 4),
            **record.fields,
        }
        logger.log(level, "request", extra={"fields": fields})


def problem_response(problem: Problem) -> JSONResponse:
    """The response of a problem."""
    return JSONResponse(problem.body(), status_code=problem.status, headers=problem.headers())
