"""`POST /v1/chat/completions`: answers to chats, whole or as a stream, with tool calls read out of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.requests import GenerationResult, StreamPiece, whole_piece
from specdec.server import answers
from specdec.server.events import EventStream, event
from specdec.server.fields import ChatFields, NamedTool
from specdec.server.prompts import Prompts
from specdec.server.requests_made import chat_params, num_choices
from specdec.server.service import Service, record_of
from specdec.server.streaming import UsageCount, stream_flags
from specdec.server.tickets import Ticket
from specdec.server.token_kinds import KindReader, kind_readers, kinds_of
from specdec.server.token_text import chat_logprobs, prompt_logprobs
from specdec.server.tool_calls import CallReader
from specdec.server.tool_grammar import takes_one_call


class Chats:
    """The endpoint.

    Args:
        service: the server.
        prompts: makes token ids.
    """

    def __init__(self, service: Service, prompts: Prompts) -> None:
        self._service = service
        self._prompts = prompts

    def add_to(self, router: APIRouter, **described: Any) -> None:
        """Put the endpoint where clients look for it."""
        router.post("/v1/chat/completions", **described)(self.create)

    async def create(self, request: Request) -> Response:
        """Answer a chat."""
        service = self._service
        service.check_open()
        fields, ignored = await service.bodies.fields(request, ChatFields)
        model = service.check_model(fields.model)
        params = chat_params(fields, service.settings)
        flags = stream_flags(fields)
        tools = () if fields.tool_choice == "none" else tuple(fields.tools or ())
        ticket = await service.submit(
            request,
            fields,
            params,
            num_prompts=1,
            encode=lambda: [
                self._prompts.of_chat(
                    fields.messages,
                    tools=tools,
                    variables=dict(fields.chat_template_kwargs or {}),
                    add_generation_prompt=fields.add_generation_prompt is not False,
                )
            ],
        )
        headers = service.headers(ticket) | ({"x-specdec-ignored": ", ".join(ignored)} if ignored else {})
        frame = {
            "id": f"chatcmpl-{record_of(request).id}",
            "object": "chat.completion.chunk" if fields.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        choices = num_choices(fields, service.config)
        one_call = takes_one_call(fields)
        readers = [CallReader(one_call=one_call) if tools else None for _ in ticket.sequences]
        kinds = kind_readers(fields, service.encoder, ticket)
        if fields.stream:
            count = UsageCount(ticket, choices, flags)
            events = self._events(request, fields, frame, ticket, count, readers, kinds)
            return EventStream(events, lambda: service.loop.close(ticket), headers)
        results = await service.results(request, ticket)
        body: dict[str, Any] = {
            **frame,
            "choices": [
                self._choice(fields, index, result, reader, kinds)
                for index, (result, reader) in enumerate(zip(results, readers, strict=True))
            ],
            "usage": answers.usage(results, choices, ticket.num_cached_tokens),
            "metrics": answers.metrics(results),
        }
        if fields.prompt_logprobs is not None:
            entries = results[0].prompt_logprobs or []
            body["prompt_logprobs"] = prompt_logprobs(entries, service.tokens, num_top=fields.prompt_logprobs)
        return JSONResponse(body, headers=headers)

    async def _events(
        self,
        request: Request,
        fields: ChatFields,
        frame: dict[str, Any],
        ticket: Ticket,
        count: UsageCount,
        readers: list[CallReader | None],
        kinds: list[KindReader] | None,
    ) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        async for piece in ticket.pieces():
            count.add(piece)
            reason = None if piece.result is None else answers.finish_reason(piece.result)
            delta = self._delta(piece, readers[piece.index])
            if reason == "stop" and _ends_for_calls(fields, readers[piece.index]):
                reason = "tool_calls"
            # the role comes with the first token, so that the first chunk tells when that was
            first = piece.index not in begun
            begun.add(piece.index)
            if first:
                opening = {"index": piece.index, "delta": {"role": "assistant", "content": ""}}
                yield event({**frame, "choices": [{**opening, "finish_reason": None}], **count.beside()})
            if not (delta or piece.logprobs or reason or fields.return_token_ids or kinds):
                continue
            choice = {
                "index": piece.index,
                "delta": delta,
                "logprobs": self._logprobs(fields, piece),
                "finish_reason": reason,
                **({"token_ids": piece.token_ids} if fields.return_token_ids else {}),
                **kinds_of(kinds, piece),
            }
            yield event({**frame, "choices": [choice], **count.beside()})
        self._service.note_results(request, count.results())
        if count.flags.include_usage:
            yield event({**frame, "choices": [], **count.last()})

    def _delta(self, piece: StreamPiece, reader: CallReader | None) -> dict[str, Any]:
        if reader is None:
            return {"content": piece.text} if piece.text else {}
        before = reader.num_calls
        content, calls = reader.read(piece.text, finished=piece.result is not None)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [call.as_field(before + index) for index, call in enumerate(calls)]
        return delta

    def _choice(
        self,
        fields: ChatFields,
        index: int,
        result: GenerationResult,
        reader: CallReader | None,
        kinds: list[KindReader] | None,
    ) -> dict[str, Any]:
        whole = whole_piece(index, result)
        delta = self._delta(whole, reader)
        reason = answers.finish_reason(result)
        called = _called(reader)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.get("content", None if called else ""),
            "refusal": None,
        }
        if called:
            message["tool_calls"] = delta["tool_calls"]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(fields, whole),
            "finish_reason": "tool_calls" if reason == "stop" and _ends_for_calls(fields, reader) else reason,
            **kinds_of(kinds, whole),
        }
        if fields.return_token_ids:
            choice |= {"token_ids": result.token_ids, "prompt_token_ids": result.prompt_token_ids}
        return choice

    def _logprobs(self, fields: ChatFields, piece: StreamPiece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        as_ids = bool(fields.return_tokens_as_token_ids)
        return chat_logprobs(piece.logprobs, self._service.tokens, as_ids=as_ids)


def _called(reader: CallReader | None) -> bool:
    return reader is not None and reader.num_calls > 0


def _ends_for_calls(fields: ChatFields, reader: CallReader | None) -> bool:
    """Whether calls are why an answer ended; a function that was named is no decision, as OpenAI has it."""
    return _called(reader) and not isinstance(fields.tool_choice, NamedTool)
