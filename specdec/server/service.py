"""What every endpoint shares: the engine's front, the limits, and a request's way from fields to its ticket.

Owns the state of the server (ready, draining) and the names it answers to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from starlette.requests import Request

from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.requests import GenerationResult, PromptEncoder, verification_fields
from specdec.sampling_params import GrammarSpec, SamplingParams
from specdec.sequence import Sequence
from specdec.server.answers import finish_reason
from specdec.server.bodies import BodyReader
from specdec.server.config import ServerConfig
from specdec.server.engine_loop import EngineLoop
from specdec.server.events import GoneWatch
from specdec.server.fields import GeneratingFields
from specdec.server.metrics import ServerMetrics
from specdec.server.problems import Problem, about_fields
from specdec.server.requests_made import Settings, field_names, num_choices, of_choice, options_of
from specdec.server.tickets import Ticket
from specdec.server.token_text import TokenText


@dataclass
class RequestRecord:
    """What the log and a trace say of one request; filled in on the way."""

    id: str
    arrived: float = field(default_factory=time.perf_counter)
    fields: dict[str, Any] = field(default_factory=dict)
    params: SamplingParams | None = None
    ticket: Ticket | None = None


def record_of(request: Request) -> RequestRecord:
    """The record that `access` made for a request."""
    record: RequestRecord = request.scope["specdec_record"]
    return record


class Service:
    """One engine, served.

    Args:
        engine: not yet stepped by anybody.
        config: settings.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.metrics = ServerMetrics()
        self.loop = EngineLoop(engine, config, self.metrics)
        self.bodies = BodyReader(config)
        # its own tokenizer: the engine's thread decodes with the engine's
        self.encoder = PromptEncoder(engine.target_folder)
        self.tokens = TokenText(self.encoder)
        self.settings = Settings(config=config, spec=engine.config.spec, has_draft=engine.drafter is not None)
        self.started = int(time.time())
        self.draining = False

    def start(self) -> None:
        """Begin to serve; called on the event loop."""
        self.loop.start()
        if find_spec("llguidance") is not None and self.encoder.tokenizer is not None:
            # reading a vocabulary for grammars takes seconds, which the first such request need not wait for
            self.loop.beside_nobody(self._warm_grammars)

    def _warm_grammars(self) -> None:
        with suppress(SpecdecError):
            self.engine.admission.grammars.start(GrammarSpec(regex="a"), 0)

    @property
    def not_ready(self) -> str | None:
        """Why no new work should be sent here; None when it may."""
        if self.loop.fault is not None:
            return f"the engine died: {self.loop.fault}"
        return "draining" if self.draining else None

    def check_model(self, name: str | None) -> str:
        """The name a response carries.

        Raises:
            Problem: 404 for a model that is not served here.
        """
        if name is not None and name not in self.config.model_names:
            served = ", ".join(self.config.model_names)
            raise Problem(
                404,
                f"model ({name:.200}) is not served here; served: {served}",
                param="model",
                code="model_not_found",
            )
        return name or self.config.model_names[0]

    def check_open(self) -> None:
        """Refuse work before its body is read, where that is certain already.

        Raises:
            Problem: 503 while draining, 429 when full, 500 for a dead engine.
        """
        if self.draining:
            raise Problem(
                503, "the server is shutting down", code="draining", retry_after_s=self.config.retry_after_s
            )
        self.loop.check_room()

    async def submit(
        self,
        request: Request,
        fields: GeneratingFields,
        params: SamplingParams,
        *,
        num_prompts: int,
        encode: Callable[[], list[list[int]]],
    ) -> Ticket:
        """Queue a request's choices.

        Args:
            request: whose it is.
            fields: its fields.
            params: of the first choice.
            num_prompts: how many prompts `encode` will give.
            encode: its prompts' token ids; runs beside the engine.

        Raises:
            Problem: what is wrong with it, or that there is no room.
        """
        choices = num_choices(fields, self.config)
        options = options_of(fields, self.config)

        def make() -> list[Sequence]:
            names = field_names(fields)
            with about_fields(names, names["prompt"]):
                return [
                    self.engine.prepare(token_ids, of_choice(params, choice), options)
                    for token_ids in encode()
                    for choice in range(choices)
                ]

        record = record_of(request)
        ticket = await self.loop.submit(
            make,
            count=num_prompts * choices,
            num_choices=choices,
            streaming=bool(fields.stream),
            arrived=record.arrived,
        )
        record.params, record.ticket = params, ticket
        prompts = ticket.sequences[::choices]
        record.fields |= {
            "prompt_tokens": sum(seq.prompt_len for seq in prompts),
            "choices": len(ticket.sequences),
        }
        if self.config.log_prompts and self.encoder.tokenizer is not None:
            record.fields["prompts"] = [
                self.encoder.tokenizer.decode(seq.token_ids[: seq.prompt_len]) for seq in prompts
            ]
        return ticket

    async def results(self, request: Request, ticket: Ticket) -> list[GenerationResult]:
        """Every choice's result; the work ends should the client leave.

        Raises:
            Problem: a choice ended with an error, or the request was ended.
        """
        results: dict[int, GenerationResult] = {}
        with self.closing(ticket):
            async with GoneWatch(request, lambda: self._left(ticket)):
                async for piece in ticket.pieces():
                    if piece.result is not None:
                        results[piece.index] = piece.result
        ordered = [results[index] for index in range(len(ticket.sequences))]
        self.note_results(request, ordered)
        for result in ordered:
            finish_reason(result)
        return ordered

    def note_results(self, request: Request, results: list[GenerationResult]) -> None:
        """Add what came of a request to its log line."""
        record = record_of(request)
        steps = sum(result.stats.verify_steps for result in results)
        committed = sum(result.stats.committed for result in results)
        record.fields |= {
            "completion_tokens": sum(len(result.token_ids) for result in results),
            "finish_reasons": sorted({result.finish_reason for result in results}),
            **verification_fields(results),
            "acceptance_length": round(committed / steps, 3) if steps else None,
        }
        if self.config.log_prompts:
            record.fields["texts"] = [result.text for result in results]

    @contextmanager
    def closing(self, ticket: Ticket) -> Iterator[None]:
        """Give a ticket's places back at the end, whatever that is."""
        try:
            yield
        finally:
            self.loop.close(ticket)

    def headers(self, ticket: Ticket) -> dict[str, str]:
        """Headers of a response: how its drafts are verified, said even where no body says it."""
        rules = sorted({seq.rule.label for seq in ticket.sequences if not seq.rule.rule.is_lossless})
        if rules:
            return {"x-specdec-verification": ", ".join(rules)}
        against = sorted({seq.exact_against for seq in ticket.sequences})
        return {"x-specdec-verification": "exact", "x-specdec-exact-against": ", ".join(against)}

    def _left(self, ticket: Ticket) -> None:
        ticket.fail(Problem(400, "the client left", code="client_left"))
        self.loop.close(ticket)
