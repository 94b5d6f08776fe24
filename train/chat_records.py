"""What a data file gives: usable sequences, and what was dropped with which reason.

Owns these records alone; `chat_data` makes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from specdec.train.sequences import TrainSequence


@dataclass(frozen=True)
class Dropped:
    """A record left out: its line in the file, counted from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class ChatData:
    """Usable sequences and the dropped records of one file.

    `partly_trained` counts chats of which only the last answer is trained on (see `masks`).
    """

    sequences: tuple[TrainSequence, ...]
    dropped: tuple[Dropped, ...]
    partly_trained: int = 0

    @property
    def num_answer_tokens(self) -> int:
        """Tokens the target wrote."""
        return sum(sequence.num_answer_tokens for sequence in self.sequences)

    def dropped_reasons(self) -> dict[str, int]:
        """How many records each reason cost, most first."""
        return dict(Counter(item.reason for item in self.dropped).most_common())
