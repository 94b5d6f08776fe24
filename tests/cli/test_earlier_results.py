"""An output that exists is replaced only by a result of its own kind; wrong options cost no waiting."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli.load_sweeping.run import _read_turns
from specdec.cli.main import main
from specdec.cli.outputs import require_own_beside, require_own_result
from specdec.errors import SpecdecError, UsageError

OTHERS = {
    "settings": '{"theme": "dark"}',
    "answers": '{"id": "a", "messages": [], "response_token_ids": [1], "finish_reason": "stop"}\n',
}


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "in the"}\n{"id": "b", "prompt": "the in"}\n')
    return path


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["bench", "TARGET", "--data", "PROMPTS"], "keep.json"),
        (["bench", "TARGET", "--micro"], "keep.json"),
        (["bench", "--url", "http://127.0.0.1:9/v1", "--data", "PROMPTS"], "keep.json"),
        (["compare", "TARGET", "--peer", "transformers", "--data", "PROMPTS"], "keep.json"),
        (["replay", "TARGET", "--data", "PROMPTS"], "keep.json"),
        (["select-layers", "TARGET", "--data", "PROMPTS"], "keep.json"),
        (["generate", "TARGET", "--prompts", "PROMPTS"], "keep.jsonl"),
        (["audit", "TARGET"], "audit.json"),
        (["sweep", "TARGET"], "sweep.json"),
        (["load-sweep", "TARGET", "--draft", "ngram"], "load_sweep.json"),
        (["study", "TARGET", "--data", "PROMPTS"], "study.json"),
    ],
    ids=lambda value: " ".join(word for word in value if word.islower() or "-" in word) if value else "",
)
def test_no_command_replaces_what_it_did_not_write(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    words: list[str],
    name: str,
    content: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches `specdec bench ... --out responses.jsonl`, which ended hours of answers without a word."""
    kept = tmp_path / name
    kept.write_text(content)
    out = kept if name.startswith("keep") else tmp_path
    given = {"TARGET": str(tiny_llama), "PROMPTS": str(prompts)}
    assert main([given.get(word, word) for word in words] + ["--out", str(out)]) == 2
    assert f"--out ({kept if words[0] != 'generate' else out}) exists and " in one_error(capsys)
    assert kept.read_text() == content


def test_a_result_replaces_an_earlier_one_or_an_empty_file(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    require_own_result("--out", out, "bench")
    out.touch()
    require_own_result("--out", out, "bench")
    out.write_text('{"schema": "specdec.bench/1"}')
    require_own_result("--out", out, "bench")
    with pytest.raises(UsageError, match=r"--out .* is a bench record, which a load record must not replace"):
        require_own_result("--out", out, "load", "soak")


def test_a_file_beside_a_result_is_replaced_only_where_an_earlier_result_stands(tmp_path: Path) -> None:
    result, beside = tmp_path / "load.json", tmp_path / "load.png"
    require_own_beside("--out", result, beside)
    beside.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"--out .*load\.json\) would also replace .*load\.png"):
        require_own_beside("--out", result, beside)
    result.touch()
    require_own_beside("--out", result, beside)


@pytest.mark.parametrize("mine", ["report.md", "report.png"])
def test_a_report_in_more_formats_leaves_other_files_alone(
    bench_record: Callable[..., Path], tmp_path: Path, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record, kept, page = bench_record(), tmp_path / mine, tmp_path / "report.html"
    kept.write_text("mine")
    command = ["report", str(record), "--out", str(page), "--format", "md", "--format", "png"]
    assert main(command) == 2
    assert f"would also replace {kept}" in one_error(capsys)
    assert kept.read_text() == "mine"
    assert not page.exists()
    kept.unlink()
    assert main(command) == 0
    assert main(command) == 0


def test_a_report_that_cannot_have_a_picture_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a page that was written although the command failed."""
    record, page = tmp_path / "run.json", tmp_path / "report.html"
    record.write_text(
        json.dumps({"schema": "specdec.run/1", "command": ["specdec"], "versions": {}, "hardware": {}})
    )
    assert main(["report", str(record), "--out", str(page), "--format", "png"]) == 2
    assert "--format (png) needs a chart" in one_error(capsys)
    assert not page.exists()


@pytest.mark.parametrize(
    ("option", "value"), [("--temperature", "-1"), ("--top-p", "0"), ("--dtype", "int4"), ("--device", "tpu")]
)
def test_regenerate_names_a_wrong_option_and_leaves_nothing_behind(
    tiny_llama: Path,
    prompts: Path,
    tmp_path: Path,
    option: str,
    value: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches the run record that stayed where a run had failed before its first answer."""
    out = tmp_path / "answers.jsonl"
    command = ["regenerate", str(prompts), "--target", str(tiny_llama), "--out", str(out), option, value]
    assert main(command) == 2
    assert one_error(capsys).startswith(f"error: {option} (")
    assert {path.name for path in tmp_path.iterdir()} <= {prompts.name, ".answers.jsonl.lock"}


@pytest.mark.parametrize("command", ["bench", "replay", "sweep", "audit"])
def test_a_wrong_temperature_is_named_before_a_target_is_looked_for(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path / "sweep")] if command == "sweep" else []
    assert main([command, "no-such-target", "--temperature", "101", *words]) == 2
    assert one_error(capsys).startswith("error: --temperature (101")


@pytest.mark.parametrize("command", ["bench", "sweep", "audit", "compare"])
def test_a_wrong_dtype_is_named_before_a_target_is_looked_for(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"sweep": ["--out", str(tmp_path / "sweep")], "compare": ["--peer", "transformers"]}
    assert main([command, "no-such-target", "--dtype", "int4", *words.get(command, [])]) == 2
    assert one_error(capsys).startswith("error: --dtype ('int4')")


@pytest.mark.parametrize(
    "command", ["bench", "compare", "generate", "serve", "replay", "audit", "load-sweep"]
)
@pytest.mark.parametrize("draft", ["no-such-draft", "ngram+no-such-draft"])
def test_a_draft_that_is_none_is_named_before_a_target_is_loaded(
    tmp_path: Path, command: str, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches minutes of reading a large target for a slip of the pen in the draft's name."""
    words = {"compare": ["--peer", "transformers"], "load-sweep": ["--out", str(tmp_path / "out")]}
    words |= {"generate": ["--prompt", "x"], "serve": ["--port", "0"]}
    assert main([command, "random:tiny", "--draft", draft, *words.get(command, [])]) == 1
    assert "is no draft; give ngram" in one_error(capsys)


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "x"], ["serve", "--port", "0"]], ids=lambda c: c[0]
)
def test_an_unknown_rule_is_named_before_a_target_is_looked_for(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = command
    assert main([name, "no-such-target", *words, "--rule", "nope"]) == 1
    assert one_error(capsys).startswith("error: --rule (nope): rule nope is not known; the rules are")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("generate TARGET --prompt x --draft TARGET", "--draft ("),
        ("generate TARGET --prompts nope", "--prompts (nope) is no file"),
        ("generate TARGET --prompt x --json-schema BROKEN", "--json-schema must be JSON"),
        ("bench TARGET --data nope", "--data (nope) is no file"),
        ("select-layers TARGET --data nope", "--data (nope) is no file"),
        ("regenerate nope --target TARGET --out OUT", "PROMPTS (nope) is no file"),
        ("select-layers EMPTY --out OUT", "EMPTY holds no config.json; name a Hugging Face model folder"),
        ("train TARGET --layers 1 --data PROMPTS --out OUT --init-from EMPTY", "--init-from ("),
        ("train TARGET --layers 1 --data PROMPTS --out OUT --config nope", "--config (nope) cannot be read"),
        ("study TARGET --data PROMPTS --out OUT --scores nope", "--scores (nope) is not a file"),
        ("serve TARGET --api-key-file nope", "--api-key-file (nope) cannot be read"),
        ("serve TARGET --max-shape x", "--max-shape (x) must be"),
        ("load-sweep TARGET --draft ngram --fixed x --out OUT", "--fixed (x) must be"),
        ("watch BENCH --baseline nope", "--baseline (nope) cannot be read"),
        ("watch nope --exact", "RUN (nope) cannot be read"),
        ("export nope --to vllm --target TARGET --out OUT", "DRAFT (nope) must be a folder"),
        ("import DRAFT --from vllm --target TARGET --out OUT", "DIR (DRAFT) is a draft of specdec already"),
        ("pull no/such.gguf", "TARGET (no/such.gguf) is not a file"),
        ("audit TARGET --rule nope", "--rule (nope): rule nope is not known"),
        ("sweep TARGET --rule nope --out OUT", "--rule (nope): rule nope is not known"),
        (
            "replay TARGET --data PROMPTS --limit 2 --turns 2 --kv-tokens 16",
            "the KV pool (16 tokens) must hold at least two blocks of 16; raise --kv-tokens",
        ),
    ],
)
def test_an_error_names_the_option(
    tiny_llama: Path,
    random_draft: Callable[..., Path],
    bench_record: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    words: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken, empty = tmp_path / "broken.json", tmp_path / "empty"
    broken.write_text("{")
    empty.mkdir()
    given = {
        "TARGET": tiny_llama,
        "PROMPTS": prompts,
        "BROKEN": broken,
        "EMPTY": empty,
        "OUT": tmp_path / "o",
    }
    if "BENCH" in words:
        given["BENCH"] = bench_record()
    if " DRAFT " in words:
        given["DRAFT"] = random_draft(tiny_llama, tmp_path / "draft")
    assert main([str(given.get(word, word)) for word in words.split()]) in (1, 2)
    [*_, said] = capsys.readouterr().err.strip().splitlines()
    for name, path in given.items():
        named = named.replace(name, str(path)) if name in ("EMPTY", "DRAFT") else named
    assert said.startswith(f"error: {named}")
    assert "Errno" not in said


def test_a_sweep_with_other_settings_is_not_called_damaged(tmp_path: Path) -> None:
    """Catches the refusal that was caught as a parsing error and told to remove good results."""
    turns = tmp_path / "turns.jsonl"
    turns.write_text('{"draft": "ngram"}\n')
    assert _read_turns(turns, {"draft": "ngram"}) == {}
    with pytest.raises(SpecdecError, match=r"^--out \(.*\) holds a sweep with other settings"):
        _read_turns(turns, {"draft": "mine"})
    turns.write_text('{"draft": "ngram"}\n[]\n')
    with pytest.raises(SpecdecError, match=r"turns\.jsonl is damaged"):
        _read_turns(turns, {"draft": "ngram"})
