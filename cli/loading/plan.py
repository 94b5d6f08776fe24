"""The options of a load, checked before anything is sent.

Owns which options belong together and what their spellings mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import UsageError

ENDPOINTS = ("chat", "completions")
GOODPUT = ("ttft", "tpot", "e2el")
# what the load itself decides; --extra-body must not undo it
_OWN_FIELDS = frozenset(
    {"messages", "prompt", "stream", "stream_options", "n", "seed", "max_tokens", "model"}
)


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to send; the fields are the options of `specdec bench --url`.

    Attributes:
        concurrency: clients at once, several for a sweep; None: no bound.
        request_rate: conversations begun a second, `inf`: all at once, or as clients come free.
        goodput: limits in ms by latency.
        extra_body: further fields of every request.
        duration: seconds for which clients are kept busy in place of one pass over the prompts.
        server_pid: whose memory is sampled meanwhile; None: as the server's own /metrics say.
    """

    url: str
    model: str | None
    endpoint: str
    concurrency: tuple[int | None, ...]
    request_rate: float
    shared_prefix: int
    prefix_groups: int
    turns: int
    think_time: float
    cold: bool
    ignore_eos: bool
    goodput: dict[str, float]
    extra_body: dict[str, Any]
    request_timeout: float
    data: str
    limit: int | None
    max_tokens: int
    temperature: float
    seed: int
    warm_up: int
    out: Path | None
    duration: float | None = None
    server_pid: int | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise UsageError(f"--endpoint ({self.endpoint}) must be one of {', '.join(ENDPOINTS)}")
        if not self.request_rate > 0:
            raise UsageError(
                f"--request-rate ({self.request_rate:g}) must be above 0; inf is no pause at all"
            )
        if not 0 <= self.think_time < math.inf:
            raise UsageError(f"--think-time ({self.think_time:g}) must be 0 or more seconds")
        if not 0 < self.request_timeout < math.inf:
            raise UsageError(f"--request-timeout ({self.request_timeout:g}) must be above 0 seconds")
        if self.turns > 1 and self.endpoint != "chat":
            raise UsageError(f"--turns ({self.turns}) needs --endpoint chat: a completion has no turns")
        if self.think_time and self.turns == 1:
            raise UsageError("--think-time needs --turns of 2 or more: it is the pause between turns")
        if self.prefix_groups > 1 and not self.shared_prefix:
            raise UsageError("--prefix-groups needs --shared-prefix, the tokens that a group shares")
        if self.duration is not None:
            self._check_duration(self.duration)
        elif self.server_pid is not None:
            raise UsageError("--server-pid needs --duration: memory is sampled over time")
        if len(self.concurrency) > 1 and not math.isinf(self.request_rate):
            raise UsageError(
                "--concurrency with several counts is a sweep of clients that ask as fast as they are "
                "answered; drop --request-rate, or give one count"
            )

    def _check_duration(self, duration: float) -> None:
        if not 0 < duration < math.inf:
            raise UsageError(f"--duration ({duration:g}) must be above 0 seconds")
        if len(self.concurrency) != 1 or self.concurrency[0] is None:
            raise UsageError("--duration needs one count of clients: --concurrency 8")
        for option, is_given in (
            ("--request-rate", not math.isinf(self.request_rate)),
            ("--shared-prefix", self.shared_prefix > 0),
        ):
            if is_given:
                raise UsageError(f"{option} and --duration exclude each other: clients are busy all the time")


def parse_concurrency(text: str | None) -> tuple[int | None, ...]:
    """`1,2,4` as counts; nothing as no bound.

    Raises:
        UsageError: anything else.
    """
    if text is None:
        return (None,)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() and int(word) for word in words):
        raise UsageError(f"--concurrency ({text}) must be counts above 0, as in 1,2,4,8")
    counts = tuple(int(word) for word in words)
    if len(set(counts)) != len(counts):
        raise UsageError(f"--concurrency ({text}) must not name the same count twice")
    return counts


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """`ttft:500` and the like as limits in ms.

    Raises:
        UsageError: an unknown latency, or no number above 0.
    """
    limits: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT or not 0 < limit < math.inf or name in limits:
            raise UsageError(f"--goodput ({text}) must be NAME:MS, each NAME of {', '.join(GOODPUT)} once")
        limits[name] = limit
    return limits


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Further fields, as JSON.

    Raises:
        UsageError: no JSON object, or a field that an option sets.
    """
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body ({text:.80}) is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"--extra-body ({text:.80}) must be a JSON object")
    for name in sorted(_OWN_FIELDS & fields.keys()):
        raise UsageError(f"--extra-body must not set {name}, which the load sets itself")
    return fields
