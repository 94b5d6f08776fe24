"""The published schemas: sound themselves, true of all files in results/ and of what commands write today."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from specdec.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = sorted((ROOT / "cli" / "schemas").glob("*.schema.json"))
Check = Callable[[dict[str, Any]], None]


def kept_records() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every record in results/ and beside the shipped draft, with where it stands."""
    for folder in (ROOT / "results", ROOT / "drafts" / "pretrained"):
        for path in sorted(folder.rglob("*.json")):
            body = json.loads(path.read_text())
            if isinstance(body, dict) and str(body.get("schema", "")).startswith("specdec."):
                yield str(path.relative_to(ROOT)), body
        for path in sorted(folder.rglob("arms.jsonl.xz")):
            with lzma.open(path, "rt") as lines:
                for number, line in enumerate(lines, start=1):
                    yield f"{path.relative_to(ROOT)} line {number}", json.loads(line)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_every_schema_is_one_and_is_named_after_its_records(path: Path) -> None:
    schema = json.loads(path.read_text())
    Draft202012Validator.check_schema(schema)
    name, _, version = schema["$id"].removeprefix("specdec.").partition("/")
    newest = path.name == f"{name}.schema.json"
    assert newest or path.name == f"{name}-{version}.schema.json"
    assert schema["properties"]["schema"]["const"] == schema["$id"]
    assert schema["title"]
    assert schema["description"]


def test_every_record_in_results_follows_its_schema(valid_record: Check) -> None:
    """Catches a field that was renamed or dropped while records with the old one are kept and read."""
    found = 0
    for place, body in kept_records():
        try:
            valid_record(body)
        except ValidationError as error:
            pytest.fail(f"{place}: {error.json_path}: {error.message}")
        found += 1
    assert found > 30


@pytest.mark.parametrize("name", ["audit/float32/audit.json", "sweep/sweep.json", "bench_served_batch8.json"])
def test_a_wrong_record_is_refused(name: str, valid_record: Check) -> None:
    """A schema that accepts anything would pass every test above."""
    [folder] = [path for path in (ROOT / "results").iterdir() if (path / name).exists()]
    body = json.loads((folder / name).read_text())
    valid_record(body)
    for change in ({"target": None}, {"made_up_field": 1}, {"run": {"schema": "specdec.run/1"}}):
        with pytest.raises(ValidationError):
            valid_record({**body, **change})


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": f"p{i}", "category": "ab"[i % 2], "prompt": f"say {i} the in an the in an"} for i in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("more", [[], ["--simulate-acceptance", "1.5", "--shape", "chain:2"]])
def test_what_bench_writes_follows_its_schema(
    more: list[str], tiny_llama: Path, prompts: Path, tmp_path: Path, valid_record: Check
) -> None:
    out = tmp_path / "bench.json"
    words = ["bench", str(tiny_llama), "--data", str(prompts), "--draft", "ngram", "--max-tokens", "12"]
    assert main([*words, "--repeats", "2", "--out", str(out), *more]) == 0
    valid_record(written(out))


def test_what_audit_writes_follows_its_schema(
    tiny_llama: Path, prompts: Path, tmp_path: Path, valid_record: Check
) -> None:
    words = ["audit", str(tiny_llama), "--data", str(prompts), "--out", str(tmp_path), "--levels", "C2,C4"]
    assert main([*words, "--limit", "3", "--max-tokens", "8"]) == 0
    valid_record(written(tmp_path / "audit.json"))


def test_what_sweep_writes_follows_its_schema(tiny_llama: Path, tmp_path: Path, valid_record: Check) -> None:
    words = ["sweep", str(tiny_llama), "--tasks", "easy", "--task-limit", "3", "--max-tokens", "6", "--lossy"]
    assert main([*words, "--rule", "exact", "--rule", "min-p-gate", "--out", str(tmp_path)]) == 0
    valid_record(written(tmp_path / "sweep.json"))


def test_what_select_layers_and_regenerate_write_follows_their_schemas(
    tiny_llama: Path, prompts: Path, tmp_path: Path, valid_record: Check
) -> None:
    out, answers = tmp_path / "selection.json", tmp_path / "answers.jsonl"
    words = ["select-layers", str(tiny_llama), "--data", str(prompts), "--tokens", "150", "--num-layers", "2"]
    assert main([*words, "--resamples", "5", "--out", str(out)]) == 0
    assert main(["regenerate", str(prompts), "--target", str(tiny_llama), "--out", str(answers)]) == 0
    for path in (out, out.with_suffix(".run.json"), answers.with_suffix(".run.json")):
        valid_record(written(path))


def test_the_readme_of_results_names_every_schema() -> None:
    text = (ROOT / "results" / "README.md").read_text()
    assert [path.name for path in SCHEMAS if f"`{path.name}`" not in text] == []


def test_schemas_are_in_the_package() -> None:
    from importlib.resources import files

    assert files("specdec.cli").joinpath("schemas", "bench.schema.json").is_file()
    assert '"schemas/*"' in (ROOT / "pyproject.toml").read_text()
