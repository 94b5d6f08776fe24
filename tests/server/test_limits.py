"""Full queues, clients that leave or read slowly, and the end of the server: nobody hangs, nothing leaks."""

import json
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"prompt": "the in", "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(make_engine: Callable[..., Any], solo: Any, serving: Any) -> Iterator[Any]:
    """Two places to run, three to wait, and little room in buffers."""
    with serving(make_engine(solo, max_num_seqs=2), max_waiting=3, max_buffered_tokens=64) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("small", "live"):
        if name in request.fixturenames:
            request.getfixturevalue(name).wait_until_idle()


def test_beyond_the_queue_there_is_a_429_at_once(small: Any, wait_for: Any) -> None:
    held = [small.connect(TEXT, LONG) for _ in range(5)]
    wait_for(lambda: small.service.loop.outstanding == 5)
    status, headers, data = small.request("POST", TEXT, {**LONG, "max_tokens": 1})
    assert status == 429
    assert headers["retry-after"] == "1"
    assert json.loads(data)["error"]["code"] == "queue_full"
    assert small.request("GET", "/ready")[0] == 200
    # the second place is taken a step after the first
    wait_for(lambda: small.metric("num_requests_waiting") == 3)
    assert small.metric("requests_refused_total", reason="queue_full") >= 1
    for connection in held:
        connection.close()
    small.wait_until_idle()
    assert small.post(TEXT, {**LONG, "max_tokens": 1})[0] == 200


def test_a_request_larger_than_the_server_is_a_400_not_a_429(small: Any) -> None:
    status, answer = small.post(TEXT, {**LONG, "n": 6})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert small.post(TEXT, {**LONG, "n": 5, "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("stream", [True, False])
def test_work_stops_within_two_steps_when_the_client_leaves(live: Any, wait_for: Any, stream: bool) -> None:
    before = live.metric("request_finished_total", finished_reason="abort")
    connection = live.connect(TEXT, {**LONG, "stream": stream, "n": 2})
    wait_for(lambda: len(live.engine.scheduler.running) == 2)
    [first, second] = live.engine.scheduler.running
    wait_for(lambda: first.num_output > 3)
    connection.close()
    live.wait_until_idle()
    assert first.num_output < 1500 > second.num_output
    assert live.metric("request_finished_total", finished_reason="abort") == before + 2


def test_a_client_may_leave_while_it_waits(small: Any, wait_for: Any) -> None:
    running = [small.connect(TEXT, LONG) for _ in range(2)]
    wait_for(lambda: len(small.engine.scheduler.running) == 2)
    waiting = small.connect(TEXT, LONG)
    wait_for(lambda: small.service.loop.outstanding == 3)
    waiting.close()
    wait_for(lambda: small.service.loop.outstanding == 2)
    for connection in running:
        connection.close()


def test_two_hundred_clients_that_leave_at_random_times_leave_nothing(live: Any) -> None:
    """Before their body is whole, in the queue, in the prompt, between tokens, at the end."""
    chance = random.Random(5)

    def visit(delay: float, kind: int, cut: int) -> None:
        data = json.dumps({**LONG, "max_tokens": 40, "stream": kind % 2 == 0, "n": 1 + kind % 3}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        with socket.socket() as connection:
            connection.connect((live.host, live.port))
            connection.sendall((head + data)[: cut if kind % 5 == 0 else None])
            time.sleep(delay)
            if kind % 7 == 0:
                # gone without a word: the server's next write is answered with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with ThreadPoolExecutor(32) as visitors:
        visits = [
            visitors.submit(visit, chance.uniform(0, 0.3), kind, chance.randrange(1, 160))
            for kind in range(200)
        ]
    for done in visits:
        done.result()
    live.wait_until_idle()
    assert live.metric("engine_failed_steps_total") == 0
    assert live.post(TEXT, {**LONG, "max_tokens": 3})[0] == 200


def test_a_slow_reader_is_ended_and_holds_nobody_up(small: Any, wait_for: Any) -> None:
    # long log-probabilities fill the socket's buffers soon; nothing is read
    slow = small.connect(TEXT, {**LONG, "stream": True, "logprobs": 20})
    wait_for(lambda: len(small.engine.scheduler.running) == 1)
    status, answer = small.post(TEXT, {**LONG, "max_tokens": 20})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
    wait_for(lambda: small.service.loop.outstanding == 0)
    assert small.metric("requests_refused_total", reason="slow_reader") == 1
    received = b""
    while b"[DONE]" not in received and (data := slow.recv(1 << 16)):
        received += data
    assert b'"code":"slow_reader"' in received
    slow.close()


def test_a_deadline_ends_a_request_with_what_it_has(live: Any) -> None:
    status, answer = live.post(TEXT, {**LONG, "timeout": 0.3})
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert answer["usage"]["completion_tokens"] < 1500


def test_a_server_full_of_streams_still_answers_health_and_metrics(live: Any, wait_for: Any) -> None:
    held = [live.connect(TEXT, {**LONG, "stream": True}) for _ in range(12)]
    wait_for(lambda: len(live.engine.scheduler.running) == 8)
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/version"):
        assert live.request("GET", path)[0] == 200
    # what some load balancers ask with
    assert live.request("HEAD", "/ready")[0] == 200
    for connection in held:
        connection.close()


def test_draining_lets_running_requests_finish_and_refuses_new_ones(
    make_engine: Callable[..., Any], solo: Any, serving: Any, wait_for: Any
) -> None:
    with serving(make_engine(solo), drain_timeout_s=60) as server:
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(server.post(TEXT, {**LONG, "max_tokens": 150}))
        )
        thread.start()
        wait_for(lambda: server.engine.scheduler.running)
        server.server.handle_exit(signal.SIGTERM, None)
        status, headers, data = server.request("POST", TEXT, LONG)
        assert (status, json.loads(data)["error"]["code"]) == (503, "draining")
        assert "retry-after" in headers
        assert server.request("GET", "/ready")[0] == 503
        assert server.request("GET", "/health")[0] == 200
        thread.join()
        status, answer = answers[0]
        assert (status, answer["usage"]["completion_tokens"]) == (200, 150)
        wait_for(lambda: server.server.should_exit)
        assert server.server.exit_code == 0


def test_draining_ends_at_its_deadline_with_a_word_to_the_client(
    make_engine: Callable[..., Any], solo: Any, serving: Any, wait_for: Any
) -> None:
    with serving(make_engine(solo), drain_timeout_s=0.2) as server:
        connection = server.connect(TEXT, {**LONG, "stream": True})
        wait_for(lambda: server.engine.scheduler.running)
        server.server.handle_exit(signal.SIGTERM, None)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
        assert b'"code":"draining"' in received
        assert b"[DONE]" in received
        connection.close()
        wait_for(lambda: server.server.should_exit)
        server.wait_until_idle()


def test_keys_open_the_api_and_nothing_else_does(
    make_engine: Callable[..., Any], solo: Any, serving: Any
) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with serving(
        make_engine(solo), api_keys=("first", "second"), allow_origins=("https://a.example",)
    ) as server:
        for header in (None, "Bearer wrong", "Bearer ", "first", "Basic first", "Bearer \xe9"):
            headers = {} if header is None else {"Authorization": header}
            status, found, data = server.request("POST", TEXT, body, headers)
            assert status == 401, header
            assert found["www-authenticate"] == "Bearer"
            assert json.loads(data)["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            assert server.request("POST", TEXT, body, {"Authorization": f"Bearer {key}"})[0] == 200
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert server.request("GET", path)[0] == 200
        assert server.request("GET", "/v1/models")[0] == 401
        preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        status, found, _ = server.request("OPTIONS", TEXT, headers=preflight)
        assert (status, found["access-control-allow-origin"]) == (200, "https://a.example")
        status, found, _ = server.request(
            "OPTIONS", TEXT, headers={**preflight, "Origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in found


def test_request_ids_come_back_and_without_origins_there_is_no_cors(live: Any) -> None:
    _, headers, _ = live.request(
        "GET", "/version", headers={"x-request-id": "abc-1.2", "Origin": "https://a"}
    )
    assert headers["x-request-id"] == "abc-1.2"
    assert not [name for name in headers if name.startswith("access-control")]
    _, headers, _ = live.request("GET", "/version", headers={"x-request-id": "a b\tc"})
    assert len(headers["x-request-id"]) == 32
    _, answer = live.post(TEXT, {"prompt": "a", "max_tokens": 1}, {"x-request-id": "mine"})
    assert answer["id"] == "cmpl-mine"
