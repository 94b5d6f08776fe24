"""Training sequences from a data file: token ids and a mask that is exactly the target's own text.

Owns tokenising, the cutting to length, and the count of what was dropped and why. Files are `records`',
masks `masks`'. Chats are rendered through `specdec.hf.render_chat`; token ids that a file gives are used as
they are; of a plain text every token but the first is trained on. Knows nothing of batches or states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.hf import encode_text
from specdec.train.chat_records import ChatData, Dropped
from specdec.train.masks import ChatMask, chat_mask
from specdec.train.records import Record, Unusable, data_file, numbered_lines, parse_record
from specdec.train.sequences import TrainSequence
from specdec.train.token_cache import through_cache

# a row needs its next token and the one it predicts.
MIN_TOKENS = 3


def load_chat_data(path: str | Path, tokenizer: Any, *, max_length: int, vocab_size: int) -> ChatData:
    """Read training data.

    Args:
        path: a .jsonl of chats, answered prompts, texts or token ids; a .txt; or a streamed set (`hf:NAME`).
        tokenizer: the target's.
        max_length: longer chats are cut, longer texts taken in pieces.
        vocab_size: the target's; ids must be below it.

    Raises:
        SpecdecError: no file, or no record with a trainable token.
    """
    file = data_file(path)
    return through_cache(
        file,
        tokenizer,
        max_length=max_length,
        vocab_size=vocab_size,
        make=lambda: _load(file, str(path), tokenizer, max_length, vocab_size),
    )


def _load(file: Path, spelling: str, tokenizer: Any, max_length: int, vocab_size: int) -> ChatData:
    sequences: list[TrainSequence] = []
    dropped: list[Dropped] = []
    seen: set[str] = set()
    partly = 0
    for number, line in numbered_lines(file):
        try:
            record = parse_record(line, number)
            rendered = None if record.messages is None else _rendered(tokenizer, record.messages)
            found = list(_sequences(record, rendered, tokenizer, max_length, vocab_size))
            new = [sequence for sequence in found if sequence.content_hash not in seen]
            if not new:
                raise Unusable("same text as an earlier record")
        except Unusable as error:
            dropped.append(Dropped(number, str(error)))
            continue
        seen |= {sequence.content_hash for sequence in new}
        sequences += new
        partly += rendered is not None and rendered.left_out > 0
    if not sequences:
        total, data = len(dropped), ChatData((), tuple(dropped))
        reasons = "; ".join(f"{count} {reason}" for reason, count in data.dropped_reasons().items())
        raise SpecdecError(
            f"--data ({spelling}): {total} of {total} samples have no trainable token "
            f"({reasons or 'the file is empty'})"
        )
    return ChatData(tuple(sequences), tuple(dropped), partly)


def _rendered(tokenizer: Any, messages: Sequence[dict[str, str]]) -> ChatMask:
    try:
        return chat_mask(tokenizer, messages)
    except SpecdecError as error:
        # a template that refuses one chat (a system turn, with Gemma) has a word for the others
        if tokenizer.chat_template is None:
            raise
        raise Unusable(str(error)) from error


def _sequences(
    record: Record, rendered: ChatMask | None, tokenizer: Any, max_length: int, vocab_size: int
) -> Iterator[TrainSequence]:
    if record.text is not None:
        ids = encode_text(tokenizer, record.text)
        pieces = [ids[low : low + max_length] for low in range(0, len(ids), max_length)]
        kept = [piece for piece in pieces if len(piece) >= MIN_TOKENS]
        if not kept:
            raise Unusable(f"fewer than {MIN_TOKENS} tokens")
        for number, piece in enumerate(kept):
            name = record.id if len(kept) == 1 else f"{record.id}#{number}"
            yield _sequence(record, name, piece, [False] + [True] * (len(piece) - 1))
        return
    if record.token_ids is not None:
        ids, mask = _given_ids(record.token_ids, vocab_size)
    else:
        assert rendered is not None, "a record has ids, turns or a text"
        ids, mask, _ = rendered
    ids, mask = ids[:max_length], mask[:max_length]
    if len(ids) < MIN_TOKENS:
        raise Unusable(f"fewer than {MIN_TOKENS} tokens")
    # the first token is predicted by nothing, the second has no row before it.
    if not any(mask[2:]):
        raise Unusable("no trainable token within max_length")
    if all(mask):
        raise Unusable("every token is marked as assistant text")
    yield _sequence(record, record.id, ids, mask)


def _sequence(record: Record, name: str, ids: list[int], mask: list[bool]) -> TrainSequence:
    return TrainSequence(id=name, token_ids=tuple(ids), assistant_mask=tuple(mask), category=record.category)


def _given_ids(given: tuple[Any, Any], vocab_size: int) -> tuple[list[int], list[bool]]:
    parts = []
    for key, ids in zip(("prompt_token_ids", "response_token_ids"), given, strict=True):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise Unusable(f"{key} is not a list of whole numbers")
        if any(not 0 <= token < vocab_size for token in ids):
            raise Unusable(f"{key} has an id outside the target's vocabulary of {vocab_size}")
        parts.append(ids)
    prompt, response = parts
    if not prompt:
        raise Unusable("prompt_token_ids is empty")
    if not response:
        raise Unusable("response_token_ids is empty")
    return prompt + response, [False] * len(prompt) + [True] * len(response)
