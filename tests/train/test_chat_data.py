"""Conversations, their masks, and what is dropped with which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecdecError
from specdec.hf import render_chat
from specdec.train.chat_data import chat_mask, load_chat_data

CHATML = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' if m.role == 'assistant' "
    "else '<|system|>' }}{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
GEMMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}<|eot|>\n{% endfor %}{% if add_generation_prompt %}<|user|>model\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "second"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "third"},
]
VOCAB = 512


def _write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def _load(path: Path, tokenizer: Any, max_length: int = 2048) -> Any:
    return load_chat_data(path, tokenizer, max_length=max_length, vocab_size=VOCAB)


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE, GEMMA_LIKE])
def test_the_mask_covers_answers_and_their_end_of_turn_and_nothing_else(
    template: str, tiny_tokenizer: Any
) -> None:
    """Templates without generation markers: libraries then fall back to an all-zero or all-one mask."""
    kept = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = template
    try:
        ids, mask = chat_mask(tiny_tokenizer, TALK)
    finally:
        tiny_tokenizer.chat_template = kept
    spans, current = [], []
    for token, on in zip(ids, mask, strict=True):
        if on:
            current.append(token)
        elif current:
            spans.append(tiny_tokenizer.decode(current))
            current = []
    if current:
        spans.append(tiny_tokenizer.decode(current))
    assert spans == ["first<|eot|>", "second<|eot|>", "third<|eot|>"]


def test_the_generation_prompt_with_the_answer_is_a_prefix_of_the_training_ids(tiny_tokenizer: Any) -> None:
    """Trainer and server render alike: acceptance fell from 60 to 25 percent where they did not."""
    ids, mask = chat_mask(tiny_tokenizer, TALK)
    prompt = render_chat(tiny_tokenizer, TALK[:-1], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt
    assert all(mask[len(prompt) :])
    assert ids.count(tiny_tokenizer.bos_token_id) == 1


def test_a_system_turn_and_three_exchanges_all_survive(tiny_tokenizer: Any, tmp_path: Path) -> None:
    record = {"messages": [{"role": "system", "content": "rules"}, *TALK]}
    data = _load(_write(tmp_path / "d.jsonl", [record]), tiny_tokenizer)
    (sequence,) = data.sequences
    text = tiny_tokenizer.decode(sequence.token_ids)
    places = [text.index(word) for word in ("rules", "one", "first", "two", "second", "three", "third")]
    assert places == sorted(places)
    starts = [a and not b for a, b in zip(sequence.assistant_mask[1:], sequence.assistant_mask, strict=False)]
    assert sum(starts) == 3


def test_odd_records_are_dropped_each_with_its_line_and_reason(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Catches one odd conversation that kills preprocessing, or is silently cut: SpecForge #216."""
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    records = [
        {"messages": []},
        {"messages": [answer, user]},
        {"messages": [user, user, answer]},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [user, {"role": "tool", "content": "t"}]},
        {"messages": [user, {"role": "assistant"}]},
        {"messages": [user, {"role": "assistant", "content": None}]},
        {"messages": [user, answer]},
        "not json",
        [1, 2],
        {"id": "no messages"},
        {"messages": [user]},
    ]
    data = _load(_write(tmp_path / "d.jsonl", records), tiny_tokenizer)
    assert len(data.sequences) == 1
    assert data.sequences[0].id == "line-8"
    reasons = {item.line: item.reason for item in data.dropped}
    assert sorted(reasons) == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]
    assert reasons[2].startswith("a assistant turn where a user turn belongs")
    assert reasons[4] == "only a system turn"
    assert "'tool'" in reasons[5]
    assert reasons[6] == reasons[7] == "content is missing or not text"
    assert reasons[12] == "no assistant turn"


def test_a_template_that_rewrites_earlier_turns_is_dropped_not_guessed(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    kept = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = "{{ messages|length }}" + kept
    try:
        with pytest.raises(SpecdecError, match=r"1 of 1 samples have no trainable token.*not prefix-stable"):
            _load(_write(tmp_path / "d.jsonl", [{"messages": TALK}]), tiny_tokenizer)
    finally:
        tiny_tokenizer.chat_template = kept


def test_truncation_that_leaves_nothing_to_train_aborts_with_the_count(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Catches a mask checked before truncation: loss 0.00 for the whole run, no error (marin #7237)."""
    long = [
        {
            "messages": [
                {"role": "user", "content": f"{i}" + "x " * 200},
                {"role": "assistant", "content": "ok"},
            ]
        }
        for i in range(8)
    ]
    with pytest.raises(SpecdecError, match="8 of 8 samples have no trainable token"):
        _load(_write(tmp_path / "d.jsonl", long), tiny_tokenizer, max_length=64)
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]}
    data = _load(_write(tmp_path / "d.jsonl", [*long[:7], good]), tiny_tokenizer, max_length=64)
    assert len(data.sequences) == 1
    assert sum(data.dropped_reasons().values()) == 7


def test_given_token_ids_are_used_as_they_are(tiny_tokenizer: Any, tmp_path: Path) -> None:
    record = {"id": "r", "messages": TALK, "prompt_token_ids": [9, 8, 7], "response_token_ids": [5, 5, 6]}
    (sequence,) = _load(_write(tmp_path / "d.jsonl", [record]), tiny_tokenizer).sequences
    assert sequence.token_ids == (9, 8, 7, 5, 5, 6)
    assert sequence.assistant_mask == (False, False, False, True, True, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"response_token_ids": []}, "response_token_ids is empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"response_token_ids": [1, 512]}, "outside the target's vocabulary"),
        ({"response_token_ids": "abc"}, "not a list"),
        ({"prompt_token_ids": [1, True]}, "not a list of whole numbers"),
    ],
)
def test_bad_token_ids_are_dropped_by_field(
    change: dict[str, Any], words: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    good = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}
    data = _load(_write(tmp_path / "d.jsonl", [good, {**good, **change}]), tiny_tokenizer)
    assert [item.line for item in data.dropped] == [2]
    assert words in data.dropped[0].reason


def test_a_repeated_text_is_trained_once(tiny_tokenizer: Any, tmp_path: Path) -> None:
    record = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}
    data = _load(_write(tmp_path / "d.jsonl", [record, record]), tiny_tokenizer)
    assert len(data.sequences) == 1
    assert data.dropped[0].reason == "same text as an earlier record"


def test_a_missing_or_empty_file_is_named(tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"none\.jsonl"):
        _load(tmp_path / "none.jsonl", tiny_tokenizer)
    with pytest.raises(SpecdecError, match="the file is empty"):
        _load(_write(tmp_path / "d.jsonl", []), tiny_tokenizer)
