"""Token ids to text, a token at a time, without ever emitting half a character.

Also finds stop strings: a stop string may end inside a commit of several tokens, so text is
checked token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# a byte-level token may leave a character unfinished for at most this many tokens; longer runs of
# replacement characters are what the model wrote
MAX_UNFINISHED_TOKENS = 8


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that decoding needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class IncrementalDetokenizer:
    """Text of a growing token list.

    The context window idea is that of Hugging Face's and vLLM's streaming decoders: decode the
    last few tokens with and without the new one; the difference is the new text.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_tail: list[int], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prompt_tail)
        self._prefix = 0
        self._read = len(self._ids)
        self._stop = tuple(stop)
        self._longest_stop = max((len(text) for text in stop), default=0)
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Add a token; True when the text now contains a stop string (text is cut before it)."""
        if self._tokenizer is None:
            return False
        self._ids.append(token_id)
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        unfinished = after.endswith(REPLACEMENT) and len(self._ids) - self._read < MAX_UNFINISHED_TOKENS
        if len(after) <= len(before) or unfinished:
            return False
        new = after[len(before) :]
        self._prefix, self._read = self._read, len(self._ids)
        return self._append(new)

    def flush(self) -> None:
        """Emit what was held back (an unfinished character at the very end)."""
        if self._tokenizer is None or self._read == len(self._ids):
            return
        before = self._decode(self._ids[self._prefix : self._read])
        after = self._decode(self._ids[self._prefix :])
        self._prefix, self._read = self._read, len(self._ids)
        self._append(after[len(before) :])

    def stable_text(self, *, finished: bool) -> str:
        """Text that no later token can take back: all of it but the longest possible stop prefix."""
        if finished or not self._longest_stop:
            return self.text
        held = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return self.text[: len(self.text) - held]

    def _append(self, new: str) -> bool:
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += new
        if not self._stop:
            return False
        found = [position for stop in self._stop if (position := self.text.find(stop, start)) >= 0]
        if not found:
            return False
        self.text = self.text[: min(found)]
        return True

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None, "decoding asked of an engine without a tokenizer"
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
