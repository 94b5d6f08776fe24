"""A running server as a peer: its OpenAI completions endpoint, one client for each prompt of a batch.

Prompts go out as token ids, so that no template or tokenizer of the server's comes between; tokens come back
as ids where the server gives them (`return_token_ids`, vLLM's and ours), else they are counted by its own
usage record and the text is read with the target's tokenizer. Times include the way over HTTP.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specdec.cli.comparing.peers import ANSWER_TIMEOUT_S, Peer, check_count
from specdec.errors import SpecdecError


class PeerServer:
    """A server asked by URL.

    Args:
        peer: with its URL.
        encode: text to ids with the target's tokenizer, for servers that give no ids.

    Raises:
        SpecdecError: it does not answer, or serves no model.
    """

    def __init__(self, peer: Peer, encode: Callable[[str], list[int]]) -> None:
        assert peer.url is not None, "a server has an address"
        self.peer, self._encode = peer, encode
        self._base = peer.url if peer.url.endswith("/v1") else f"{peer.url}/v1"
        models = self._call("models", None).get("data") or []
        if not models:
            raise SpecdecError(f"peer {peer.name} serves no model")
        self._model = models[0]["id"]
        self.facts: dict[str, Any] = {
            "engine": peer.name,
            "versions": {},
            "weights": "the server's",
            "settings": {"model": self._model},
        }

    def answer(
        self, names: Sequence[str], prompts: Sequence[list[int]], max_tokens: int
    ) -> tuple[list[list[int]], float]:
        """New tokens of prompts, each asked for by a client of its own, and the seconds until all were here.

        Raises:
            SpecdecError: the server refused, or wrote another number of tokens.
        """
        started = time.perf_counter()
        with ThreadPoolExecutor(max_workers=len(prompts)) as clients:
            replies = list(clients.map(lambda ids: self._ask(ids, max_tokens), prompts))
        seconds = time.perf_counter() - started
        answers = [self._read(name, reply, max_tokens) for name, reply in zip(names, replies, strict=True)]
        return answers, seconds

    def _ask(self, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        request = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self._call("completions", request)

    def _read(self, name: str, reply: dict[str, Any], max_tokens: int) -> list[int]:
        choice = reply["choices"][0]
        new = choice.get("token_ids")
        self.facts["settings"]["tokens"] = "ids from the server" if new is not None else "read from its text"
        count = len(new) if new is not None else int(reply["usage"]["completion_tokens"])
        check_count(self.peer, name, count, max_tokens)
        return list(new) if new is not None else self._encode(choice["text"])

    def close(self) -> None:
        """The server is the user's and goes on."""

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self._base}/{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:
                answer: dict[str, Any] = json.load(reply)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            raise SpecdecError(f"peer {self.peer.name} answered {error.code}: {text}") from error
        except (OSError, ValueError) as error:
            raise SpecdecError(f"peer {self.peer.name} does not answer: {error}") from error
        return answer
