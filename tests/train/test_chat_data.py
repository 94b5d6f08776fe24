"""Conversations, their masks, and what is dropped with which reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecdecError
from specdec.hf import render_chat
from specdec.train import chat_data, token_cache
from specdec.train.chat_data import load_chat_data
from specdec.train.masks import chat_mask

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
# the end of turn inside the marked block, with the line break behind it, and just outside of it
MARKED_INSIDE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|eot|>\n{% endgeneration %}{% else %}{{ m.content }}<|eot|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED_OUTSIDE = (
    "{{ messages|length }}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}{%- endgeneration -%}{% else %}{{ m.content }}{% endif %}"
    "<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# takes the thoughts of earlier turns out, as Qwen3's does
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}think {% endif %}{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
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


@pytest.fixture
def with_template(tiny_tokenizer: Any) -> Iterator[Callable[[str], Any]]:
    """Call with a template: the tokenizer with it, until the test ends."""
    kept = tiny_tokenizer.chat_template

    def put(template: str) -> Any:
        tiny_tokenizer.chat_template = template
        return tiny_tokenizer

    yield put
    tiny_tokenizer.chat_template = kept


def _spans(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[str]:
    """The marked texts, in order."""
    spans, current = [], []
    for token, on in zip([*ids, -1], [*mask, False], strict=True):
        if on:
            current.append(token)
        elif current:
            spans.append(tokenizer.decode(current))
            current = []
    return spans


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE, GEMMA_LIKE, MARKED_INSIDE, MARKED_OUTSIDE])
def test_the_mask_covers_answers_and_their_end_of_turn_and_nothing_else(
    template: str, with_template: Callable[[str], Any]
) -> None:
    """Without generation markers libraries fall back to an all-zero or all-one mask; ours is derived."""
    tokenizer = with_template(template)
    ids, mask, left_out = chat_mask(tokenizer, TALK)
    assert _spans(tokenizer, ids, mask) == ["first<|eot|>", "second<|eot|>", "third<|eot|>"]
    assert left_out == 0


def test_a_template_that_rewrites_earlier_answers_is_trained_on_the_last_one_and_that_is_counted(
    with_template: Callable[[str], Any], tmp_path: Path
) -> None:
    """Catches losing every chat of more than one turn, and training on text the model never writes."""
    tokenizer = with_template(THINKING)
    ids, mask, left_out = chat_mask(tokenizer, TALK)
    assert _spans(tokenizer, ids, mask) == ["think third<|eot|>"]
    assert left_out == 2
    data = _load(_write(tmp_path / "d.jsonl", [{"messages": TALK}, {"messages": TALK[:2]}]), tokenizer)
    assert (len(data.sequences), data.partly_trained) == (2, 1)


def test_markers_that_leave_a_turn_out_are_refused(
    with_template: Callable[[str], Any], tmp_path: Path
) -> None:
    template = MARKED_INSIDE.replace("m.role == 'assistant'", "m.role == 'assistant' and not loop.first")
    template = template.replace("not loop.first", "loop.index0 > 2")
    with pytest.raises(SpecdecError, match="generation markers give 2 of 3 turns"):
        _load(_write(tmp_path / "d.jsonl", [{"messages": TALK}]), with_template(template))


def test_the_generation_prompt_with_the_answer_is_a_prefix_of_the_training_ids(tiny_tokenizer: Any) -> None:
    """Trainer and server render alike: acceptance fell from 60 to 25 percent where they did not."""
    ids, mask, _ = chat_mask(tiny_tokenizer, TALK)
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


def test_the_other_spellings_of_a_chat_give_the_same_ids(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """ShareGPT's names, and a prompt with its answer; a prompt alone says how it gets one."""
    user, answer = TALK[:2]
    records = [
        {"messages": [user, answer]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "first"}]},
        {"prompt": "one", "response": "first"},
        {"prompt": "one"},
        {"conversations": [{"from": 3, "value": "one"}]},
    ]
    found = []
    for place, record in enumerate(records[:3]):
        (sequence,) = _load(_write(tmp_path / f"{place}.jsonl", [record]), tiny_tokenizer).sequences
        found.append((sequence.token_ids, sequence.assistant_mask))
    assert found[0] == found[1] == found[2]
    data = _load(_write(tmp_path / "d.jsonl", records), tiny_tokenizer)
    assert [item.line for item in data.dropped] == [2, 3, 4, 5]
    assert "specdec regenerate" in data.dropped[2].reason
    assert "role 3" in data.dropped[3].reason


def test_plain_texts_are_taken_in_pieces_of_which_every_token_but_the_first_is_trained(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    text = "a plain text\nof two lines " * 6
    (tmp_path / "book.txt").write_text(text)
    from_text = _load(tmp_path / "book.txt", tiny_tokenizer, max_length=50).sequences
    from_json = _load(_write(tmp_path / "d.jsonl", [{"text": text}]), tiny_tokenizer, max_length=50).sequences
    assert [s.token_ids for s in from_text] == [s.token_ids for s in from_json]
    ids = [token for sequence in from_text for token in sequence.token_ids]
    assert ids[0] == tiny_tokenizer.bos_token_id
    assert ids.count(tiny_tokenizer.bos_token_id) == 1
    assert tiny_tokenizer.decode(ids[1:]) == text
    assert {len(sequence.token_ids) for sequence in from_text[:-1]} == {50}
    for sequence in from_text:
        assert sequence.assistant_mask == (False, *[True] * (len(sequence.token_ids) - 1))
    assert [sequence.id for sequence in from_text[:2]] == ["line-1#0", "line-1#1"]
    with pytest.raises(SpecdecError, match="text is empty"):
        _load(_write(tmp_path / "d.jsonl", [{"text": " "}]), tiny_tokenizer)


def test_a_large_file_is_tokenised_once_for_each_template_tokenizer_and_option(
    with_template: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is used only where content, template, tokenizer and options are equal, and mended if broken."""
    monkeypatch.setattr(token_cache, "MIN_BYTES", 0)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    asked: list[int] = []
    real = chat_data.parse_record

    def counted(line: str, number: int) -> Any:
        asked.append(number)
        return real(line, number)

    monkeypatch.setattr(chat_data, "parse_record", counted)
    # it gets a token more, which others must not see
    tokenizer = copy.deepcopy(with_template(CHATML))
    path = _write(
        tmp_path / "d.jsonl", [{"messages": TALK, "category": "c"}, {"messages": []}, {"text": "so"}]
    )

    def load(**options: Any) -> tuple[Any, int]:
        asked.clear()
        return _load(path, tokenizer, **options), len(asked)

    made, records = load()
    assert records == 3
    again, records = load()
    assert (again, records) == (made, 0)
    assert load(max_length=20)[1] == 3
    tokenizer.chat_template = GEMMA_LIKE
    assert load()[1] == 3
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert load()[1] == 3
    for kept in (tmp_path / "home" / "tokens").iterdir():
        kept.write_bytes(kept.read_bytes()[:50])
    assert load()[1] == 3
    path.write_text(path.read_text().replace("first", "other"))
    assert load()[1] == 3


def test_a_chat_that_the_template_refuses_is_dropped_alone(
    with_template: Callable[[str], Any], tmp_path: Path
) -> None:
    """Gemma's template raises on a system turn; the chats without one are trained on."""
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML
    )
    records = [{"messages": [{"role": "system", "content": "s"}, *TALK]}, {"messages": TALK}]
    data = _load(_write(tmp_path / "d.jsonl", records), with_template(refusing))
    assert len(data.sequences) == 1
    assert "no system turns" in data.dropped[0].reason
