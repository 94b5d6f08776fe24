"""From the bytes of a request to its checked fields.

Owns the limits on bytes and time, and the strictness of the JSON: UTF-8, no NaN, bounded depth. What does not
pass is a 400 or 413 before anything else is asked of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from specdec.server.config import ServerConfig
from specdec.server.fields import IGNORED_FIELDS, IGNORED_MESSAGE_FIELDS, Fields
from specdec.server.problems import Problem, bad_field

FieldsT = TypeVar("FieldsT", bound=Fields)

# a client in the middle of sending reads no answer; this much more is taken and dropped for its sake
_DRAINED_BYTES = 64 << 20
_DRAIN_TIMEOUT_S = 0.5
_SHOWN_CHARACTERS = 100


class BodyReader:
    """Reads bodies within the server's limits."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._reading = 0

    async def fields(self, request: Request, model: type[FieldsT]) -> tuple[FieldsT, list[str]]:
        """The checked fields of a request's JSON body, and which ignored ones it had.

        Raises:
            Problem: 400 with the field, 408 too slow, 413 too long, 429 too many at once.
        """
        return parse_fields(await self._read(request), model)

    async def _read(self, request: Request) -> bytes:
        limit = self._config.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit:
            await _drain(request)
            raise self._too_long()
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    self._reading += len(chunk)
                    if len(body) > limit:
                        await _drain(request)
                        raise self._too_long()
                    if self._reading > self._config.max_reading_bytes:
                        raise Problem(
                            429,
                            "the server reads too many bodies at once",
                            code="busy",
                            retry_after_s=self._config.retry_after_s,
                        )
        except TimeoutError as error:
            seconds = self._config.body_timeout_s
            raise Problem(408, f"the body did not arrive within {seconds:g} seconds") from error
        except ClientDisconnect as error:
            raise Problem(400, "the client left before its body was whole") from error
        finally:
            self._reading -= len(body)
        return bytes(body)

    def _too_long(self) -> Problem:
        return Problem(
            413, f"the body must be at most {self._config.max_body_bytes} bytes", code="body_too_long"
        )


async def _drain(request: Request) -> None:
    """Take and drop what a client is still sending, for a moment."""
    taken = 0
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            while taken < _DRAINED_BYTES:
                message = await request.receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                taken += len(message.get("body", b""))
    except TimeoutError:
        return


def parse_fields(body: bytes, model: type[FieldsT]) -> tuple[FieldsT, list[str]]:
    """The checked fields of a JSON body, and which ignored ones it had.

    Raises:
        Problem: 400.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, f"the body is not valid JSON: {error}"[:300], code="invalid_json") from error
    if not isinstance(data, dict):
        kind = "null" if data is None else type(data).__name__
        raise Problem(400, f"the body must be a JSON object, not {kind}", code="invalid_json")
    ignored = sorted(name for name in IGNORED_FIELDS & data.keys() if data[name] is not None)
    data = _without(data, IGNORED_FIELDS)
    messages = data.get("messages")
    if isinstance(messages, list):
        data["messages"] = [
            _without(message, IGNORED_MESSAGE_FIELDS) if isinstance(message, dict) else message
            for message in messages
        ]
    try:
        return model.model_validate(data), ignored
    except ValidationError as error:
        raise _field_problem(error.errors(include_url=False, include_context=False)) from error
    except (OverflowError, RecursionError) as error:
        raise Problem(400, f"a value of the body is out of every range: {error}"[:300]) from error


def _without(data: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    dropped = frozenset(names)
    return {name: value for name, value in data.items() if value is not None and name not in dropped}


def _field_problem(errors: list[ErrorDetails]) -> Problem:
    """The first thing that is wrong, by field."""
    # of the branches of a union the one that came furthest is the one that was meant
    first = max(errors, key=lambda error: (errors[0]["loc"][:1] == error["loc"][:1], len(error["loc"])))
    param = _spell(first["loc"])
    if first["type"] == "extra_forbidden":
        return bad_field(param, f"{param} is not a field this server knows; leave it out", "unknown_field")
    if first["type"] == "missing":
        return bad_field(param, f"{param} is required", "missing_field")
    given = repr(first["input"])
    shown = given if len(given) <= _SHOWN_CHARACTERS else given[:_SHOWN_CHARACTERS] + "..."
    return bad_field(param, f"{param} ({shown}): {first['msg'][:1].lower()}{first['msg'][1:]}")


def _spell(loc: tuple[int | str, ...]) -> str:
    """A place as people write it, `messages[0].content`; the names of union branches are left out."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            text += f".{part}" if text else part
    return text


# how pydantic names the branches of unions
_BRANCHES = frozenset({"str", "int", "float", "bool", "constrained", "NamedTool", "TextPart"})
