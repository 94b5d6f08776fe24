"""A live server on a tiny random model: real sockets, a real engine thread, official clients."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine

# without the extra "serve" there is nothing to test here
collect_ignore_glob = [] if find_spec("fastapi") and find_spec("uvicorn") else ["test_*.py"]

MODEL = "tiny"
START_S = 30.0


@dataclass
class Live:
    """A running server."""

    service: Any
    server: Any
    host: str
    port: int

    @property
    def engine(self) -> Engine:
        engine: Engine = self.service.engine
        return engine

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; `body` is JSON unless it is bytes."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and parsed body."""
        status, _, data = self.request("POST", path, body, headers)
        return status, json.loads(data)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, [DONE] checked and dropped."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        lines = data.decode("utf-8").split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def connect(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a whole POST was sent and nothing was read."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection = socket.socket()
        connection.settimeout(30)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        connection.connect((self.host, self.port))
        connection.sendall(head.encode() + data)
        return connection

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of a metric that carry these labels."""
        total = 0.0
        for family in self.service.metrics.registry.collect():
            for sample in family.samples:
                fits = all(sample.labels.get(key) == value for key, value in labels.items())
                if sample.name == f"specdec:{name}" and fits:
                    total += sample.value
        return total

    def wait_until_idle(self, seconds: float = 20.0) -> None:
        """Wait until no request is here, then check the KV bookkeeping."""
        wait_for(lambda: self.service.loop.outstanding == 0, seconds)
        # the engine's thread may be on its way back to sleep
        wait_for(lambda: not self.engine.scheduler.has_work, seconds)
        self.engine.audit()
        assert self.engine.blocks.num_used == 0


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


@contextmanager
def serving(engine: Engine, **config: Any) -> Iterator[Live]:
    """Serve an engine on a free port while the block runs."""
    from specdec.server.config import ServerConfig
    from specdec.server.run import DrainingServer, server_settings
    from specdec.server.service import Service
    from specdec.server.sockets import bind
    from specdec.server.tls import TlsFiles

    service = Service(engine, ServerConfig(model_names=(MODEL, "alias/tiny"), **config))
    bound = bind("127.0.0.1", 0)
    # inherited by its connections: a client that does not read is noticed soon
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    settings = server_settings(service, TlsFiles())
    settings.timeout_graceful_shutdown = 2
    server = DrainingServer(settings, service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started or not thread.is_alive(), START_S)
    try:
        yield Live(service, server, *bound.getsockname()[:2])
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"
        bound.close()


@pytest.fixture(scope="session")
def served_target(tiny_model_factory: Callable[..., Path]) -> Path:
    """Folder of a tiny target whose context has room for a prompt with tools."""
    return tiny_model_factory("llama", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def drafted(
    served_target: Path, random_draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of a random draft head for the tiny target."""
    return random_draft(served_target, tmp_path_factory.mktemp("served") / "draft")


@pytest.fixture(scope="session")
def make_engine(served_target: Path, drafted: Path) -> Callable[..., Engine]:
    """Call with overrides of the engine's settings: an engine over the tiny target with a random head."""

    def make(share: Engine | None = None, **overrides: Any) -> Engine:
        settings: dict[str, Any] = {
            "block_size": 4,
            "max_num_seqs": 8,
            "max_batch_tokens": 256,
            "kv_tokens": 4096,
            "allow_lossy": True,
            "spec": SpecConfig(max_depth=3, top_k=1, max_nodes=3, adaptive=False),
        }
        return Engine(share or served_target, draft=drafted, config=EngineConfig(**{**settings, **overrides}))

    return make


@pytest.fixture(scope="session")
def solo(make_engine: Callable[..., Engine]) -> Engine:
    """An engine for what requests give alone; weights are lent to the served ones."""
    return make_engine()


@pytest.fixture(scope="session", name="serving")
def serving_fixture() -> Any:
    """Call with an engine and server settings: a context in which it is served."""
    return serving


@pytest.fixture(scope="session", name="wait_for")
def wait_for_fixture() -> Any:
    """Call with a condition (and seconds): returns when it is true, fails when it does not become so."""
    return wait_for


@pytest.fixture(scope="module")
def live(make_engine: Callable[..., Engine], solo: Engine) -> Iterator[Live]:
    """The server most tests of a file share."""
    with serving(make_engine(solo)) as running:
        yield running
