"""Rows of shared/reference/faults.md where training data meets serving: B03, B23, B25, B26.

The prompt ids of every path (trainer, bench, engine, regenerate, layer selection) are compared as lists.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.cli.benching.points import bench_data
from specdec.cli.main import main
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model, load_tokenizer, template_hash
from specdec.layer_select.score import ScoreConfig
from specdec.layer_select.texts import read_texts
from specdec.requests import PromptEncoder
from specdec.sequence import SamplingParams
from specdec.train.chat_data import load_chat_data
from specdec.train.config import TrainConfig
from specdec.train.masks import chat_mask
from specdec.train.run import train_draft

BOS = "<|bos|>"
TURN = "<|{{ m.role }}|>{{ m.content }}<|eot|>"
# what real templates do beside spelling roles
TEMPLATES = {
    "own": None,
    "without BOS": f"{{% for m in messages %}}{TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "default system turn": "{{ bos_token }}{% if messages[0].role != 'system' %}<|system|>be kind<|eot|>"
    f"{{% endif %}}{{% for m in messages %}}{TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "thinking switched by option": f"{{{{ bos_token }}}}{{% for m in messages %}}{TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "(no thoughts){% endif %}{% endif %}",
}
QUESTIONS = ["the first question", f"{BOS} inside a question", "naïve \u2028 Ⅷ\u0085 🦜"]


@pytest.fixture(scope="module", params=TEMPLATES, ids=lambda name: str(name).replace(" ", "-"))
def target(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny target whose tokenizer carries one of the templates."""
    folder = tmp_path_factory.mktemp("template") / "target"
    shutil.copytree(tiny_llama, folder)
    if TEMPLATES[request.param] is not None:
        tokenizer = load_tokenizer(tiny_llama)
        tokenizer.chat_template = TEMPLATES[request.param]
        for old in folder.glob("*.jinja"):
            old.unlink()
        tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_path_builds_the_same_prompt_ids(target: Path, tmp_path: Path) -> None:
    """B25, B26: list equality; what the trainer sees is the served prompt and then the answer."""
    rows = [{"id": f"q{n}", "category": "c", "prompt": text} for n, text in enumerate(QUESTIONS)]
    prompts, answers = write_lines(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    command = [
        "regenerate",
        str(prompts),
        "--target",
        str(target),
        "--out",
        str(answers),
        "--max-tokens",
        "5",
    ]
    assert main(command) == 0
    records = {
        record["id"]: record for record in map(json.loads, answers.read_text("utf-8").split("\n")[:-1])
    }

    tokenizer, encoder = load_tokenizer(target), PromptEncoder(target)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    bench = [prompt.token_ids for prompt in bench_data(encoder, str(prompts), None).first]
    engine = Engine(target, config=EngineConfig(kv_tokens=1024))
    served = engine.generate(chats, SamplingParams(max_tokens=5))
    assert bench == [result.prompt_token_ids for result in served]
    assert bench == [records[f"q{n}"]["prompt_token_ids"] for n in range(len(QUESTIONS))]
    score = ScoreConfig(tokens=4000, drop_first=0)
    selected = {text.token_ids for text in read_texts(prompts, tokenizer, score)}
    assert selected == {tuple(ids) for ids in bench}

    data = load_chat_data(answers, tokenizer, max_length=512, vocab_size=272)
    assert not data.dropped
    trained = {sequence.id: sequence for sequence in data.sequences}
    for number, (ids, result) in enumerate(zip(bench, served, strict=True)):
        sequence = trained[f"q{number}"]
        assert list(sequence.token_ids) == ids + result.token_ids
        assert list(sequence.assistant_mask) == [False] * len(ids) + [True] * len(result.token_ids)
    assert len(engine.encoder.encode(QUESTIONS[0])) < len(bench[0])


def test_messages_and_stored_ids_train_on_the_same_tokens(target: Path) -> None:
    """B25: prompt, answer and end of turn are a prefix of the rendered chat, in every turn."""
    tokenizer, encoder = load_tokenizer(target), PromptEncoder(target)
    talk: list[dict[str, str]] = []
    for turn in range(3):
        talk.append({"role": "user", "content": f"{turn} the question"})
        prompt = encoder.encode(talk)
        talk.append({"role": "assistant", "content": f"the answer {turn}"})
        ids, mask, _ = chat_mask(tokenizer, talk)
        answer = tokenizer(f"the answer {turn}<|eot|>", add_special_tokens=False)["input_ids"]
        assert ids == prompt + answer
        assert mask[len(prompt) :] == [True] * len(answer)
        assert sum(mask) > turn * len(answer)


def test_the_template_adds_one_bos_on_every_chat_path(target: Path) -> None:
    """B26: the template's own BOS, and none from the tokenizer beside it."""
    tokenizer, encoder = load_tokenizer(target), PromptEncoder(target)
    chat = [{"role": "user", "content": "hi"}]
    expected = 1 if "bos_token" in tokenizer.chat_template else 0
    bos = tokenizer.bos_token_id
    assert encoder.encode(chat).count(bos) == expected
    ids, *_ = chat_mask(tokenizer, [*chat, {"role": "assistant", "content": "ho"}])
    assert ids.count(bos) == expected


def test_run_records_name_the_template(target: Path, tmp_path: Path) -> None:
    """B25: the report says which rendering its prompts had."""
    prompts = write_lines(tmp_path / "p.jsonl", [{"prompt": "the"}])
    out = tmp_path / "bench.json"
    command = ["bench", str(target), "--draft", "ngram", "--data", str(prompts), "--max-tokens", "4"]
    assert main([*command, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["run"]["template_hash"] == template_hash(load_tokenizer(target))


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r"])
def test_no_character_inside_a_string_ends_a_record(odd: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """B23: one odd answer must not cost its record, nor shift the line numbers of the others."""
    record = {
        "id": "odd",
        "messages": [{"role": "user", "content": f"a{odd}b"}, {"role": "assistant", "content": f"c{odd}d"}],
    }
    path = write_lines(tmp_path / "d.jsonl", [record, {"messages": []}])
    data = load_chat_data(path, tiny_tokenizer, max_length=512, vocab_size=512)
    assert [sequence.id for sequence in data.sequences] == ["odd"]
    assert f"c{odd}d" in tiny_tokenizer.decode(data.sequences[0].token_ids)
    assert [item.line for item in data.dropped] == [2]


def test_windows_line_ends_and_blank_lines_cost_nothing(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """B23: what an editor does to a file."""
    record = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4]}
    other = {"prompt_token_ids": [1, 2], "response_token_ids": [5, 4]}
    path = tmp_path / "d.jsonl"
    path.write_bytes((json.dumps(record) + "\r\n\r\n" + json.dumps(other)).encode())
    data = load_chat_data(path, tiny_tokenizer, max_length=512, vocab_size=512)
    assert (len(data.sequences), data.dropped) == (2, ())


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "user", "content": ["q"]}, "content"),
        ({"role": "user", "content": 7}, "content"),
        ({"role": "User", "content": "q"}, "'User'"),
        ({"role": None, "content": "q"}, "None"),
        ({"role": "developer", "content": "q"}, "'developer'"),
        ("q", "'q'"),
        (None, "None"),
    ],
)
def test_a_turn_that_cannot_be_read_drops_its_record_alone(
    message: Any, word: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """B23: values of our own beside the given ones; the record before and behind it are kept."""
    answer = {"role": "assistant", "content": "a"}
    good = [{"messages": [{"role": "user", "content": str(n)}, answer]} for n in range(2)]
    path = write_lines(tmp_path / "d.jsonl", [good[0], {"messages": [message, answer]}, good[1]])
    data = load_chat_data(path, tiny_tokenizer, max_length=512, vocab_size=512)
    assert len(data.sequences) == 2
    assert [item.line for item in data.dropped] == [2]
    assert word in data.dropped[0].reason


@pytest.mark.parametrize("boundaries", [(4,), (2,), (0, 1, 2, 3, 4)])
def test_one_and_five_taps_train_and_serve(
    boundaries: tuple[int, ...], tiny_llama: Path, tmp_path: Path
) -> None:
    """B03: the number of taps is the draft's own, the state behind the last layer included."""
    model = load_hf_model(tiny_llama)
    texts = model.generate(
        torch.randint(0, 200, (6, 5)), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    rows = [{"prompt_token_ids": ids[:5], "response_token_ids": ids[5:]} for ids in texts.tolist()]
    config = TrainConfig(
        draft_vocab_size=64, unroll=2, batch_rows=40, steps=2, compute_dtype="float32", eval_sequences=0
    )
    out = tmp_path / "draft"
    data = write_lines(tmp_path / "d.jsonl", rows)
    train_draft(tiny_llama, boundaries=boundaries, data=data, out=out, config=config)
    raw = json.loads((out / "config.json").read_text())
    assert raw["specdec"]["boundaries"] == list(boundaries)
    assert raw["num_aux_hidden_states"] == len(boundaries)
    engine = Engine(
        tiny_llama,
        draft=out,
        config=EngineConfig(kv_tokens=512, spec=SpecConfig(max_depth=2, max_nodes=2, adaptive=False)),
    )
    assert engine.runner.boundaries == boundaries
    result = engine.generate([rows[0]["prompt_token_ids"]], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    assert result.token_ids == rows[0]["response_token_ids"]
    assert result.stats.drafted > 0
    # one spelling of the taps that disagrees with the other two
    raw["specdec"]["boundaries"] = [1, 3, 4]
    (out / "config.json").write_text(json.dumps(raw))
    with pytest.raises(SpecdecError, match=r"must equal specdec\.boundaries \(\[1, 3, 4\]\)"):
        Engine(tiny_llama, draft=out)
