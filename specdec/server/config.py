"""Settings of the server, beside those of the engine.

Owns every default and its reason. Knows nothing of HTTP libraries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.config import SpecConfig
from specdec.errors import SpecdecError


@dataclass(frozen=True, kw_only=True)
class SpecCaps:
    """The largest speculation settings a request may ask for."""

    max_depth: int = 8
    top_k: int = 8
    max_nodes: int = 32

    def covering(self, spec: SpecConfig) -> SpecCaps:
        """These caps, raised to the server's own settings: what is the default is allowed."""
        return SpecCaps(
            max_depth=max(self.max_depth, spec.max_depth),
            top_k=max(self.top_k, spec.top_k),
            max_nodes=max(self.max_nodes, spec.max_nodes),
        )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server meets its clients.

    Attributes:
        model_names: names it answers to; the first stands in responses.
        api_keys: bearer tokens, any of which opens the API; none: it is open.
        allow_origins: CORS origins; none: browsers of other sites get nothing.
        max_waiting: sequences that may wait behind the engine's `max_num_seqs`; more get a 429.
        max_choices: the largest `n`.
        max_prompts: the longest list of prompts in one completions request.
        max_body_bytes: longest request body.
        max_reading_bytes: bodies being read at once, all together; more get a 429.
        max_connections: connections at once; more get a 503, and none beyond what the system's limit of
            open files leaves.
        header_timeout_s: time a client has to send the headers of a request, from its first byte (for the
            first one from connecting).
        body_timeout_s: time a client has to send its body.
        stall_timeout_s: time a client may read nothing of what is written to it.
        max_buffered_tokens: tokens written for one request but not yet read by its client; beyond it the
            request is ended, so that slow readers cost bounded memory and nobody else's time.
        retry_after_s: what a 429 tells the client to wait.
        drain_timeout_s: time that running requests get after SIGTERM.
        step_timeout_s: longest step of the engine; beyond, it hangs, and the server tells its clients and
            ends. 0: none. The first steps on a card compile kernels.
        max_deadline_s: longest deadline of a request, and the deadline of those that give none; None: no
        limit.
        default_rule: rule of requests that name none, with its knobs; None: the exact one that suits.
        caps: see `SpecCaps`.
        log_prompts: whether log lines carry prompts and texts.
        page: whether `/` shows the page for people.
        otlp_traces_endpoint: where a span for each generating request goes (OTLP over HTTP); None: nowhere.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_waiting: int = 128
    max_choices: int = 64
    max_prompts: int = 128
    # a prompt of 128k tokens written as ids is about 1 MB
    max_body_bytes: int = 8 << 20
    max_reading_bytes: int = 64 << 20
    max_connections: int = 2048
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    max_buffered_tokens: int = 8192
    retry_after_s: int = 1
    drain_timeout_s: float = 30.0
    step_timeout_s: float = 300.0
    max_deadline_s: float | None = None
    default_rule: str | None = None
    default_knobs: Mapping[str, float | str] = field(default_factory=dict)
    caps: SpecCaps = field(default_factory=SpecCaps)
    log_prompts: bool = False
    page: bool = True
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise SpecdecError("model_names must hold at least one name, and no empty one")
        for name in ("max_choices", "max_prompts", "max_body_bytes", "max_reading_bytes", "max_connections"):
            _check_at_least(name, getattr(self, name), 1)
        for name in (
            "max_waiting",
            "max_buffered_tokens",
            "retry_after_s",
            "drain_timeout_s",
            "step_timeout_s",
        ):
            _check_at_least(name, getattr(self, name), 0)
        if self.max_deadline_s is not None:
            _check_at_least("max_deadline_s", self.max_deadline_s, 0.001)
        if not all(key and key.isascii() and key.strip() == key for key in self.api_keys):
            raise SpecdecError("api_keys must be ASCII texts without spaces around them, and none empty")


def _check_at_least(name: str, value: Any, low: float) -> None:
    if not value >= low:
        raise SpecdecError(f"{name} ({value}) must be at least {low}")
