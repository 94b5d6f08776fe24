"""Sets of the datasets library: one local copy, taken once, of the fields that training knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.datasets import load_prompts
from specdec.errors import SpecdecError
from specdec.train.chat_data import load_chat_data
from specdec.train.records import data_file
from specdec.train.streamed_sets import local_copy, parse_streamed

datasets = pytest.importorskip("datasets", reason="the extra [data] is not installed")
ROWS = [
    {
        "messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"say {i}"}],
        "score": 0.5 * i,
    }
    for i in range(7)
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "home"


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "set" / "train.parquet")
    return tmp_path / "set"


def test_a_set_is_copied_once_and_trained_like_a_file(
    parquet: Path, home: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    streamed = load_chat_data(f"hf:{parquet},limit=5", tiny_tokenizer, max_length=64, vocab_size=512)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))
    file = load_chat_data(tmp_path / "d.jsonl", tiny_tokenizer, max_length=64, vocab_size=512)
    assert [s.token_ids for s in streamed.sequences] == [s.token_ids for s in file.sequences]
    assert [s.id for s in streamed.sequences[:2]] == ["row-0", "row-1"]
    (copy,) = (home / "datasets").iterdir()
    assert data_file(f"hf:{parquet},limit=5") == copy
    lines = [json.loads(line) for line in copy.read_text().splitlines()]
    assert len(lines) == 5
    assert all(line.keys() == {"messages", "id"} for line in lines)


def test_the_questions_of_a_set_can_be_answered_anew(parquet: Path) -> None:
    prompts = load_prompts(f"hf:{parquet},limit=3")
    assert [(prompt.id, prompt.turns) for prompt in prompts] == [
        (f"row-{i}", (f"ask {i}",)) for i in range(3)
    ]


def test_another_limit_split_or_content_is_another_copy(parquet: Path) -> None:
    first = local_copy(f"hf:{parquet},limit=2")
    assert local_copy(f"hf:{parquet},limit=3") != first
    assert local_copy(f"hf:{parquet / 'train.parquet'},limit=2") != first
    datasets.Dataset.from_list(ROWS[::-1]).to_parquet(parquet / "train.parquet")
    again = local_copy(f"hf:{parquet},limit=2")
    assert again != first
    assert "ask 6" in again.read_text()


def test_what_cannot_be_had_is_refused_and_leaves_no_copy(parquet: Path, home: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"hf:.*nowhere.*cannot be loaded"):
        local_copy(f"hf:{tmp_path / 'nowhere'}")
    with pytest.raises(SpecdecError, match="cannot be loaded"):
        local_copy(f"hf:{parquet},split=validation")
    datasets.Dataset.from_list([{"image": "x", "label": 1}]).to_parquet(parquet / "train.parquet")
    with pytest.raises(SpecdecError, match="has the fields image, label, and none of messages"):
        local_copy(f"hf:{parquet}")
    assert not list((home / "datasets").glob("*"))


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("hf:", "must be hf:NAME"),
        ("hf:a,limit=0", r"limit \(0\)"),
        ("hf:a,limit=x", r"limit \(x\)"),
        ("hf:a,rows=3", r"\(rows=3\) must be config="),
        ("hf:a,split=", r"\(split=\)"),
        ("hf:a,limit=1,limit=2", "each once"),
    ],
)
def test_a_wrong_spelling_is_refused(spelling: str, words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        parse_streamed(spelling)


def test_a_spelling_is_read_by_its_parts() -> None:
    found = parse_streamed("hf:org/set,config=en,split=train_sft,limit=100")
    assert vars(found) == {"name": "org/set", "config": "en", "split": "train_sft", "limit": 100}
