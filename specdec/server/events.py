"""Server-sent events: the frame, and a response that ends when its client goes.

Owns that nothing of a stream outlives its connection, and that an error in the middle reaches the client as
an event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.server.problems import Problem, engine_failed

logger = logging.getLogger("specdec.server")

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return (
        f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n".encode()
    )


class EventStream(Response):
    """Sends events as they come.

    Args:
        events: what to send; a `Problem` it raises becomes the last event.
        on_end: called once when the response is over, whoever ended it.
        headers: further headers.
    """

    def __init__(
        self, events: AsyncIterator[bytes], on_end: Callable[[], None], headers: dict[str, str]
    ) -> None:
        super().__init__(status_code=200, media_type="text/event-stream", headers=headers)
        # the length of a stream is not known, and proxies must not gather it
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send, until the events or the client end."""
        sender = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._on_end()
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            tail = DONE
        except Problem as problem:
            tail = event(problem.body()) + DONE
        except Exception as error:
            logger.exception("a stream failed")
            tail = event(engine_failed(type(error).__name__).body()) + DONE
        await send({"type": "http.response.body", "body": tail, "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class GoneWatch:
    """While open, calls `on_gone` should the request's client leave.

    Args:
        request: its body is read already.
        on_gone: called on the event loop, at most once.
    """

    def __init__(self, request: Request, on_gone: Callable[[], None]) -> None:
        self._request = request
        self._on_gone = on_gone

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        await until_gone(self._request.receive)
        self._on_gone()
