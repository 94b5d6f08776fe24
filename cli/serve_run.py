"""The work of `specdec serve`: engine, service, and what is said at the end."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from specdec.cli.first_words import first_words
from specdec.config import EngineConfig
from specdec.drafts import check_spelling
from specdec.engine import Engine
from specdec.rule_choice import choose_rule
from specdec.sampling_params import SamplingParams
from specdec.server.config import ServerConfig
from specdec.server.logs import log_json
from specdec.server.run import run_server
from specdec.server.service import Service
from specdec.server.tls import TlsFiles

_SETTLE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came of a server: counts, its exit code, and whether its engine's thread hangs."""

    summary: dict[str, Any]
    exit_code: int
    hangs: bool


def start(
    target: str,
    draft: str | None,
    engine_config: EngineConfig,
    config: ServerConfig,
    bound: socket.socket,
    tls: TlsFiles,
    log_level: str,
) -> Served:
    """Serve until the end.

    Raises:
        SpecdecError: a target, draft or default rule that does not do.
    """
    if draft is not None:
        check_spelling(draft)
    engine = Engine(target, draft=draft, config=engine_config)
    if config.default_rule is not None:
        # a rule that every request would be refused for is known now
        params = SamplingParams(
            temperature=1.0, rule=config.default_rule, rule_knobs=dict(config.default_knobs)
        )
        spec = engine_config.spec if draft is not None else None
        choose_rule(params, spec, engine.drafter, allow_lossy=engine_config.allow_lossy)
    log_json(log_level)
    first_words.said()
    service = Service(engine, config)
    code = run_server(service, bound, tls)
    ended = service.loop.join()
    if ended and engine.prefixes is not None and engine.prefixes.tiers is not None:
        # blocks on their way to the disk
        engine.prefixes.tiers.settle(_SETTLE_S)
    summary = {
        "target": target,
        "draft": draft,
        "exact_against": engine.admission.exact_against,
        **service.metrics.totals(),
        "fault": service.loop.fault,
    }
    return Served(summary=summary, exit_code=code, hangs=not ended)


def leave(code: int) -> NoReturn:
    """End the process although a thread hangs, for which the interpreter's own end would wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
