"""Training conversations from a JSONL file: token ids and a mask that is exactly the target's own text.

Owns reading, checking, the derivation of the assistant mask, and the count of what was dropped and why.
Records with `prompt_token_ids` and `response_token_ids` are used as they are; `messages` alone are rendered
through `specdec.hf.render_chat`. Knows nothing of batches or states.

A template without generation markers gives no mask, so it is derived from prefixes: the render up to an
assistant turn with the generation prompt, and the render that includes it, must both be prefixes of the
whole. Where a template is not prefix-stable the record is dropped with that reason, never guessed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.hf import render_chat
from specdec.train.sequences import TrainSequence

ROLES = ("system", "user", "assistant")
# a row needs its next token and the one it predicts.
MIN_TOKENS = 3


@dataclass(frozen=True)
class Dropped:
    """A record left out: its line in the file, counted from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class ChatData:
    """Usable conversations and the dropped records of one file."""

    sequences: tuple[TrainSequence, ...]
    dropped: tuple[Dropped, ...]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens the target wrote."""
        return sum(sequence.num_answer_tokens for sequence in self.sequences)

    def dropped_reasons(self) -> dict[str, int]:
        """How many records each reason cost, most first."""
        return dict(Counter(item.reason for item in self.dropped).most_common())


class _Unusable(Exception):
    """A record that cannot be trained on; the text is the reason."""


def load_chat_data(path: str | Path, tokenizer: Any, *, max_length: int, vocab_size: int) -> ChatData:
    """Read a responses or chat JSONL file.

    Args:
        path: one JSON object a line.
        tokenizer: the target's, for records without token ids.
        max_length: longer conversations are cut.
        vocab_size: the target's; ids must be below it.

    Raises:
        SpecdecError: no file, or no record with a trainable token.
    """
    file = Path(path)
    try:
        # not splitlines: it also cuts at U+2028 and the like, which JSON strings may hold
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecdecError(f"--data ({file}) cannot be read: {error}") from error
    sequences: list[TrainSequence] = []
    dropped: list[Dropped] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            sequence = _read(line, number, tokenizer, max_length, vocab_size)
            if sequence.content_hash in seen:
                raise _Unusable("same text as an earlier record")
        except _Unusable as error:
            dropped.append(Dropped(number, str(error)))
            continue
        seen.add(sequence.content_hash)
        sequences.append(sequence)
    total = len(sequences) + len(dropped)
    if not sequences:
        data = ChatData((), tuple(dropped))
        reasons = "; ".join(f"{count} {reason}" for reason, count in data.dropped_reasons().items())
        raise SpecdecError(
            f"--data ({file}): {total} of {total} samples have no trainable token "
            f"({reasons or 'the file is empty'})"
        )
    return ChatData(tuple(sequences), tuple(dropped))


def _read(line: str, number: int, tokenizer: Any, max_length: int, vocab_size: int) -> TrainSequence:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _Unusable("not valid JSON") from error
    if not isinstance(record, dict):
        raise _Unusable("not a JSON object")
    if "response_token_ids" in record:
        ids, mask = _given_ids(record, vocab_size)
    else:
        ids, mask = chat_mask(tokenizer, _messages(record))
    ids, mask = ids[:max_length], mask[:max_length]
    if len(ids) < MIN_TOKENS:
        raise _Unusable(f"fewer than {MIN_TOKENS} tokens")
    # the first token is predicted by nothing, the second has no row before it.
    if not any(mask[2:]):
        raise _Unusable("no trainable token within max_length")
    if all(mask):
        raise _Unusable("every token is marked as assistant text")
    name = record.get("id")
    return TrainSequence(
        id=name if isinstance(name, str) else f"line-{number}",
        token_ids=tuple(ids),
        assistant_mask=tuple(mask),
        category=str(record.get("category") or ""),
    )


def _given_ids(record: dict[str, Any], vocab_size: int) -> tuple[list[int], list[bool]]:
    parts = []
    for key in ("prompt_token_ids", "response_token_ids"):
        ids = record.get(key)
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise _Unusable(f"{key} is not a list of whole numbers")
        if any(not 0 <= token < vocab_size for token in ids):
            raise _Unusable(f"{key} has an id outside the target's vocabulary of {vocab_size}")
        parts.append(ids)
    prompt, response = parts
    if not prompt:
        raise _Unusable("prompt_token_ids is empty")
    if not response:
        raise _Unusable("response_token_ids is empty")
    return prompt + response, [False] * len(prompt) + [True] * len(response)


def _messages(record: dict[str, Any]) -> list[dict[str, str]]:
    """The record's turns, checked by role and order."""
    messages = record.get("messages")
    if messages is None:
        raise _Unusable("no messages")
    if not isinstance(messages, list) or not messages:
        raise _Unusable("messages is empty or not a list")
    turns: list[dict[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise _Unusable(f"role {role!r} is not one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise _Unusable("content is missing or not text")
        turns.append({"role": message["role"], "content": message["content"]})
    talk = turns[1:] if turns[0]["role"] == "system" else turns
    if not talk:
        raise _Unusable("only a system turn")
    expected = ("user", "assistant")
    for index, turn in enumerate(talk):
        if turn["role"] != expected[index % 2]:
            raise _Unusable(f"a {turn['role']} turn where a {expected[index % 2]} turn belongs")
    if len(talk) < 2:
        raise _Unusable("no assistant turn")
    return turns if talk[-1]["role"] == "assistant" else turns[:-1]


def chat_mask(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Ids of a chat and a mask true on assistant text and its end-of-turn token.

    Raises:
        _Unusable: the template is not prefix-stable for these messages.
    """
    ids = render_chat(tokenizer, messages, add_generation_prompt=False)
    mask = [False] * len(ids)
    special = _special_ids(tokenizer)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_chat(tokenizer, messages[:index], add_generation_prompt=True)
        until = render_chat(tokenizer, messages[: index + 1], add_generation_prompt=False)
        if ids[: len(before)] != before or ids[: len(until)] != until or len(until) <= len(before):
            raise _Unusable(f"the chat template is not prefix-stable at turn {index + 1}")
        # what follows the end-of-turn token (a line break) is the template's, not the model's.
        ends = [place for place in range(len(before), len(until)) if ids[place] in special]
        stop = ends[-1] + 1 if ends else len(until)
        mask[len(before) : stop] = [True] * (stop - len(before))
    return ids, mask


def _special_ids(tokenizer: Any) -> set[int]:
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return added | set(tokenizer.all_special_ids)
