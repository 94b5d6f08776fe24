"""A growing sequence as pieces of a stream: what is new since the last look.

Owns how far a reader has come in tokens and in characters. Does not know who steps the engine or where pieces
go.
"""

from __future__ import annotations

from specdec.requests import StreamPiece, logprobs_of, result_of
from specdec.sequence import Sequence


class PieceReader:
    """Reads one sequence piece by piece.

    Args:
        seq: the sequence.
        index: the number its pieces carry.
    """

    def __init__(self, seq: Sequence, index: int) -> None:
        self.seq = seq
        self.index = index
        self._tokens = 0
        self._characters = 0

    def take(self) -> StreamPiece | None:
        """What came since the last piece, None when nothing did; the last piece carries the result."""
        seq = self.seq
        if not seq.is_finished and seq.num_output == self._tokens:
            return None
        text = seq.detokenizer.stable_text(finished=seq.is_finished)
        piece = StreamPiece(
            index=self.index,
            token_ids=seq.token_ids[seq.prompt_len + self._tokens :],
            text=text[self._characters :],
            logprobs=logprobs_of(seq, self._tokens),
            token_kinds=seq.token_kinds[self._tokens :],
            result=result_of(seq) if seq.is_finished else None,
        )
        self._tokens, self._characters = seq.num_output, len(text)
        return piece
