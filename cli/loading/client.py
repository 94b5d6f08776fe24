"""One OpenAI-compatible server over HTTP: its model, and requests as streams of events.

Owns HTTP, the reading of server-sent events and the words for what can go wrong. Knows nothing of load or
time. Keys come from the environment, never the command line: run records keep that. Proxies of the
environment are left aside, for a measurement through one is another measurement.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx2

from specdec.errors import SpecdecError, UsageError

KEY_VARIABLES = ("SPECDEC_API_KEY", "OPENAI_API_KEY")
CONNECT_TIMEOUT_S = 10.0
_SHOWN = 300


class RequestFailed(Exception):
    """A request that gave no whole answer.

    Attributes:
        kind: a few words that say what happened, equal for equal failures.
        detail: what the server or the network said.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


def base_url(given: str) -> str:
    """The address that endpoint names follow.

    Raises:
        UsageError: no http address, or one with a password, which run records would keep.
    """
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--url ({given}) must be http://HOST:PORT/v1 or https://HOST/v1")
    if "@" in parts.netloc:
        raise UsageError(f"--url must carry no key; set {KEY_VARIABLES[0]} in the environment")
    trimmed = given.rstrip("/")
    return trimmed if trimmed.endswith("/v1") else f"{trimmed}/v1"


class LoadClient:
    """Asks one server.

    Args:
        url: see `base_url`.
        timeout_s: longest silence of a server; a request ends with it.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        key = next((value for name in KEY_VARIABLES if (value := os.environ.get(name))), None)
        self._base = base_url(url)
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S), pool=None),
            # a client is a connection; the pool must not queue them
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def close(self) -> None:
        """End all connections."""
        await self._http.aclose()

    async def first_model(self) -> str:
        """The first model that the server names.

        Raises:
            SpecdecError: no answer, or none of an OpenAI-compatible server.
        """
        try:
            reply = await self._http.get(f"{self._base}/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except httpx2.HTTPStatusError as error:
            raise SpecdecError(
                f"--url ({self._base}) answered {error.response.status_code} for /models"
            ) from error
        except httpx2.HTTPError as error:
            raise SpecdecError(f"--url ({self._base}) does not answer: {_said(error)}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise SpecdecError(f"--url ({self._base}) lists no model under /models") from error

    async def metrics(self) -> str | None:
        """The server's /metrics, None when it has none."""
        try:
            reply = await self._http.get(f"{self._base.removesuffix('/v1')}/metrics")
        except httpx2.HTTPError:
            return None
        return reply.text if reply.status_code == 200 else None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Events of one streamed request, up to [DONE].

        Raises:
            RequestFailed: anything but a whole stream.
        """
        try:
            async with self._http.stream("POST", f"{self._base}/{path}", json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    raise RequestFailed(f"http {reply.status_code}", text[:_SHOWN])
                async for data in _data_lines(reply):
                    if data == b"[DONE]":
                        return
                    yield _event(data)
        except httpx2.TimeoutException as error:
            raise RequestFailed("timeout", _said(error)) from error
        except httpx2.HTTPError as error:
            raise RequestFailed("connection", _said(error)) from error
        raise RequestFailed("cut off", "the stream ended without [DONE]")


async def _data_lines(reply: httpx2.Response) -> AsyncIterator[bytes]:
    """The data of each event; lines end at line feeds alone, for texts may hold other line separators."""
    rest = b""
    async for chunk in reply.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RequestFailed("no JSON", data[:_SHOWN].decode(errors="replace")) from error
    if not isinstance(event, dict):
        raise RequestFailed("no JSON", "an event is no object")
    if event.get("error") is not None:
        raise RequestFailed("error event", str(event["error"])[:_SHOWN])
    return event


def _said(error: httpx2.HTTPError) -> str:
    return str(error) or type(error).__name__
