"""How each token of an answer came, for requests that ask (`speculative.token_kinds`).

Owns the form: `{"kind": "accepted", "text": " the"}`, one entry a token. The texts of all entries are the
answer's text before a stop string cuts it; a token that ends in the middle of a character has its text in the
token that completes it.
"""

from __future__ import annotations

from specdec.admission import PROMPT_TAIL
from specdec.detokenize import IncrementalDetokenizer
from specdec.requests import PromptEncoder, StreamPiece
from specdec.sequence import Sequence
from specdec.server.fields import GeneratingFields
from specdec.server.tickets import Ticket


class KindReader:
    """Reads one choice's tokens, piece by piece.

    Args:
        encoder: its tokenizer; without one texts are empty.
        seq: the choice's.
    """

    def __init__(self, encoder: PromptEncoder, seq: Sequence) -> None:
        tail = seq.token_ids[: seq.prompt_len][-PROMPT_TAIL:]
        # a decoder of its own: that of the sequence cuts at stop strings and says only how long the whole is
        self._decoder = IncrementalDetokenizer(encoder.tokenizer, tail, ())
        self._characters = 0

    def read(self, piece: StreamPiece) -> list[dict[str, str]]:
        """Entries of a piece's tokens."""
        entries = []
        for index, (token_id, kind) in enumerate(zip(piece.token_ids, piece.token_kinds, strict=True)):
            self._decoder.push(token_id)
            if piece.result is not None and index == len(piece.token_ids) - 1:
                self._decoder.flush()
            text = self._decoder.text
            entries.append({"kind": kind, "text": text[self._characters :]})
            self._characters = len(text)
        return entries


def kind_readers(fields: GeneratingFields, encoder: PromptEncoder, ticket: Ticket) -> list[KindReader] | None:
    """A reader for each choice; None when the request does not ask."""
    if fields.speculative is None or not fields.speculative.token_kinds:
        return None
    return [KindReader(encoder, seq) for seq in ticket.sequences]


def kinds_of(readers: list[KindReader] | None, piece: StreamPiece) -> dict[str, list[dict[str, str]]]:
    """What a choice carries beside its text: nothing, or its tokens' kinds."""
    return {} if readers is None else {"token_kinds": readers[piece.index].read(piece)}
