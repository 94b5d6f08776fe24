"""`POST /v1/completions`: texts continued, whole or as a stream."""

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
from specdec.server.fields import CompletionFields
from specdec.server.problems import bad_field
from specdec.server.prompts import Prompts
from specdec.server.requests_made import completion_params, num_choices
from specdec.server.service import Service, record_of
from specdec.server.streaming import UsageCount, stream_flags
from specdec.server.tickets import Ticket
from specdec.server.token_kinds import KindReader, kind_readers, kinds_of
from specdec.server.token_text import completion_logprobs, echoed_logprobs, prompt_logprobs


class Completions:
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
        router.post("/v1/completions", **described)(self.create)

    async def create(self, request: Request) -> Response:
        """Continue one text or several."""
        service = self._service
        service.check_open()
        fields, ignored = await service.bodies.fields(request, CompletionFields)
        model = service.check_model(fields.model)
        prompts = _prompt_list(fields, service.config.max_prompts)
        params = completion_params(fields, service.settings)
        flags = stream_flags(fields)
        ticket = await service.submit(
            request,
            fields,
            params,
            num_prompts=len(prompts),
            encode=lambda: self._prompts.of_completion(prompts),
        )
        headers = service.headers(ticket) | ({"x-specdec-ignored": ", ".join(ignored)} if ignored else {})
        frame = {
            "id": f"cmpl-{record_of(request).id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        choices = num_choices(fields, service.config)
        echoes = [self._echo(fields, ticket, index) for index in range(len(ticket.sequences))]
        kinds = kind_readers(fields, service.encoder, ticket)
        if fields.stream:
            count = UsageCount(ticket, choices, flags)
            events = self._events(request, fields, frame, ticket, count, echoes, kinds)
            return EventStream(events, lambda: service.loop.close(ticket), headers)
        results = await service.results(request, ticket)
        body = {
            **frame,
            "choices": [
                self._choice(fields, ticket, index, echoes[index], result, kinds)
                for index, result in enumerate(results)
            ],
            "usage": answers.usage(results, choices, ticket.num_cached_tokens),
            "metrics": answers.metrics(results),
        }
        return JSONResponse(body, headers=headers)

    async def _events(
        self,
        request: Request,
        fields: CompletionFields,
        frame: dict[str, Any],
        ticket: Ticket,
        count: UsageCount,
        echoes: list[str],
        kinds: list[KindReader] | None,
    ) -> AsyncIterator[bytes]:
        offsets = [len(echo) for echo in echoes]
        begun: set[int] = set()
        async for piece in ticket.pieces():
            count.add(piece)
            reason = None if piece.result is None else answers.finish_reason(piece.result)
            first = piece.index not in begun
            echo = echoes[piece.index] if first else ""
            begun.add(piece.index)
            if not (echo or piece.text or piece.logprobs or reason or fields.return_token_ids or kinds):
                continue
            choice = {
                "index": piece.index,
                "text": echo + piece.text,
                "logprobs": self._logprobs(fields, piece, offsets[piece.index], ticket if first else None),
                "finish_reason": reason,
                **({"token_ids": piece.token_ids} if fields.return_token_ids else {}),
                **kinds_of(kinds, piece),
            }
            offsets[piece.index] += sum(
                len(self._service.tokens.show(entry.token_id)[0]) for entry in piece.logprobs or ()
            )
            yield event({**frame, "choices": [choice], **count.beside()})
        self._service.note_results(request, count.results())
        if count.flags.include_usage:
            yield event({**frame, "choices": [], **count.last()})

    def _choice(
        self,
        fields: CompletionFields,
        ticket: Ticket,
        index: int,
        echo: str,
        result: GenerationResult,
        kinds: list[KindReader] | None,
    ) -> dict[str, Any]:
        whole = whole_piece(index, result)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + result.text,
            "logprobs": self._logprobs(fields, whole, len(echo), ticket),
            "finish_reason": answers.finish_reason(result),
            **kinds_of(kinds, whole),
        }
        if fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                result.prompt_logprobs or [], self._service.tokens, num_top=fields.prompt_logprobs
            )
        if fields.return_token_ids:
            choice |= {"token_ids": result.token_ids, "prompt_token_ids": result.prompt_token_ids}
        return choice

    def _logprobs(
        self, fields: CompletionFields, piece: StreamPiece, offset: int, ticket: Ticket | None
    ) -> dict[str, Any] | None:
        """Of a piece's tokens, those of an echoed prompt before them where `ticket` is given."""
        if piece.logprobs is None or fields.logprobs is None:
            return None
        tokens, as_ids = self._service.tokens, bool(fields.return_tokens_as_token_ids)
        shown = completion_logprobs(piece.logprobs, tokens, as_ids=as_ids, offset=offset)
        if not fields.echo or ticket is None:
            return shown
        seq = ticket.sequences[piece.index]
        prompt = seq.token_ids[: seq.prompt_len]
        before = echoed_logprobs(prompt, seq.prompt_logprobs, tokens, num_top=fields.logprobs, as_ids=as_ids)
        return {name: before[name] + shown[name] for name in shown}

    def _echo(self, fields: CompletionFields, ticket: Ticket, index: int) -> str:
        """The prompt as text, where the answer is to begin with it."""
        tokenizer = self._service.encoder.tokenizer
        if not fields.echo or tokenizer is None:
            return ""
        seq = ticket.sequences[index]
        text: str = tokenizer.decode(seq.token_ids[: seq.prompt_len], skip_special_tokens=True)
        return text


def _prompt_list(fields: CompletionFields, most: int) -> list[str | list[int]]:
    """The request's prompts, one or several.

    Raises:
        Problem: none, too many, or an empty one.
    """
    given = fields.prompt
    prompts: list[Any] = (
        [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    )
    if not 1 <= len(prompts) <= most:
        raise bad_field("prompt", f"prompt ({len(prompts)} prompts) must hold 1..{most} prompts")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise bad_field("prompt", f"prompt {index} is empty: at least one token is needed")
    return prompts
