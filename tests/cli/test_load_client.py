"""The load tool's HTTP: streams as servers really send them, cut at any byte, and every way they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from specdec.cli.loading.client import LoadClient, RequestFailed, base_url
from specdec.errors import SpecdecError, UsageError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def asked(pieces: Sequence[bytes], path: str = "chat/completions") -> tuple[list[Any], bytes]:
    """Events that a client reads of a server that sends these pieces, and what the server got."""
    got = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        got = await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = LoadClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 20)
    try:
        return [item async for item in client.stream(path, {"x": 1})], got
    finally:
        await client.close()
        server.close()


def test_events_are_read_wherever_the_network_cuts_them() -> None:
    """Catches a reader that splits at U+2028 or inside a character."""
    sent = [{"choices": [{"text": "a\u2028b\x85c \u00e9\U0001f600"}]}, {"choices": [], "usage": {"x": 1}}]
    body = b": a comment\n\n" + b"".join(map(event, sent)) + b"data: [DONE]\r\n\r\n"
    for size in (1, 3, 7, len(body)):
        pieces = [body[start : start + size] for start in range(0, len(body), size)]
        assert asyncio.run(asked([HEAD, *pieces]))[0] == sent


def test_a_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert b"Bearer theirs" in asyncio.run(asked([HEAD, b"data: [DONE]\n\n"]))[1]
    monkeypatch.setenv("SPECDEC_API_KEY", "ours")
    assert b"Bearer ours" in asyncio.run(asked([HEAD, b"data: [DONE]\n\n"]))[1]


@pytest.mark.parametrize(
    ("pieces", "kind", "said"),
    [
        ([b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull"], "http 429", "full"),
        ([HEAD, event({"choices": []})], "cut off", "[DONE]"),
        ([HEAD, event({"error": {"message": "boom"}}), b"data: [DONE]\n\n"], "error event", "boom"),
        ([HEAD, b"data: {nonsense\n\n"], "no JSON", "nonsense"),
        ([HEAD, b"data: 3\n\n"], "no JSON", "no object"),
        ([b"gibberish\r\n\r\n"], "connection", ""),
        ([], "connection", ""),
    ],
)
def test_every_way_to_fail_has_a_name(pieces: list[bytes], kind: str, said: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(asked(pieces))
    assert caught.value.kind == kind
    assert said in caught.value.detail


def test_a_server_that_is_not_there_or_is_another_is_one_line() -> None:
    async def first_model(pieces: Sequence[bytes] | None) -> str:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"".join(pieces or ()))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if pieces is None:
            server.close()
            await server.wait_closed()
        client = LoadClient(f"http://127.0.0.1:{port}", 20)
        try:
            return await client.first_model()
        finally:
            await client.close()
            server.close()

    with pytest.raises(SpecdecError, match="does not answer"):
        asyncio.run(first_model(None))
    with pytest.raises(SpecdecError, match="answered 404 for /models"):
        asyncio.run(first_model([b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"]))
    with pytest.raises(SpecdecError, match="lists no model"):
        asyncio.run(first_model([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"]))
    body = b'{"data": [{"id": "m"}]}'
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert asyncio.run(first_model([ok, body])) == "m"


def test_addresses_end_in_v1_and_hold_no_key() -> None:
    assert base_url("http://h:1") == base_url("http://h:1/v1/") == "http://h:1/v1"
    assert base_url("https://h/proxy/v1") == "https://h/proxy/v1"
    for wrong in ("h:8000", "ftp://h", "http://", "http://user:key@h"):
        with pytest.raises(UsageError, match="--url"):
            base_url(wrong)
