"""Which tokens of a rendered chat the model writes: assistant text and its end-of-turn token, nothing else.

Owns both ways to find them. A template with generation markers says so itself. From any other the mask is
derived from prefixes and checked by them: the render up to an assistant turn with the generation prompt, and
the render that includes the turn, must both be prefixes of the whole. A template that rewrites earlier turns
(Qwen3 takes their thoughts out) fails that for these turns: then the last turn alone is trained on. Where it
fails for the last one too, the chat is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.hf import render_chat
from specdec.hf_markers import render_marked_chat
from specdec.train.records import Unusable


class ChatMask(NamedTuple):
    """Ids of a chat, a mask true on what the model writes, and how many of its turns are left unmarked."""

    ids: list[int]
    mask: list[bool]
    left_out: int


def chat_mask(tokenizer: Any, messages: Sequence[dict[str, str]]) -> ChatMask:
    """Render a chat and find what the model writes.

    Raises:
        Unusable: no mask can be derived, or the template's markers leave a turn out.
    """
    ids = render_chat(tokenizer, messages, add_generation_prompt=False)
    special = special_ids(tokenizer)
    marked = render_marked_chat(tokenizer, messages)
    turns = sum(message["role"] == "assistant" for message in messages)
    if marked is not None:
        if marked[0] != ids:
            raise Unusable("the chat template renders otherwise with its generation markers")
        spans = _spans(marked[1])
        if len(spans) != turns:
            raise Unusable(f"the chat template's generation markers give {len(spans)} of {turns} turns")
    else:
        spans = _derived_spans(tokenizer, messages, ids)
    mask = [False] * len(ids)
    for low, high in spans:
        if marked is None:
            stop = _derived_end(ids, low, high, special)
        else:
            stop = _marked_end(tokenizer, ids, low, high, special)
        mask[low:stop] = [True] * (stop - low)
    return ChatMask(ids, mask, turns - len(spans))


def _spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    edges = [place for place in range(len(mask) + 1) if _at(mask, place) != _at(mask, place - 1)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _at(mask: Sequence[int], place: int) -> bool:
    return 0 <= place < len(mask) and bool(mask[place])


def _derived_spans(
    tokenizer: Any, messages: Sequence[dict[str, str]], ids: list[int]
) -> list[tuple[int, int]]:
    """From the end of each generation prompt to the end of the turn, as prefixes of the whole show them."""
    spans: list[tuple[int, int]] = []
    failed = 0
    last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_chat(tokenizer, messages[:index], add_generation_prompt=True)
        until = render_chat(tokenizer, messages[: index + 1], add_generation_prompt=False)
        stable = ids[: len(before)] == before and ids[: len(until)] == until and len(until) > len(before)
        if stable:
            spans.append((len(before), len(until)))
        elif index == last:
            raise Unusable(f"the chat template is not prefix-stable at turn {index + 1}")
        else:
            failed += 1
    # a template that rewrites one earlier turn shows none of them as the model wrote it
    return spans[-1:] if failed else spans


def _derived_end(ids: Sequence[int], low: int, high: int, special: set[int]) -> int:
    """Where a turn's own tokens end: behind its end-of-turn token.

    What follows it (a line break) is the template's, not the model's.
    """
    ends = [place for place in range(low, high) if ids[place] in special]
    return ends[-1] + 1 if ends else high


def _marked_end(tokenizer: Any, ids: list[int], low: int, high: int, special: set[int]) -> int:
    """The same for marked text, which may end just before its end-of-turn token, or behind a line break."""
    end = _derived_end(ids, low, high, special)
    if ids[end - 1] in special and not tokenizer.decode(ids[end:high]).strip():
        return end
    return high + 1 if high < len(ids) and ids[high] in special else high


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of every token that is no text."""
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return added | set(tokenizer.all_special_ids)
