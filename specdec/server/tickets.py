"""One HTTP request's way to the engine and back.

Owns the buffer between the engine's thread and a client that may read slowly, and its bound. Everything here
is called on the event loop, except that the engine's thread reads `readers` and `streaming`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from specdec.pieces import PieceReader
from specdec.requests import StreamPiece
from specdec.sequence import Sequence as DecodingSequence
from specdec.server.meters import Marks
from specdec.server.problems import Problem


class Ticket:
    """The sequences (choices) of one request.

    Args:
        sequences: prepared, in the order of the response's choices.
        streaming: whether pieces are wanted as they come; else one piece each, with the result.
        arrived: when the request came, on `time.perf_counter`.
        max_buffered_tokens: bound of what may wait for the reader.
        num_choices: choices of each prompt: the first of them stands for the prompt in counts.
    """

    def __init__(
        self,
        sequences: Sequence[DecodingSequence],
        *,
        streaming: bool,
        arrived: float,
        max_buffered_tokens: int,
        num_choices: int = 1,
    ) -> None:
        self.sequences = list(sequences)
        self.marks = [Marks() for _ in sequences]
        self.readers = [PieceReader(seq, index) for index, seq in enumerate(sequences)]
        self.streaming = streaming
        self.arrived = arrived
        self.num_choices = num_choices
        self._max_buffered = max_buffered_tokens
        self._open = len(self.sequences)
        self._pieces: deque[StreamPiece] = deque()
        self._buffered = 0
        self._wake = asyncio.Event()
        self._problem: Problem | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._open == 0 or self._problem is not None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came out of the prefix cache, those of each prompt's first choice."""
        return sum(seq.num_cached_tokens for seq in self.sequences[:: self.num_choices])

    def put(self, piece: StreamPiece) -> bool:
        """Add a piece; False when the reader is too far behind to take it."""
        if self._problem is not None:
            return True
        if self.streaming and self._buffered and self._buffered + len(piece.token_ids) > self._max_buffered:
            return False
        self._pieces.append(piece)
        self._buffered += len(piece.token_ids)
        self._open -= piece.result is not None
        self._wake.set()
        return True

    def fail(self, problem: Problem) -> None:
        """End it; what is buffered is still read, then the problem is raised."""
        if not self.is_over:
            self._problem = problem
            self._wake.set()

    async def pieces(self) -> AsyncIterator[StreamPiece]:
        """Pieces as they come, until every choice has its result.

        Raises:
            Problem: the request was ended.
        """
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._buffered -= len(piece.token_ids)
                yield piece
            if self._problem is not None:
                raise self._problem
            if self._open == 0:
                return
            self._wake.clear()
            await self._wake.wait()
