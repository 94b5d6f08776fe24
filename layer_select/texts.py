"""Calibration texts: reading them, turning them into ids, marking which positions count.

Owns the accepted file forms and the choice of positions. Does not know models beyond their tokenizer.

A position counts when the draft head will have to speak there and when it says something: answer positions
where the file holds the target's answers; otherwise everything after the part all texts share (BOS, system
prompt), whose states are identical in every text. The attention sink never counts.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.hf import encode_text, render_chat
from specdec.layer_select.config import MIN_ROWS, ScoreConfig

# a plain text file is cut at paragraph ends into pieces of about this many characters for each allowed token.
CHARACTERS_PER_TOKEN = 4
TEXTS_BETWEEN_COUNTS = 32
# a paragraph of this many pieces is a file without blank lines, not prose.
LONG_PARAGRAPH = 4


@dataclass(frozen=True, kw_only=True)
class CalibrationText:
    """One text: its ids, the first position that is measured, and what kind of text it is ("" unknown)."""

    token_ids: tuple[int, ...]
    first_kept: int
    domain: str = ""

    @property
    def num_kept(self) -> int:
        """Positions that are measured."""
        return len(self.token_ids) - self.first_kept


def read_domains(
    sources: Mapping[str, str | Path], tokenizer: Any, config: ScoreConfig
) -> list[CalibrationText]:
    """Read texts of several domains, an equal part of `config.tokens` from each.

    Args:
        sources: domain (prose, code, maths, chat) to a file as in `read_texts`.
        tokenizer: the target's.
        config: as in `read_texts`.
    """
    if not sources:
        raise SpecdecError("calibration needs at least one file; name one for each domain")
    if config.tokens < MIN_ROWS * len(sources):
        raise SpecdecError(
            f"tokens ({config.tokens}) must be at least {MIN_ROWS * len(sources)}, {MIN_ROWS} for each of "
            f"the {len(sources)} calibration files"
        )
    share = replace(config, tokens=config.tokens // len(sources))
    return [
        text for domain, path in sources.items() for text in read_texts(path, tokenizer, share, domain=domain)
    ]


def read_texts(
    path: str | Path, tokenizer: Any, config: ScoreConfig, *, domain: str = ""
) -> list[CalibrationText]:
    """Read texts in seeded random order until `config.tokens` positions count.

    Args:
        path: `.jsonl` with `prompt`, `turns`, `messages`, `text` or stored token ids in each row, or `.txt`.
        tokenizer: the target's.
        config: token budget, length limit, sink positions, seed.
        domain: kind of text of rows that have no `domain` field of their own.
    """
    path = Path(path)
    rows = list(_rows_of(path, config))
    if not rows:
        raise SpecdecError(f"calibration file ({path}) holds no text")
    random.Random(config.seed).shuffle(rows)
    texts: list[CalibrationText] = []
    has_answer: list[bool] = []
    for line, row in rows:
        ids, start = _ids_of_row(path, line, row, tokenizer)
        ids = ids[: config.max_text_tokens]
        first_kept = max(start or 0, config.drop_first)
        if len(ids) - first_kept < MIN_ROWS:
            continue
        texts.append(
            CalibrationText(
                token_ids=tuple(ids), first_kept=first_kept, domain=str(row.get("domain", domain))
            )
        )
        has_answer.append(start is not None)
        # the start that texts share is known only by looking at them together, so not after every row.
        if len(texts) % TEXTS_BETWEEN_COUNTS == 0 and _num_kept(texts, has_answer) >= config.tokens:
            break
    texts = _within_budget(_drop_shared_start(texts, has_answer), config.tokens)
    if not texts:
        raise SpecdecError(
            f"calibration file ({path}) has no text with {MIN_ROWS} measured positions after the first "
            f"{config.drop_first} and within max_text_tokens ({config.max_text_tokens})"
        )
    return texts


def _num_kept(texts: list[CalibrationText], has_answer: list[bool]) -> int:
    return sum(text.num_kept for text in _drop_shared_start(texts, has_answer))


def _within_budget(texts: list[CalibrationText], budget: int) -> list[CalibrationText]:
    chosen: list[CalibrationText] = []
    for text in texts:
        if budget < MIN_ROWS:
            break
        end = text.first_kept + min(text.num_kept, budget)
        chosen.append(replace(text, token_ids=text.token_ids[:end]))
        budget -= chosen[-1].num_kept
    return chosen


def _drop_shared_start(texts: list[CalibrationText], has_answer: list[bool]) -> list[CalibrationText]:
    """Move the first measured position behind the start that all texts without stored answers share."""
    free = [text.token_ids for text, answered in zip(texts, has_answer, strict=True) if not answered]
    if len(free) < 2:
        return texts
    first, last = min(free), max(free)
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    # texts that begin alike to the end of the shorter (repeats of one text) keep their own start.
    if shared is None:
        return texts
    moved = [
        text if answered else replace(text, first_kept=max(text.first_kept, shared))
        for text, answered in zip(texts, has_answer, strict=True)
    ]
    return [text for text in moved if text.num_kept >= MIN_ROWS]


def _rows_of(path: Path, config: ScoreConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        # with or without the mark that some editors put before UTF-8.
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecdecError(f"calibration file ({path}) cannot be read as UTF-8 text: {error}") from error
    if path.suffix != ".jsonl":
        yield from enumerate(_pieces(content, config.max_text_tokens * CHARACTERS_PER_TOKEN), start=1)
        return
    # not splitlines: it also cuts at U+2028 and the like, which JSON strings may hold.
    for line, text in enumerate(content.split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise SpecdecError(f"{path}, line {line}: not JSON ({error.msg})") from error
        if not isinstance(row, dict):
            raise SpecdecError(f"{path}, line {line}: must be a JSON object")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise SpecdecError(f"{path} line {line}: not valid Unicode (a lone surrogate)") from error
        yield line, row


def _pieces(content: str, size: int) -> Iterator[dict[str, Any]]:
    piece = ""
    for paragraph in content.split("\n\n"):
        for part in _parts(paragraph + "\n\n", size):
            piece += part
            if len(piece) >= size:
                yield {"text": piece}
                piece = ""
    if piece.strip():
        yield {"text": piece}


def _parts(paragraph: str, size: int) -> Iterator[str]:
    """The paragraph, or its lines where it is so long that most of it would be cut off, or parts of those."""
    if len(paragraph) < LONG_PARAGRAPH * size:
        yield paragraph
        return
    for line in paragraph.splitlines(keepends=True):
        yield from (line[low : low + size] for low in range(0, len(line), size))


def _ids_of_row(path: Path, line: int, row: dict[str, Any], tokenizer: Any) -> tuple[list[int], int | None]:
    """Token ids of a row, and where its answer starts; None where it has no answer."""
    try:
        if "response_token_ids" in row:
            prompt = _stored_ids(row["prompt_token_ids"])
            return prompt + _stored_ids(row["response_token_ids"]), len(prompt)
        if "messages" in row:
            messages = _turns(row["messages"])
            if tokenizer.chat_template is None:
                return _plain_chat(tokenizer, messages)
            whole = render_chat(tokenizer, messages, add_generation_prompt=False)
            if messages[-1]["role"] != "assistant":
                return whole, None
            return whole, len(render_chat(tokenizer, messages[:-1], add_generation_prompt=True))
        if "text" in row:
            return encode_text(tokenizer, _string(row["text"])), None
        prompt_text = _string(row["turns"][0] if "turns" in row else row["prompt"])
        # a base model is prompted without a template when it serves, too.
        if tokenizer.chat_template is None:
            return encode_text(tokenizer, prompt_text), None
        messages = [{"role": "user", "content": prompt_text}]
        return render_chat(tokenizer, messages, add_generation_prompt=True), None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SpecdecError(
            f"{path}, line {line}: needs prompt, turns, messages, text or stored token ids ({error})"
        ) from error


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{json.dumps(value)[:40]} is not text")
    return value


def _stored_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise TypeError("token ids must be a list of whole numbers from 0")
    return value


def _turns(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        raise TypeError("messages must be a list of turns, each with a role and content")
    if not all(isinstance(turn.get(field), str) for turn in value for field in ("role", "content")):
        raise TypeError("every message must have a string role and content")
    return value


def _plain_chat(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], int | None]:
    """A conversation for a base model, which is prompted without a template when it serves, too."""
    before = "".join(f"{message['content']}\n\n" for message in messages[:-1])
    ids = encode_text(tokenizer, before + messages[-1]["content"])
    if messages[-1]["role"] != "assistant" or not before:
        return ids, None
    return ids, len(encode_text(tokenizer, before))


def texts_hash(texts: list[CalibrationText]) -> str:
    """SHA-256 over ids and measured positions: what was measured, whatever file it came from."""
    content = json.dumps([[text.first_kept, *text.token_ids] for text in texts], separators=(",", ":"))
    return hashlib.sha256(content.encode("ascii")).hexdigest()
