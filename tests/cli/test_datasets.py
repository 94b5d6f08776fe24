"""The shipped prompt sets are whole, and foreign files are read or refused with their line named."""

import json
from pathlib import Path

import pytest

from specdec.cli.datasets import CORPORA, PROMPT_SETS, load_prompts, prompt_file, text_file
from specdec.errors import SpecdecError
from specdec.provenance import sha256_file

ROWS = {
    "mt_bench": 80,
    "gsm8k": 500,
    "humaneval": 164,
    "mbpp": 200,
    "instruct": 399,
    "arena_hard": 493,
    "dolly": 133,
    "six_tasks": 480,
    "dev": 300,
    "train": 8856,
    "train_synthetic": 6251,
}


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_every_shipped_set_reads_whole(name: str) -> None:
    """Catches a line cut at U+2028 or U+0085, which str.splitlines takes for a line end."""
    assert len(load_prompts(name)) == ROWS[name]


@pytest.mark.parametrize("path", [*PROMPT_SETS.values(), *CORPORA.values()], ids=lambda path: path.name)
def test_every_shipped_file_has_the_hash_its_readme_gives(path: Path) -> None:
    readme = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"{sha256_file(path)}  {path.name}" in readme


def test_subsets_name_only_prompts_that_exist() -> None:
    """Catches a subset list that fell out of step with the set it selects from."""
    lists = json.loads((PROMPT_SETS["mt_bench"].parent / "subsets.json").read_text())
    known = {prompt.id for name in ("gsm8k", "humaneval") for prompt in load_prompts(name)}
    assert all(set(ids) <= known and len(ids) == 80 for ids in lists.values())


def test_no_training_prompt_is_a_benchmark_prompt() -> None:
    benches = set(PROMPT_SETS) - {"train", "train_synthetic"}
    asked = {
        turn.strip().lower() for name in benches for prompt in load_prompts(name) for turn in prompt.turns
    }
    trained = {
        load.turns[0].strip().lower() for name in ("train", "train_synthetic") for load in load_prompts(name)
    }
    assert not asked & trained


def test_both_row_forms_and_plain_text_are_read(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "one"}\n\n{"question_id": 7, "category": "qa", "turns": ["two", "three"]}\n')
    first, second = load_prompts(str(rows))
    assert (first.id, first.turns) == ("1", ("one",))
    assert (second.id, second.category, second.turns) == ("7", "qa", ("two", "three"))
    lines = tmp_path / "b.txt"
    lines.write_text("first\n\n second \n")
    assert [prompt.turns for prompt in load_prompts(str(lines))] == [("first",), ("second",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json\n", "line 1 is not valid JSON"),
        ("[1]\n", "line 1 must be a JSON object"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2 must have 'prompt'"),
        ('{"turns": []}\n', "line 1 must have 'prompt'"),
        ('{"turns": ["a", 3]}\n', "line 1: every turn must be a string"),
        ('{"prompt": "  "}\n', "line 1: every turn must be a string that is not empty"),
        ('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n', "line 2: id (1) occurs twice"),
        ("\n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": "lone \\ud83d surrogate"}\n', "bad.jsonl line 2: not valid Unicode"),
        ('{"turns": ["a", "\\ude00"]}\n', "bad.jsonl line 1: not valid Unicode"),
        ('{"id": "\\ud83d", "prompt": "a"}\n', "bad.jsonl line 1: not valid Unicode"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(SpecdecError) as caught:
        load_prompts(str(path))
    assert message in str(caught.value)
    assert "bad.jsonl" in str(caught.value)


def test_a_pair_of_surrogates_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "pair.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert load_prompts(str(path))[0].turns == ("\U0001f600",)


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"\xe9t\xe9\n")
    with pytest.raises(SpecdecError, match="not UTF-8"):
        load_prompts(str(path))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SpecdecError) as caught:
        prompt_file("mt_bnech")
    assert all(name in str(caught.value) for name in ("mt_bnech", "mt_bench", "gsm8k", "six_tasks"))
    with pytest.raises(SpecdecError, match="pride_and_prejudice"):
        text_file("pride")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a,b\n")
    with pytest.raises(SpecdecError, match=r"must be a \.jsonl or \.txt"):
        prompt_file(str(path))
