"""What can go wrong with a request, in OpenAI's error shape.

Owns the status codes, the `error` object and which field an engine's refusal is about. A client's mistake is
never a 5xx; those are for a broken engine, and for a server that is full or on its way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from specdec.errors import SpecdecError

# engine messages begin with the field they are about
_FIELD = re.compile(r"^(?:rule \w+: )?([a-z_]+)\b")

_LONGEST = 1000
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class Problem(Exception):
    """An answer that is no result.

    Attributes:
        status: HTTP status.
        message: for people; names value and limit.
        param: the request's field at fault, None for none.
        code: a word for programs.
        retry_after_s: when to come again, for 429 and 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # a client's own value may be in it, however long that was
        self.message = message if len(message) <= _LONGEST else message[:_LONGEST] + "..."
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error object, as OpenAI's clients read it."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def bad_field(param: str | None, message: str, code: str = "invalid_value") -> Problem:
    """A 400 about one field."""
    return Problem(400, message, param=param, code=code)


def engine_failed(detail: str) -> Problem:
    """A 500: the engine could not finish what it had begun."""
    return Problem(500, f"the engine failed: {detail}", code="engine_error")


@contextmanager
def about_fields(names: Mapping[str, str], default: str | None = None) -> Iterator[None]:
    """Turn the runtime's refusals into 400s that name the request's field.

    Args:
        names: the runtime's names and the request's fields they come from, where those differ or are known.
        default: the field when the message begins with none of them.

    Raises:
        Problem: for any SpecdecError of the block.
    """
    try:
        yield
    except SpecdecError as error:
        found = _FIELD.match(str(error))
        name = found[1] if found else ""
        raise bad_field(names.get(name, default), str(error)) from error
