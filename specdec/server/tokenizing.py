"""vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.server.fields import DetokenizeFields, TokenizeFields
from specdec.server.problems import about_fields, bad_field
from specdec.server.prompts import Prompts
from specdec.server.service import Service


class Tokenizing:
    """The two endpoints.

    Args:
        service: the server.
        prompts: makes token ids.
    """

    def __init__(self, service: Service, prompts: Prompts) -> None:
        self._service = service
        self._prompts = prompts

    def add_to(self, router: APIRouter, tokenize: dict[str, Any], detokenize: dict[str, Any]) -> None:
        """Put the endpoints where clients look for them."""
        router.post("/tokenize", **tokenize)(self.tokenize)
        router.post("/detokenize", **detokenize)(self.detokenize)

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        fields, _ = await self._service.bodies.fields(request, TokenizeFields)
        self._service.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise bad_field("prompt", "give one of prompt and messages")

        def make() -> list[int]:
            with about_fields({}, "prompt" if fields.messages is None else "messages"):
                if fields.prompt is not None:
                    return self._prompts.of_text(
                        fields.prompt, add_special_tokens=fields.add_special_tokens is not False
                    )
                return self._prompts.of_chat(
                    fields.messages or (),
                    tools=fields.tools or (),
                    variables=dict(fields.chat_template_kwargs or {}),
                    add_generation_prompt=fields.add_generation_prompt is not False,
                )

        token_ids = await self._service.loop.beside(make)
        body: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": self._service.engine.max_model_len,
            "tokens": token_ids,
        }
        if fields.return_token_strs:
            body["token_strs"] = [self._service.tokens.show(token_id)[0] for token_id in token_ids]
        return JSONResponse(body)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        fields, _ = await self._service.bodies.fields(request, DetokenizeFields)
        self._service.check_model(fields.model)

        def make() -> str:
            with about_fields({}, "tokens"):
                return self._prompts.text_of(fields.tokens)

        return JSONResponse({"prompt": await self._service.loop.beside(make)})
