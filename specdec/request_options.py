"""What a request asks of the machine rather than of the text: how soon, how long, with whom it shares.

None of it changes what is generated. Host data only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from specdec.errors import SpecdecError

MAX_PRIORITY = 1 << 31
MAX_SALT_CHARACTERS = 1024


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Scheduling and cache wishes of one request.

    Attributes:
        priority: lower comes earlier (vLLM's convention); equal ones in order of arrival. Nobody starves:
            one admission in four goes to the request that has waited longest (`specdec.scheduler`).
        deadline_s: seconds from arrival after which the request ends with finish_reason "timeout" and what it
            has so far; None for no limit.
        cache_salt: requests share cached prefixes only with requests of the same salt, so that nobody can
            tell by time what another tenant asked.
        kv_ttl_s: seconds after its end for which the conversation's cached blocks are kept before others that
            are idle (the engine's `max_kv_ttl_s` caps it); 0 keeps them like any other.

    Raises:
        SpecdecError: a value out of range; the message names field, value and range.
    """

    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str | None = None
    kv_ttl_s: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise SpecdecError(f"priority ({self.priority!r}) must be an integer")
        if not -MAX_PRIORITY <= self.priority < MAX_PRIORITY:
            raise SpecdecError(f"priority ({self.priority}) must lie in {-MAX_PRIORITY}..{MAX_PRIORITY - 1}")
        if self.deadline_s is not None:
            _check_seconds("deadline_s", self.deadline_s)
            if self.deadline_s <= 0:
                raise SpecdecError(
                    f"deadline_s ({self.deadline_s}) must be more than 0 seconds; or leave it out"
                )
        _check_seconds("kv_ttl_s", self.kv_ttl_s)
        if self.cache_salt is not None and not (
            isinstance(self.cache_salt, str) and 0 < len(self.cache_salt) <= MAX_SALT_CHARACTERS
        ):
            raise SpecdecError(
                f"cache_salt must be a text of 1..{MAX_SALT_CHARACTERS} characters; or leave it out"
            )


def _check_seconds(name: str, value: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
    ):
        raise SpecdecError(f"{name} ({value!r}) must be a number of seconds, 0 or more")
