"""The sampling options of `specdec generate`, through the command line on a tiny target."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.cli.sampling_options import parse_logit_bias, read_grammar
from specdec.errors import UsageError

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def last_json(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    lines = capsys.readouterr().out.strip().splitlines()
    return "\n".join(lines[:-1]), json.loads(lines[-1])


@pytest.mark.parametrize("draft", [[], ["--draft", "ngram"]])
def test_an_answer_obeys_a_schema_file(
    tiny_llama: Path, tmp_path: Path, draft: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    command = ["generate", str(tiny_llama), "--prompt", "in the", "--json-schema", str(path), *draft]
    assert main([*command, "--temperature", "1", "--seed", "3", "--logprobs", "2"]) == 0
    text, summary = last_json(capsys)
    assert 0 <= json.loads(text)["n"] <= 9
    assert summary["finish_reason"] == "stop"
    assert len(summary["logprobs"]) == summary["completion_tokens"]
    assert all(len(entry["top"]) == 2 for entry in summary["logprobs"])


def test_every_option_reaches_the_text_and_the_record(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out, grammar = tmp_path / "p.jsonl", tmp_path / "o.jsonl", tmp_path / "g.ebnf"
    prompts.write_text(json.dumps({"id": "p", "prompt": "in"}) + "\n")
    grammar.write_text('root ::= ("the" | "in" | "an")+')
    command = [
        *("generate", str(tiny_llama), "--prompts", str(prompts), "--out", str(out), "--ebnf", str(grammar)),
        *("--min-p", "0.001", "--typical-p", "0.99", "--repetition-penalty", "1.1"),
        *("--presence-penalty", "0.1", "--frequency-penalty", "0.2", "--logit-bias", "257=3"),
        *("--bad-word", "in", "--min-tokens", "4", "--max-tokens", "9", "--logprobs", "0"),
    ]
    assert main(command) == 0
    record = json.loads(out.read_text())
    assert re.fullmatch("(the|an|i|a|t|th)+", record["text"])
    assert len(record["logprobs"]) == record["completion_tokens"] >= 4
    assert "logprobs" not in last_json(capsys)[1]
    defaults = json.loads(out.with_suffix(".run.json").read_text())["defaults"]
    assert defaults["grammar"]["ebnf"] == grammar.read_text()
    assert defaults["bad_words"] == ["in"]
    assert (defaults["typical_p"], defaults["min_tokens"], defaults["logit_bias"]) == (0.99, 4, {"257": 3.0})


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--json-schema", "nothing.json"], 2, "nothing.json"),
        (["--regex", "a", "--ebnf", "x"], 2, "exclude"),
        (["--regex", "a("], 1, "unclosed"),
        (["--logit-bias", "5"], 2, "ID=VALUE"),
        (["--logit-bias", "5=300"], 2, "--logit-bias"),
        (["--logit-bias", "999999=1"], 1, "logit_bias (999999)"),
        (["--repetition-penalty", "0"], 2, "--repetition-penalty"),
        (["--presence-penalty", "3"], 2, "--presence-penalty"),
        (["--frequency-penalty", "nan"], 2, "--frequency-penalty"),
        (["--typical-p", "0"], 2, "--typical-p"),
        (["--min-tokens", "999"], 2, "--min-tokens"),
        (["--logprobs", "99"], 2, "--logprobs"),
    ],
)
def test_wrong_values_are_one_line_that_names_them(
    tiny_llama: Path, options: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(tiny_llama), "--prompt", "x", *options]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[-1]
    assert lines[-1].startswith("error: ")
    assert not any("Traceback" in line for line in lines)


def test_logprobs_need_a_place_to_go(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny_llama), "--prompts", "dev", "--logprobs", "1"]) == 2
    assert "--out" in capsys.readouterr().err


def test_biases_and_grammars_are_read(tmp_path: Path) -> None:
    assert parse_logit_bias(["3=-1.5", "4=2"]) == {3: -1.5, 4: 2.0}
    with pytest.raises(UsageError, match="twice"):
        parse_logit_bias(["3=1", "3=2"])
    assert read_grammar(None, None, None) is None
    path = tmp_path / "latin"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_grammar(None, None, path)
