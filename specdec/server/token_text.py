r"""Single tokens as text and as bytes, and log-probabilities in OpenAI's two shapes.

Owns how a token is shown that is no whole character: OpenAI's `bytes:\xe2\x80`, and the bytes themselves
beside it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from specdec.hf import tokenizer_json
from specdec.logprobs import TokenLogprobs
from specdec.requests import PromptEncoder

# JSON has no minus infinity; vLLM's stand-in
LOWEST_LOGPROB = -9999.0


class TokenText:
    """Shows the tokens of one tokenizer.

    Args:
        encoder: the target's; without a tokenizer tokens are shown as `token_id:N`.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._tokenizer: Any = encoder.tokenizer
        self._byte_level = self._tokenizer is not None and _is_byte_level(self._tokenizer)
        self._bytes_of = {char: byte for byte, char in _byte_characters().items()}
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._longest: int | None = None

    def show(self, token_id: int) -> tuple[str, list[int]]:
        """A token's text, and its bytes."""
        if token_id not in self._known:
            self._known[token_id] = self._make(token_id)
        return self._known[token_id]

    @property
    def longest(self) -> int:
        """Characters of the longest token: a text has at least its length over this many tokens."""
        if self._longest is None:
            vocabulary = self._tokenizer.get_vocab() if self._tokenizer is not None else {"": 0}
            self._longest = max(len(piece) for piece in vocabulary)
        return self._longest

    def width(self, token_id: int) -> int:
        """Characters of a token in a text, where special tokens do not show."""
        special = self._tokenizer is not None and token_id in self._tokenizer.all_special_ids
        return 0 if special else len(self.show(token_id)[0])

    def _make(self, token_id: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            return f"token_id:{token_id}", []
        raw = self._raw_bytes(token_id)
        if raw is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text, list(text.encode())
        try:
            return raw.decode(), list(raw)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)

    def _raw_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token stands for where its spelling tells them, None otherwise."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id in self._tokenizer.all_special_ids or token_id in self._tokenizer.added_tokens_decoder:
            return str(piece).encode()
        if self._byte_level and all(char in self._bytes_of for char in piece):
            return bytes(self._bytes_of[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return None


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether the vocabulary is spelled in GPT-2's byte characters."""
    return tokenizer.is_fast and "ByteLevel" in json.dumps(json.loads(tokenizer_json(tokenizer))["decoder"])


def _byte_characters() -> dict[int, str]:
    """GPT-2's character for each byte: printable ones stand for themselves, the rest moved up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + index) for index, byte in enumerate(moved)}


def chat_logprobs(entries: list[TokenLogprobs], tokens: TokenText, *, as_ids: bool) -> dict[str, Any]:
    """The `logprobs` of a chat's choice: `content` with an entry a token."""

    def show(token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = tokens.show(token_id)
        return {
            "token": f"token_id:{token_id}" if as_ids else text,
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": raw,
        }

    return {
        "content": [
            {
                **show(entry.token_id, entry.logprob),
                "top_logprobs": [show(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: list[TokenLogprobs], tokens: TokenText, *, as_ids: bool, offset: int
) -> dict[str, Any]:
    """The `logprobs` of a completion's choice: four lists, an entry a token.

    Args:
        entries: the tokens.
        tokens: shows them.
        as_ids: show them as `token_id:N`.
        offset: characters of the choice before the first of them.
    """
    shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        text = tokens.show(entry.token_id)[0]
        name = f"token_id:{entry.token_id}" if as_ids else text
        # the written token is always listed, as OpenAI does, so there may be one more than asked for
        top = {
            (f"token_id:{token_id}" if as_ids else tokens.show(token_id)[0]): max(logprob, LOWEST_LOGPROB)
            for token_id, logprob in (*reversed(entry.top), (entry.token_id, entry.logprob))
        }
        shown["tokens"].append(name)
        shown["token_logprobs"].append(max(entry.logprob, LOWEST_LOGPROB))
        shown["top_logprobs"].append(dict(sorted(top.items(), key=lambda item: -item[1])))
        shown["text_offset"].append(offset)
        offset += len(text)
    return shown


def echoed_logprobs(
    token_ids: list[int], entries: list[TokenLogprobs], tokens: TokenText, *, num_top: int, as_ids: bool
) -> dict[str, list[Any]]:
    """The four lists for an echoed prompt; its first token has no law.

    Args:
        token_ids: the prompt.
        entries: of its tokens from the second on.
        tokens: shows them.
        num_top: best tokens to show of each.
        as_ids: show them as `token_id:N`.
    """
    first = token_ids[0]
    shown = completion_logprobs(
        [replace(entry, top=entry.top[:num_top]) for entry in entries],
        tokens,
        as_ids=as_ids,
        offset=tokens.width(first),
    )
    name = f"token_id:{first}" if as_ids else tokens.show(first)[0]
    heads = {"tokens": name, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {key: [head, *shown[key]] for key, head in heads.items()}


def prompt_logprobs(
    entries: list[TokenLogprobs], tokens: TokenText, *, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """A prompt as vLLM's `prompt_logprobs`: an entry a token of the prompt, by token ids; the first has none.

    Args:
        entries: of its tokens from the second on.
        tokens: shows them.
        num_top: best tokens to show of each, the token itself beside them.
    """

    def show(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokens.show(token_id)[0]
        return {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": text}

    shown: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in entries:
        best = {str(one): show(one, value, rank) for rank, (one, value) in enumerate(entry.top[:num_top], 1)}
        shown.append({str(entry.token_id): show(entry.token_id, entry.logprob, entry.rank)} | best)
    return shown
