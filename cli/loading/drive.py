"""Conversations held with a server: who waits for whom, and what each request's clock read.

Owns the order of things in time. Time is the event loop's, so that a loop with a clock of its own runs hours
of traffic in no time. Timestamps are taken as vLLM's bench takes them: a request begins when it is sent
(waiting for a free client is not in it), its first token is the first event with a choice, each further such
event ends a gap, and the last one ends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.cli.loading.client import RequestFailed
from specdec.cli.loading.traffic import Conversation

# what `keep_busy` waits after a request that failed
REFUSED_PAUSE_S = 0.2


class Server(Protocol):
    """What a driver asks: `LoadClient`, or a script in its place."""

    def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]: ...


@dataclass(kw_only=True)
class LoadRecord:
    """One request.

    Attributes:
        conversation: whose it is.
        turn: 0 for its first.
        sent_s: after the start of the load, as `first_s` and `last_s`.
        late_s: how long after its due time it was sent, for want of a free client.
        first_s: first event with a choice.
        last_s: last event with a choice.
        gaps_s: between such events.
        prompt_tokens: by the server's usage, as the next two.
        cached_tokens: prompt tokens out of its prefix cache, None where it does not say.
        completion_tokens: tokens written.
        finish_reason: the choice's.
        speculation: the server's `metrics.speculative_decoding`.
        failed_s: when it turned out to be no whole answer, after the start of the load.
        error: kind of what went wrong; None for a whole answer.
        detail: more of it.
    """

    conversation: str
    turn: int
    sent_s: float
    late_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    speculation: dict[str, Any] | None = None
    failed_s: float | None = None
    error: str | None = None
    detail: str | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """What came of a load: requests in the order they ended, and seconds from the first to the last."""

    records: list[LoadRecord]
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What every request has in common.

    Attributes:
        chat: whether turns are messages; else a request is a text to continue.
        common: fields of every body.
        seeded: whether each conversation's own seed is sent.
    """

    chat: bool
    common: dict[str, Any]
    seeded: bool = False

    def body(self, conversation: Conversation, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The body of one request."""
        said = {"messages": list(messages)} if self.chat else {"prompt": messages[-1]["content"]}
        seed = {"seed": conversation.seed} if self.seeded else {}
        return {**said, **seed, "stream": True, "stream_options": {"include_usage": True}, **self.common}

    @property
    def path(self) -> str:
        """The endpoint."""
        return "chat/completions" if self.chat else "completions"


async def drive(
    server: Server,
    conversations: Sequence[Conversation],
    asking: Asking,
    *,
    clients: int | None,
    on_answer: Callable[[LoadRecord], None] = lambda record: None,
) -> Load:
    """Hold all conversations.

    Args:
        server: asked.
        conversations: held as they arrive, in this order.
        asking: see there.
        clients: conversations held at once, pauses included; None for no bound.
        on_answer: called with each request that ended.
    """
    loop = asyncio.get_running_loop()
    free = asyncio.Semaphore(clients or len(conversations))
    held = _Held(server, on_answer, loop.time())

    async def hold(conversation: Conversation) -> None:
        await asyncio.sleep(conversation.arrives_s)
        due = loop.time()
        async with free:
            await held.hold(conversation, asking, due)

    async with asyncio.TaskGroup() as group:
        for conversation in conversations:
            group.create_task(hold(conversation))
    return held.load()


async def keep_busy(
    server: Server,
    conversations: Iterator[tuple[Conversation, Asking]],
    *,
    clients: int,
    seconds: float,
    on_answer: Callable[[LoadRecord], None] = lambda record: None,
) -> Load:
    """Have clients hold one conversation after the other; no request is begun after so many seconds.

    Args:
        server: asked.
        conversations: endless; dealt out as clients come free.
        clients: how many.
        seconds: see above; what is under way then is still answered.
        on_answer: called with each request that ended.
    """
    start = asyncio.get_running_loop().time()
    held = _Held(server, on_answer, start, start + seconds)

    async def client() -> None:
        while not held.is_over:
            await held.hold(*next(conversations), None)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return held.load()


class _Held:
    """Conversations under way, and what came of their requests.

    Args:
        server: asked.
        on_answer: called with each request that ended.
        start: of the load, on the loop's clock.
        end: when no request is begun any more; None for never.
    """

    def __init__(
        self,
        server: Server,
        on_answer: Callable[[LoadRecord], None],
        start: float,
        end: float | None = None,
    ) -> None:
        self._server = server
        self._on_answer = on_answer
        self._start, self._end = start, end
        self._loop = asyncio.get_running_loop()
        self._records: list[LoadRecord] = []

    @property
    def is_over(self) -> bool:
        return self._end is not None and self._loop.time() >= self._end

    def load(self) -> Load:
        return Load(records=self._records, duration_s=self._loop.time() - self._start)

    async def hold(self, conversation: Conversation, asking: Asking, due: float | None) -> None:
        """Every turn of a conversation; the first was due at a moment, None for as soon as it is held."""
        loop = self._loop
        due = loop.time() if due is None else due
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(conversation.turns):
            if turn:
                await asyncio.sleep(conversation.pauses_s[turn - 1])
                due = loop.time()
            if self.is_over:
                return
            messages.append({"role": "user", "content": text})
            record = LoadRecord(
                conversation=conversation.id,
                turn=turn,
                sent_s=loop.time() - self._start,
                late_s=loop.time() - due,
            )
            body = asking.body(conversation, messages)
            answer = await _ask(self._server, asking.path, body, record, self._start)
            self._records.append(record)
            self._on_answer(record)
            if record.error is not None:
                # a server that refuses at once is not to be asked as fast as it can refuse
                await asyncio.sleep(0 if self._end is None else REFUSED_PAUSE_S)
                return
            messages.append({"role": "assistant", "content": answer})


async def _ask(server: Server, path: str, body: dict[str, Any], record: LoadRecord, start: float) -> str:
    """One request; fills its record in and returns the text."""
    loop = asyncio.get_running_loop()
    texts: list[str] = []
    try:
        async for event in server.stream(path, body):
            if event.get("choices"):
                now = loop.time() - start
                if record.first_s is None:
                    record.first_s = now
                elif record.last_s is not None:
                    record.gaps_s.append(now - record.last_s)
                record.last_s = now
                texts.append(_read_choice(event["choices"][0], record))
            if event.get("usage"):
                _read_usage(event, record)
        if record.first_s is None:
            raise RequestFailed("no token", "the stream held no choice")
        if record.completion_tokens is None:
            raise RequestFailed(
                "no usage", "the server does not count its tokens (stream_options.include_usage)"
            )
    except RequestFailed as failure:
        record.error, record.detail = failure.kind, failure.detail
        record.failed_s = loop.time() - start
    return "".join(texts)


def _read_choice(choice: dict[str, Any], record: LoadRecord) -> str:
    if choice.get("finish_reason") is not None:
        record.finish_reason = choice["finish_reason"]
    return (choice.get("delta") or {}).get("content") or choice.get("text") or ""


def _read_usage(event: dict[str, Any], record: LoadRecord) -> None:
    usage = event["usage"]
    record.prompt_tokens = usage.get("prompt_tokens")
    record.completion_tokens = usage.get("completion_tokens")
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    record.speculation = (event.get("metrics") or {}).get("speculative_decoding") or record.speculation
