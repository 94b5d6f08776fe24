"""The unit of training data: token ids of one conversation and which of them the target wrote.

Owns the record and its content hash. Knows nothing of files, templates or models.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSequence:
    """One conversation as ids, with a mask that is true on assistant text and its end of turn."""

    id: str
    token_ids: tuple[int, ...]
    assistant_mask: tuple[bool, ...]
    category: str = ""

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.assistant_mask), "mask and ids must have one entry per token"

    @property
    def num_answer_tokens(self) -> int:
        """Tokens the target wrote."""
        return sum(self.assistant_mask)

    @property
    def content_hash(self) -> str:
        """SHA-256 of the ids: the key of stored target states."""
        return hashlib.sha256(array("i", self.token_ids).tobytes()).hexdigest()
