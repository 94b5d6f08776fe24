"""Records of training data as their files hold them: chats, prompts with answers, plain texts, token ids.

Owns the spellings that people publish data in and their one form inside: a record has `messages`, `text`, or
token ids. Nothing is tokenised here. What cannot be used is a reason, never an exception of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.train.streamed_sets import is_streamed, local_copy

ROLES = ("system", "user", "assistant")
# ShareGPT's words for them
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
_ANSWERS = ("response", "completion", "answer")


class Unusable(Exception):
    """A record that cannot be trained on; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One record: token ids, checked turns, or a plain text; one of the three is there."""

    id: str
    category: str
    token_ids: tuple[Any, Any] | None = None
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None


def data_file(spelling: str | Path) -> Path:
    """The file behind a spelling of `--data`: itself, or the local copy of a streamed set.

    Raises:
        SpecdecError: no file of that name, or a set that cannot be had.
    """
    if is_streamed(str(spelling)):
        return local_copy(str(spelling))
    path = Path(spelling)
    if not path.is_file():
        raise SpecdecError(f"--data ({path}) is not a file")
    return path


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that hold something, with their numbers from 1; of a .txt, the whole text as one.

    Raises:
        SpecdecError: a file that cannot be read.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecdecError(f"--data ({path}) cannot be read: {error}") from error
    if path.suffix == ".txt":
        if content.strip():
            yield 1, json.dumps({"text": content})
        return
    # not splitlines: it also cuts at U+2028 and the like, which JSON strings may hold
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield number, line


def parse_record(line: str, number: int) -> Record:
    """Read a JSON line.

    Raises:
        Unusable: with the reason.
    """
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise Unusable("not valid JSON") from error
    if not isinstance(raw, dict):
        raise Unusable("not a JSON object")
    name = raw.get("id")
    record = Record(
        id=name if isinstance(name, str) else f"line-{number}", category=str(raw.get("category") or "")
    )
    if "response_token_ids" in raw:
        return replace(record, token_ids=(raw.get("prompt_token_ids"), raw["response_token_ids"]))
    if raw.get("messages") is None and raw.get("conversations") is None:
        if "text" in raw:
            if not isinstance(raw["text"], str) or not raw["text"].strip():
                raise Unusable("text is empty or not text")
            return replace(record, text=raw["text"])
        if "prompt" in raw:
            return replace(record, messages=tuple(checked_turns(_answered(raw))))
    return replace(record, messages=tuple(checked_turns(turns_of(raw))))


def _answered(raw: dict[str, Any]) -> list[dict[str, Any]]:
    answer = next((raw[key] for key in _ANSWERS if raw.get(key) is not None), None)
    if answer is None:
        raise Unusable("a prompt without an answer (specdec regenerate writes answers)")
    return [{"role": "user", "content": raw["prompt"]}, {"role": "assistant", "content": answer}]


def turns_of(raw: dict[str, Any]) -> Any:
    """The turns of a record in our spelling, unchecked; None where it has none."""
    listed = raw.get("messages")
    if listed is None:
        listed = raw.get("conversations")
    if not isinstance(listed, list):
        return listed
    turns = []
    for item in listed:
        if isinstance(item, dict) and "role" not in item and "from" in item:
            role = item["from"]
            known = _OTHER_ROLES.get(role, role) if isinstance(role, str) else role
            item = {"role": known, "content": item.get("value")}
        turns.append(item)
    return turns


def checked_turns(messages: Any) -> list[dict[str, str]]:
    """Turns, checked by role and order; a last one of the user's is left off.

    Raises:
        Unusable: with the reason.
    """
    if messages is None:
        raise Unusable("no messages")
    if not isinstance(messages, list) or not messages:
        raise Unusable("messages is empty or not a list")
    turns: list[dict[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise Unusable(f"role {role!r} is not one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise Unusable("content is missing or not text")
        turns.append({"role": message["role"], "content": message["content"]})
    talk = turns[1:] if turns[0]["role"] == "system" else turns
    if not talk:
        raise Unusable("only a system turn")
    expected = ("user", "assistant")
    for index, turn in enumerate(talk):
        if turn["role"] != expected[index % 2]:
            raise Unusable(f"a {turn['role']} turn where a {expected[index % 2]} turn belongs")
    if len(talk) < 2:
        raise Unusable("no assistant turn")
    return turns if talk[-1]["role"] == "assistant" else turns[:-1]
