"""Calibration texts: every file form, the right positions, the token budget, errors with line numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecdecError
from specdec.hf import encode_text, render_chat
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.texts import CalibrationText, read_domains, read_texts, texts_hash

CONFIG = ScoreConfig(tokens=10_000)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    return render_chat(tokenizer, [{"role": "user", "content": text}], add_generation_prompt=True)


def test_stored_ids_are_taken_as_they_are_and_only_answers_are_measured(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    row = {"messages": [], "prompt_token_ids": [1, 2, 3], "response_token_ids": [4, 5, 6, 7, 8]}
    path = write_rows(tmp_path / "responses.jsonl", [row])
    assert read_texts(path, tiny_tokenizer, CONFIG) == [
        CalibrationText(token_ids=(1, 2, 3, 4, 5, 6, 7, 8), first_kept=3)
    ]


def test_messages_that_end_with_an_answer_are_measured_on_the_answer(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because of it"}]
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": turns}])
    (text,) = read_texts(path, tiny_tokenizer, CONFIG)
    assert list(text.token_ids) == render_chat(tiny_tokenizer, turns, add_generation_prompt=False)
    assert text.first_kept == len(chat_ids(tiny_tokenizer, "why?"))


@pytest.mark.parametrize("field", ["prompt", "turns"])
def test_prompts_are_rendered_as_chats_and_their_shared_start_is_not_measured(
    tmp_path: Path, tiny_tokenizer: Any, field: str
) -> None:
    """Catches identical states (BOS, system prompt) counted once for every text."""
    words = ["alpha beta", "alpha gamma", "alpha delta and more"]
    rows = [{field: word if field == "prompt" else [word, "second turn"]} for word in words]
    texts = read_texts(write_rows(tmp_path / "prompts.jsonl", rows), tiny_tokenizer, CONFIG)
    assert sorted(text.token_ids for text in texts) == sorted(
        tuple(chat_ids(tiny_tokenizer, word)) for word in words
    )
    shared = len(chat_ids(tiny_tokenizer, "alpha beta")) - len("beta") - 2
    assert {text.first_kept for text in texts} == {shared}


def test_repeats_of_one_text_are_measured_from_their_own_start(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write_rows(tmp_path / "same.jsonl", [{"text": "one and the same"}] * 3)
    assert [text.first_kept for text in read_texts(path, tiny_tokenizer, CONFIG)] == [1, 1, 1]


def test_plain_text_is_cut_into_pieces_that_each_start_with_one_bos(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"{i} paragraph of the book" for i in range(30)))
    config = ScoreConfig(tokens=10_000, max_text_tokens=40)
    texts = read_texts(path, tiny_tokenizer, config)
    assert len(texts) > 3
    assert all(text.token_ids.count(tiny_tokenizer.bos_token_id) == 1 for text in texts)
    assert max(len(text.token_ids) for text in texts) == 40
    assert all(text.first_kept == 1 for text in texts)


def test_texts_stop_exactly_at_the_token_budget(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write_rows(tmp_path / "many.jsonl", [{"text": f"{i}: some words to measure"} for i in range(200)])
    texts = read_texts(path, tiny_tokenizer, ScoreConfig(tokens=500))
    assert 500 - 4 < sum(text.num_kept for text in texts) <= 500


def test_order_and_hash_follow_the_seed(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write_rows(tmp_path / "many.jsonl", [{"text": f"{i}: some words"} for i in range(50)])
    first = read_texts(path, tiny_tokenizer, ScoreConfig(tokens=200, seed=1))
    assert first == read_texts(path, tiny_tokenizer, ScoreConfig(tokens=200, seed=1))
    other = read_texts(path, tiny_tokenizer, ScoreConfig(tokens=200, seed=2))
    assert texts_hash(first) != texts_hash(other)


def test_a_line_separator_inside_a_string_does_not_end_the_row(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Catches str.splitlines, which also cuts at U+2028."""
    path = write_rows(tmp_path / "odd.jsonl", [{"text": "one\u2028two"}])
    (text,) = read_texts(path, tiny_tokenizer, CONFIG)
    assert list(text.token_ids) == encode_text(tiny_tokenizer, "one\u2028two")


def test_a_target_without_a_chat_template_is_given_plain_prompts(tmp_path: Path, tiny_tokenizer: Any) -> None:
    template, tiny_tokenizer.chat_template = tiny_tokenizer.chat_template, None
    try:
        path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "tell me"}])
        (text,) = read_texts(path, tiny_tokenizer, CONFIG)
        assert list(text.token_ids) == encode_text(tiny_tokenizer, "tell me")
        chat = [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": "no, not today"}]
        (text,) = read_texts(
            write_rows(tmp_path / "chats.jsonl", [{"messages": chat}]), tiny_tokenizer, CONFIG
        )
        assert list(text.token_ids) == encode_text(tiny_tokenizer, "tell me\n\nno, not today")
        assert text.first_kept == len(encode_text(tiny_tokenizer, "tell me\n\n"))
    finally:
        tiny_tokenizer.chat_template = template


def test_rows_carry_their_domain_and_files_give_one_to_rows_without(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    rows = [{"text": "some prose here", "domain": "prose"}, {"text": "x = 1 + 2 * 3"}]
    path = write_rows(tmp_path / "mixed.jsonl", rows)
    plain = read_texts(path, tiny_tokenizer, CONFIG)
    assert sorted(text.domain for text in plain) == ["", "prose"]
    coded = read_texts(path, tiny_tokenizer, CONFIG, domain="code")
    assert sorted(text.domain for text in coded) == ["code", "prose"]
    # a domain is a label: what is measured, and its hash, stay the same.
    assert texts_hash(plain) == texts_hash(coded)


def test_every_domain_gets_an_equal_part_of_the_budget(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Catches a large file that crowds the others out."""
    sources = {}
    for domain, count in (("prose", 400), ("maths", 60)):
        rows = [{"text": f"{domain} {i}: {i} and {i * 3} are numbers"} for i in range(count)]
        sources[domain] = write_rows(tmp_path / f"{domain}.jsonl", rows)
    texts = read_domains(sources, tiny_tokenizer, ScoreConfig(tokens=1000))
    measured = {domain: sum(text.num_kept for text in texts if text.domain == domain) for domain in sources}
    assert list(dict.fromkeys(text.domain for text in texts)) == ["prose", "maths"]
    assert all(500 - 4 < tokens <= 500 for tokens in measured.values())
    with pytest.raises(SpecdecError, match="at least one file"):
        read_domains({}, tiny_tokenizer, CONFIG)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no text"),
        ('{"prompt": "fine"}\n{broken\n', "line 2: not JSON"),
        ("[1, 2]\n", "line 1: must be a JSON object"),
        ('\n{"question": "?"}\n', "line 2: needs prompt, turns, messages"),
        ('{"turns": []}\n', "line 1: needs"),
        ('{"messages": []}\n', "line 1: needs"),
        ('{"messages": [{"role": "user", "content": null}]}\n', "line 1.*string role and content"),
        ('{"text": ""}\n', "no text with 4 measured positions"),
        ('{"text": null}\n', "line 1.*null is not text"),
        ('{"prompt": ["a", "b"]}\n', "line 1.*is not text"),
        ('{"messages": "hello"}\n', "line 1.*list of turns"),
        ('{"messages": ["hello"]}\n', "line 1.*list of turns"),
        ('{"prompt_token_ids": [1], "response_token_ids": "234567"}\n', "line 1.*list of whole numbers"),
        (
            '{"prompt_token_ids": [1.5], "response_token_ids": [2, 3, 4, 5]}\n',
            "line 1.*list of whole numbers",
        ),
        ('{"prompt_token_ids": [1], "response_token_ids": [-2, 3, 4, 5]}\n', "line 1.*list of whole numbers"),
    ],
)
def test_files_without_usable_texts_are_errors_that_say_where(
    tmp_path: Path, tiny_tokenizer: Any, content: str, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(SpecdecError, match=message):
        read_texts(path, tiny_tokenizer, CONFIG)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = tmp_path / "marked.jsonl"
    path.write_text('{"text": "some words"}\n', encoding="utf-8-sig")
    (text,) = read_texts(path, tiny_tokenizer, CONFIG)
    assert list(text.token_ids) == encode_text(tiny_tokenizer, "some words")


@pytest.mark.parametrize("separator", ["\n", " "])
def test_a_file_without_blank_lines_is_measured_beyond_its_first_piece(
    tmp_path: Path, tiny_tokenizer: Any, separator: str
) -> None:
    path = tmp_path / "log.txt"
    path.write_text(separator.join(f"line {i} says something" for i in range(200)))
    config = ScoreConfig(tokens=1000, max_text_tokens=50)
    assert sum(text.num_kept for text in read_texts(path, tiny_tokenizer, config)) == 1000


def test_a_budget_below_four_positions_a_file_is_refused(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = write_rows(tmp_path / "some.jsonl", [{"text": f"{i} words to measure"} for i in range(9)])
    with pytest.raises(SpecdecError, match=r"tokens \(7\) must be at least 8, 4 for each of the 2"):
        read_domains({"prose": path, "code": path}, tiny_tokenizer, ScoreConfig(tokens=7))


def test_a_binary_file_is_an_error_naming_it(tmp_path: Path, tiny_tokenizer: Any) -> None:
    path = tmp_path / "picture.txt"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(SpecdecError, match=r"picture\.txt.*UTF-8"):
        read_texts(path, tiny_tokenizer, CONFIG)


def test_half_a_character_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "lone.jsonl"
    path.write_text('{"text": "whole"}\n{"text": "lone \\ud83d surrogate"}\n')
    with pytest.raises(SpecdecError, match=r"lone\.jsonl line 2: not valid Unicode"):
        read_texts(path, None, ScoreConfig())
