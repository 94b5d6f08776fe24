"""The running server: signals, draining, the end.

Owns what a first and a second SIGTERM do, and the exit code: 0 after a drain, 1 when the engine died or hung,
130 when somebody insisted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn

from specdec.server.app import make_app
from specdec.server.connections import ConnectionLimits, LimitedConfig, allow_files
from specdec.server.problems import Problem
from specdec.server.service import Service
from specdec.server.sockets import url_of
from specdec.server.tls import TlsFiles
from specdec.server.watchdog import LastResort

logger = logging.getLogger("specdec.server")

# time that connections get to take what is already written, after the last request has ended
_CLOSING_S = 3
_KEEP_ALIVE_S = 75  # above the usual 60 seconds of load balancers, so that they close first
_BACKLOG = 2048


class DrainingServer(uvicorn.Server):
    """Lets running requests finish after the first signal, and leaves at the second.

    Args:
        config: uvicorn's.
        service: what is served.
        url: where, for the log.
        ends_process: whether the process is the server's alone, and ends should its event loop stand still.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, url: str = "", *, ends_process: bool = False
    ) -> None:
        super().__init__(config)
        self._ends_process = ends_process
        self.exit_code = 0
        self._service = service
        self._url = url
        self._drain: asyncio.Task[None] | None = None
        self._last_resort: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        service.loop.on_death = self._engine_died

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; runs between two instructions of the main thread."""
        if self._service.draining:
            self.exit_code = 130
            self.should_exit = self.force_exit = True
            return
        self._service.draining = True
        if self._event_loop is None:
            self.should_exit = True
        else:
            self._event_loop.call_soon_threadsafe(self._begin_drain)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._event_loop = asyncio.get_running_loop()
        if self._ends_process and self._service.config.step_timeout_s:
            awake = LastResort(self._service.config.step_timeout_s).keep_awake()
            self._last_resort = self._event_loop.create_task(awake)
        await super().startup(sockets=sockets)
        fields = {
            "url": self._url,
            "models": list(self._service.config.model_names),
            "exact_against": self._service.engine.admission.exact_against,
        }
        logger.info("ready", extra={"fields": fields})

    def _begin_drain(self) -> None:
        logger.info("draining", extra={"fields": {"running_or_waiting": self._service.loop.outstanding}})
        self._drain = asyncio.get_running_loop().create_task(self._finish_requests())

    async def _finish_requests(self) -> None:
        loop = self._service.loop
        try:
            async with asyncio.timeout(self._service.config.drain_timeout_s):
                await loop.idle.wait()
        except TimeoutError:
            logger.warning("drain timeout", extra={"fields": {"ended": loop.outstanding}})
            loop.end_all(Problem(503, "the server shut down before this request was done", code="draining"))
        self.should_exit = True

    def _engine_died(self) -> None:
        self.exit_code = 1
        self.should_exit = True


def server_settings(service: Service, files: TlsFiles) -> LimitedConfig:
    """Settings of uvicorn for a service."""
    config = service.config
    limits = ConnectionLimits(
        max_connections=allow_files(config.max_connections),
        header_timeout_s=config.header_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        retry_after_s=config.retry_after_s,
    )
    if limits.max_connections < config.max_connections:
        fields = {"max_connections": limits.max_connections, "asked_for": config.max_connections}
        logger.warning("the system's limit of open files allows fewer connections", extra={"fields": fields})
    return LimitedConfig(
        make_app(service),
        limits,
        service.metrics,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSING_S,
        ssl_certfile=files.certfile,
        ssl_keyfile=files.keyfile,
        ssl_keyfile_password=files.keyfile_password,
    )


def run_server(service: Service, bound: socket.socket, tls: TlsFiles | None = None) -> int:
    """Serve until a signal or the engine's death; returns the exit code."""
    files = tls or TlsFiles()
    url = url_of(bound, tls=files.certfile is not None)
    server = DrainingServer(server_settings(service, files), service, url, ends_process=True)
    server.run(sockets=[bound])
    return server.exit_code
