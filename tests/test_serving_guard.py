"""The day-one guard: train, save, reload from disk alone, serve: acceptance is what the trainer said.

A silent mismatch between training and serving (taps, norms, id map, rotary positions, template) leaves
the training curve healthy and the served acceptance near 1. This runs the whole chain on a tiny target.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.cli.main import main
from specdec.config import EngineConfig, SpecConfig
from specdec.drafts.checkpoint import load_draft
from specdec.engine import Engine
from specdec.hf import load_hf_model, load_tokenizer
from specdec.provenance import folder_fingerprint
from specdec.sequence import SamplingParams
from specdec.stats import SpecStats
from specdec.train.chat_data import load_chat_data
from specdec.train.evaluate import offline_acceptance

DEPTH = 4
SAME = 0.02  # the guard's bound on the difference of acceptance lengths


@pytest.fixture(scope="module")
def trained(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Answers of the tiny target, and a draft trained on them through the command line."""
    folder = tmp_path_factory.mktemp("guard")
    prompts, answers, draft = folder / "prompts.jsonl", folder / "answers.jsonl", folder / "draft"
    texts = [
        f"the {word} in an on {number}" for number in range(6) for word in ("theta", "inner", "one", "ether")
    ]
    prompts.write_text(
        "".join(json.dumps({"id": str(i), "prompt": text}) + "\n" for i, text in enumerate(texts))
    )
    answer = [
        "regenerate",
        str(prompts),
        "--target",
        str(tiny_llama),
        "--out",
        str(answers),
        "--max-tokens",
        "40",
    ]
    assert main(answer) == 0
    learn = ["train", str(tiny_llama), "--layers", "1,3,4", "--data", str(answers), "--out", str(draft)]
    learn += [
        "--steps",
        "120",
        "--batch-tokens",
        "512",
        "--lr",
        "0.006",
        "--draft-vocab-size",
        "200",
        "--dtype",
        "float32",
    ]
    assert main(learn) == 0
    return answers, draft


def test_served_acceptance_is_the_offline_acceptance(tiny_llama: Path, trained: tuple[Path, Path]) -> None:
    answers, draft = trained
    model = load_hf_model(tiny_llama)
    chats = load_chat_data(
        answers, load_tokenizer(tiny_llama), max_length=2048, vocab_size=model.config.vocab_size
    )
    loaded = load_draft(
        draft,
        model.get_input_embeddings().weight,
        model.lm_head.weight,
        target_fingerprint=folder_fingerprint(tiny_llama),
    )
    offline = offline_acceptance(loaded.head, model, chats.sequences, DEPTH)
    assert offline.acceptance_length is not None
    assert offline.acceptance_length > 1.2, "a head that learned nothing would make this test empty"

    spec = SpecConfig(max_depth=DEPTH, top_k=1, max_nodes=DEPTH, adaptive=False)
    # the head as it was trained: int8 rows would be a head of their own
    config = EngineConfig(kv_tokens=4096, spec=spec, draft_weights="plain")
    engine = Engine(tiny_llama, draft=draft, config=config)
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    results = engine.generate(
        [record["prompt_token_ids"] for record in records], SamplingParams(max_tokens=40)
    )
    assert [result.token_ids for result in results] == [record["response_token_ids"] for record in records]
    total = SpecStats()
    for result in results:
        total.add(result.stats)
    assert total.verify_steps == offline.verify_steps
    assert total.acceptance_length == pytest.approx(offline.acceptance_length, abs=SAME)


def test_the_draft_folder_says_what_it_was_made_from(tiny_llama: Path, trained: tuple[Path, Path]) -> None:
    _, draft = trained
    own = json.loads((draft / "config.json").read_text())["specdec"]
    assert own["boundaries"] == [1, 3, 4]
    assert own["target_fingerprint"] == folder_fingerprint(tiny_llama)
    run = json.loads((draft / "run.json").read_text())
    assert run["schema"] == "specdec.run/1"
    assert run["data_hash"]
