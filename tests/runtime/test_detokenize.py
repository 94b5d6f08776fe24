"""Incremental text: whole characters only, the same text however it is asked for, stop strings exact."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.detokenize import IncrementalDetokenizer

TEXTS = ["the in an", "naïve Ⅷ 你好 🦜🔥", "🦜" * 5, "a\n\n b", "x" + "é" * 9]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("asked_every", [1, 2, 5, 1000])
def test_text_is_that_of_decoding_all_at_once(tiny_tokenizer: Any, text: str, asked_every: int) -> None:
    """A character of four tokens must not show as replacement characters, nor be lost (ByteTok emoji)."""
    ids = tiny_tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tiny_tokenizer, [], ())
    pieces, sent = [], 0
    for number, token in enumerate(ids):
        assert detokenizer.push(token) is False
        if number % asked_every == 0:
            stable = detokenizer.stable_text(finished=False)
            assert "\ufffd" not in stable
            assert text.startswith(stable)
            pieces.append(stable[sent:])
            sent = len(stable)
    detokenizer.flush()
    assert "".join(pieces) + detokenizer.text[sent:] == detokenizer.text == text


def test_an_unfinished_character_at_the_end_is_shown_once_flushed(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer.encode("a🦜", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(tiny_tokenizer, [], ())
    for token in ids:
        detokenizer.push(token)
    assert detokenizer.text == "a"
    detokenizer.flush()
    assert detokenizer.text.startswith("a\ufffd")


def test_a_stop_string_over_several_tokens_is_found_at_its_last_one(tiny_tokenizer: Any) -> None:
    ids = tiny_tokenizer.encode("the end is near", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tiny_tokenizer, [], ("d i", "never"))
    read = next(count for count, token in enumerate(ids, start=1) if detokenizer.push(token))
    assert detokenizer.text == "the en"
    assert tiny_tokenizer.decode(ids[:read]).startswith("the end i")
    assert not tiny_tokenizer.decode(ids[: read - 1]).startswith("the end i")


def test_text_that_may_begin_a_stop_string_is_held_back(tiny_tokenizer: Any) -> None:
    detokenizer = IncrementalDetokenizer(tiny_tokenizer, [], ("</s>",))
    for token in tiny_tokenizer.encode("yes </", add_special_tokens=False):
        detokenizer.push(token)
    assert detokenizer.stable_text(finished=False) == "yes "
    assert detokenizer.stable_text(finished=True) == "yes </"
