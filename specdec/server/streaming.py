"""What the streams of both generating endpoints share: usage beside and behind the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.requests import GenerationResult, StreamPiece
from specdec.server import answers
from specdec.server.fields import GeneratingFields
from specdec.server.problems import bad_field
from specdec.server.tickets import Ticket


@dataclass(frozen=True)
class StreamFlags:
    """What a stream carries beside text."""

    include_usage: bool
    continuous: bool


def stream_flags(fields: GeneratingFields) -> StreamFlags:
    """The request's stream options.

    Raises:
        Problem: options without a stream.
    """
    options = fields.stream_options
    if options is None:
        return StreamFlags(include_usage=False, continuous=False)
    if not fields.stream:
        raise bad_field("stream_options", "stream_options need stream: true")
    return StreamFlags(
        include_usage=bool(options.include_usage), continuous=bool(options.continuous_usage_stats)
    )


class UsageCount:
    """Counts a stream's tokens and gathers its results.

    Args:
        ticket: the stream's.
        num_choices: choices of each prompt.
        flags: what is asked for.
    """

    def __init__(self, ticket: Ticket, num_choices: int, flags: StreamFlags) -> None:
        self.flags = flags
        self._ticket = ticket
        self._num_choices = num_choices
        self._prompt_tokens = sum(seq.prompt_len for seq in ticket.sequences[::num_choices])
        self._completion_tokens = 0
        self._results: dict[int, GenerationResult] = {}

    def add(self, piece: StreamPiece) -> None:
        """Count a piece."""
        self._completion_tokens += len(piece.token_ids)
        if piece.result is not None:
            self._results[piece.index] = piece.result

    def results(self) -> list[GenerationResult]:
        """Results so far, by choice."""
        return [self._results[index] for index in sorted(self._results)]

    def beside(self) -> dict[str, Any]:
        """What a chunk with text says of usage: nothing, null, or what there is so far."""
        if self.flags.continuous:
            return {"usage": answers.usage_of(self._prompt_tokens, self._completion_tokens)}
        return {"usage": None} if self.flags.include_usage else {}

    def last(self) -> dict[str, Any]:
        """Usage and metrics of the whole stream."""
        results = self.results()
        return {
            "usage": answers.usage(results, self._num_choices, self._ticket.num_cached_tokens),
            "metrics": answers.metrics(results),
        }
