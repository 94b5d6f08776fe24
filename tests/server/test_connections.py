"""Connections that say or take nothing, and too many of them: each costs something bounded."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TEXT = "/v1/completions"
LONG = {"prompt": "the in", "max_tokens": 1500, "ignore_eos": True}
BEGUN = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le"


@pytest.fixture(scope="module")
def strict(make_engine: Callable[..., Any], solo: Any, serving: Any) -> Iterator[Any]:
    """A server with little patience and few connections."""
    limits = {"header_timeout_s": 0.3, "body_timeout_s": 0.3, "stall_timeout_s": 0.3, "max_connections": 6}
    with serving(make_engine(solo), **limits) as running:
        yield running


def connected(server: Any) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(20)
    connection.connect((server.host, server.port))
    return connection


def everything(connection: socket.socket) -> bytes:
    """What the server says until it closes."""
    received = b""
    while data := connection.recv(1 << 16):
        received += data
    connection.close()
    return received


def healthy(connection: socket.socket) -> bool:
    """Ask on a connection that stays open."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    received = b""
    while b"}" not in received:
        received += connection.recv(1 << 16)
    return received.startswith(b"HTTP/1.1 200")


def test_a_connection_that_says_nothing_is_closed(strict: Any) -> None:
    assert everything(connected(strict)) == b""


@pytest.mark.parametrize("before", [0, 1], ids=["first request", "after an answer"])
def test_headers_that_never_end_are_a_408(strict: Any, before: int) -> None:
    connection = connected(strict)
    for _ in range(before):
        assert healthy(connection)
    connection.sendall(BEGUN)
    assert everything(connection).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_a_drop_now_and_then_buys_no_time(strict: Any) -> None:
    connection = connected(strict)
    started = time.monotonic()
    with pytest.raises(OSError, match=r"reset|[Bb]roken"):  # noqa: PT012
        for byte in BEGUN + b"x" * 5000:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
    assert time.monotonic() - started < 20
    connection.close()


def test_a_body_that_never_ends_is_a_408(strict: Any) -> None:
    connection = connected(strict)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
    connection.close()


def test_a_kept_connection_outlives_the_time_for_headers(strict: Any) -> None:
    connection = connected(strict)
    for _ in range(2):
        assert healthy(connection)
        time.sleep(0.6)
    connection.close()


def test_an_answer_takes_longer_than_the_time_for_headers(strict: Any) -> None:
    assert strict.post(TEXT, {**LONG, "timeout": 0.8})[0] == 200


def test_beyond_the_last_connection_there_is_a_503_with_a_word_when_to_come(
    strict: Any, wait_for: Any
) -> None:
    wait_for(lambda: not strict.server.server_state.connections)
    held = [strict.connect(TEXT, {**LONG, "stream": True}) for _ in range(6)]
    wait_for(lambda: len(strict.server.server_state.connections) == 6)
    said = everything(connected(strict))
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"Retry-After: 1" in head
    assert json.loads(body)["error"]["code"] == "too_many_connections"
    assert strict.metric("requests_refused_total", reason="connections") == 1
    for connection in held:
        connection.close()
    wait_for(lambda: not strict.server.server_state.connections)
    assert strict.request("GET", "/health")[0] == 200
    strict.wait_until_idle()


def test_an_answer_that_nobody_takes_is_thrown_away(strict: Any, wait_for: Any) -> None:
    """One whole answer, more than the system buffers: it must not be held for ever."""
    wait_for(lambda: not strict.server.server_state.connections)
    before = strict.metric("requests_refused_total", reason="slow_reader")
    connection = strict.connect(TEXT, {**LONG, "max_tokens": 200, "logprobs": 20})
    wait_for(lambda: strict.metric("requests_refused_total", reason="slow_reader") == before + 1, 60)
    wait_for(lambda: not strict.server.server_state.connections)
    connection.close()
    strict.wait_until_idle()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_five_hundred_connections_on_sixteen_places(
    make_engine: Callable[..., Any], solo: Any, serving: Any
) -> None:
    """Those that fit run or wait, the others get a 429 and nothing of them stays."""
    with serving(make_engine(solo, max_num_seqs=16), max_waiting=16) as server:
        assert server.post(TEXT, {**LONG, "max_tokens": 4})[0] == 200
        before = resident_bytes()
        connections = [server.connect(TEXT, {**LONG, "max_tokens": 16}) for _ in range(500)]
        most = resident_bytes()
        answers = []
        for connection in connections:
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(1 << 16)
            answers.append(received.partition(b"\r\n\r\n")[0])
            most = max(most, resident_bytes())
            connection.close()
        whole = [head for head in answers if head.startswith(b"HTTP/1.1 200")]
        refused = [head for head in answers if head.startswith(b"HTTP/1.1 429")]
        assert len(whole) + len(refused) == 500
        assert len(whole) >= 32
        assert refused
        assert all(b"retry-after: 1" in head.lower() for head in refused)
        # the clients' side is in it too
        assert most - before < 100 << 20
        server.wait_until_idle()
        assert server.post(TEXT, {**LONG, "max_tokens": 4})[0] == 200
