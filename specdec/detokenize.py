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

    Args:
        tokenizer: None: there is no text.
        prompt_tail: the prompt's last tokens, so that the first token is decoded in context.
        stop: strings that end the text.
        min_tokens: a stop string counts only when it ends behind the text of that many tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_tail: list[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(prompt_tail)
        self._prefix = 0
        self._read = len(self._ids)
        self._stop = tuple(stop)
        self._longest_stop = max((len(text) for text in stop), default=0)
        self._text = ""
        self._guarded_ids = len(self._ids) + min_tokens
        self._guarded_text = 0

    @property
    def text(self) -> str:
        """Text so far; an unfinished character at the end is held back."""
        self._advance()
        return self._text

    def push(self, token_id: int) -> bool:
        """Add a token; True when the text now contains a stop string (text is cut before it).

        Without stop strings nothing is decoded until the text is asked for.
        """
        if self._tokenizer is None:
            return False
        self._ids.append(token_id)
        return self._advance() if self._stop else False

    def flush(self) -> None:
        """Emit what was held back (an unfinished character at the very end)."""
        self._advance(final=True)

    def _advance(self, final: bool = False) -> bool:
        """Decode the tokens not yet read; True when that completed a stop string."""
        if self._tokenizer is None or self._read == len(self._ids):
            return False
        before = self._decode(self._ids[self._prefix : self._read])
        end = len(self._ids)
        after = self._decode(self._ids[self._prefix : end])
        while not final and after.endswith(REPLACEMENT):
            # the last tokens may be the beginning of a character: read up to where the text is whole
            end -= 1
            if len(self._ids) - end >= MAX_UNFINISHED_TOKENS:
                end = len(self._ids)
                after = self._decode(self._ids[self._prefix : end])
                break
            if end <= self._read:
                return False
            after = self._decode(self._ids[self._prefix : end])
        if not final and len(after) <= len(before):
            return False
        self._prefix, self._read = self._read, end
        return self._append(after[len(before) :], guarded=end <= self._guarded_ids)

    def stable_text(self, *, finished: bool) -> str:
        """Text that no later token can take back: all of it but the longest possible stop prefix."""
        text = self.text
        if finished or not self._longest_stop:
            return text
        held = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:length]):
                    held = length
                    break
        return text[: len(text) - held]

    def _append(self, new: str, *, guarded: bool) -> bool:
        start = len(self._text)
        self._text += new
        if guarded:
            self._guarded_text = len(self._text)
            return False
        found = []
        for stop in self._stop:
            first = max(0, max(start, self._guarded_text) - len(stop) + 1)
            position = self._text.find(stop, first)
            if position >= 0:
                found.append(position)
        if not found:
            return False
        self._text = self._text[: min(found)]
        return True

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None, "decoding asked of an engine without a tokenizer"
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
