"""The work of `specdec serve`: engine, service, and what is said at the end."""

from __future__ import annotations

import socket
from typing import Any

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.rule_choice import choose_rule
from specdec.sampling_params import SamplingParams
from specdec.server.config import ServerConfig
from specdec.server.logs import log_json
from specdec.server.run import run_server
from specdec.server.service import Service
from specdec.server.tls import TlsFiles


def start(
    target: str,
    draft: str | None,
    engine_config: EngineConfig,
    config: ServerConfig,
    bound: socket.socket,
    tls: TlsFiles,
    log_level: str,
) -> tuple[dict[str, Any], int]:
    """Serve until the end; returns what was served, and the exit code.

    Raises:
        SpecdecError: a target, draft or default rule that does not do.
    """
    engine = Engine(target, draft=draft, config=engine_config)
    if config.default_rule is not None:
        # a rule that every request would be refused for is known now
        params = SamplingParams(
            temperature=1.0, rule=config.default_rule, rule_knobs=dict(config.default_knobs)
        )
        spec = engine_config.spec if draft is not None else None
        choose_rule(params, spec, engine.drafter, allow_lossy=engine_config.allow_lossy)
    log_json(log_level)
    service = Service(engine, config)
    code = run_server(service, bound, tls)
    return {"target": target, "draft": draft, **service.metrics.totals(), "fault": service.loop.fault}, code
