"""Connections that cost something bounded: how many there are, and how long each may say or take nothing.

Owns the limits below HTTP, which uvicorn does not have: the number of connections, the time for the headers
of a request, and the time a client may leave what is written to it lying. Bodies are `bodies`' to limit, text
that nobody reads is `tickets`'. Source: uvicorn's h11 protocol, which this extends.
"""

from __future__ import annotations

import asyncio
import json
import resource
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.server.metrics import ServerMetrics
from specdec.server.problems import Problem

# files of the process beside connections: libraries, model, log, blocks on a disk
_OTHER_FILES = 256


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """See `ServerConfig` for what they mean."""

    max_connections: int
    header_timeout_s: float
    stall_timeout_s: float
    retry_after_s: int


class LimitedConfig(uvicorn.Config):
    """uvicorn's settings, with limits for each connection."""

    def __init__(self, app: Any, limits: ConnectionLimits, metrics: ServerMetrics, **settings: Any) -> None:
        super().__init__(app, http=LimitedConnection, **settings)
        self.limits = limits
        self.metrics = metrics


class LimitedConnection(H11Protocol):
    """One connection."""

    def __init__(self, config: LimitedConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._limits = config.limits
        self._metrics = config.metrics
        self._headers_due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or say that there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._metrics.refused("connections")
            most = self._limits.max_connections
            self._refuse(
                Problem(
                    503,
                    f"the server has {most} connections, and takes no more",
                    code="too_many_connections",
                    retry_after_s=self._limits.retry_after_s,
                )
            )
        else:
            self._watch_headers()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        if not self._is_refused:
            super().data_received(data)
            self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._headers_due = _stopped(self._headers_due)
        self._stalled = _stopped(self._stalled)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not read what was written."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._limits.stall_timeout_s, self._give_up)

    def resume_writing(self) -> None:
        """It reads."""
        self._stalled = _stopped(self._stalled)
        super().resume_writing()

    def _watch_headers(self) -> None:
        """Begin or end the time for headers; between two requests uvicorn's keep-alive timer runs instead."""
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._headers_due = _stopped(self._headers_due)
        elif self._headers_due is None:
            self._headers_due = self.loop.call_later(self._limits.header_timeout_s, self._no_headers)

    def _no_headers(self) -> None:
        seconds = self._limits.header_timeout_s
        if self.conn.trailing_data[0]:
            self._metrics.refused("slow_headers")
            self._refuse(Problem(408, f"the headers did not arrive within {seconds:g} seconds"))
        else:
            self.transport.close()

    def _give_up(self) -> None:
        self._metrics.refused("slow_reader")
        self.transport.abort()

    def _refuse(self, problem: Problem) -> None:
        """Answer without a request, and close."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        body = json.dumps(problem.body()).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **problem.headers(),
        }
        lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """None, which takes the timer's place."""
    if timer is not None:
        timer.cancel()
    return None


def allow_files(max_connections: int) -> int:
    """Let the process have a file for each connection, as far as the system lets it.

    Returns:
        How many connections there may be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return min(max_connections, max(1, soft - _OTHER_FILES))
    return max_connections
