"""Two processes (gloo, on the processor) train to what one trains to."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.train.batching import share_batch
from specdec.train.checkpoint import latest_state
from specdec.train.config import TrainConfig
from specdec.train.processes import Processes
from specdec.train.run import train_draft

BOUNDARIES = (1, 3, 4)
# batches of three conversations or so: a share of one, of two, and in the last of an epoch of none
BASE = TrainConfig(
    draft_vocab_size=64,
    unroll=2,
    batch_rows=40,
    steps=8,
    compute_dtype="float32",
    init="random",
    eval_fraction=0.2,
    eval_sequences=1,
    save_every=4,
    micro_batch_rows=30,
    depth_sampling=True,
    ema=0.5,
    seed=3,
)


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of unequal length, so that shares are unequal."""
    model = load_hf_model(tiny_llama)
    generator = torch.Generator().manual_seed(0)
    lines = []
    for number in range(9):
        prompt = torch.randint(0, 200, (1, 5), generator=generator)
        text = model.generate(prompt, max_new_tokens=6 + 3 * (number % 4), do_sample=False, eos_token_id=None)
        ids = text[0].tolist()
        lines.append(
            json.dumps({"id": f"p{number}", "prompt_token_ids": ids[:5], "response_token_ids": ids[5:]})
        )
    path = tmp_path_factory.mktemp("answers") / "responses.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def single(tiny_llama: Path, answers: Path) -> Callable[..., Path]:
    """Train in this process."""

    def run(out: Path, config: TrainConfig = BASE) -> Path:
        train_draft(tiny_llama, boundaries=BOUNDARIES, data=answers, out=out, config=config)
        return out

    return run


@pytest.fixture(scope="module")
def alone(single: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run by one process."""
    return single(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def pair(
    tiny_llama: Path, answers: Path, single: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folders of runs by two processes: data parallel, with a store, in shards, and one gone on with."""
    place = tmp_path_factory.mktemp("pair")
    # eight steps planned, stopped after four by whoever deletes the later checkpoint
    single(place / "resumed")
    (place / "resumed" / "checkpoints" / "step-00000008.pt").unlink()
    runs = [
        {"out": str(place / "parallel"), "change": {}},
        {"out": str(place / "stored"), "change": {}, "states_cache": str(place / "cache")},
        {"out": str(place / "resumed"), "change": {}},
        {"out": str(place / "shards"), "change": {"shard_weights": True}},
        {"out": str(place / "own"), "change": {"shard_weights": True, "lm_head": "own"}},
    ]
    plan = place / "plan.json"
    settings = {key: value for key, value in asdict(BASE).items() if key != "adam_betas"}
    plan.write_text(
        json.dumps(
            {
                "target": str(tiny_llama),
                "data": str(answers),
                "boundaries": BOUNDARIES,
                "base": settings,
                "runs": runs,
                "processes": 2,
            }
        )
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = Path(__file__).with_name("train_script.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(plan)],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, said
    finally:
        for process in started:
            process.kill()
    return place


def _state(folder: Path) -> dict:
    path = latest_state(folder)
    assert path is not None
    return torch.load(path, weights_only=True)


def _furthest(first: Path, second: Path, part: str = "weights") -> float:
    a, b = _state(first)[part], _state(second)[part]
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("name", ["parallel", "stored", "resumed", "shards"])
def test_two_processes_train_to_the_weights_of_one(name: str, pair: Path, alone: Path) -> None:
    """Gradients are sums over the whole batch divided by its trained weight, whoever computed them."""
    assert _furthest(alone, pair / name) < 1e-5
    assert _furthest(alone, pair / name, "average") < 1e-5
    logs = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (alone, pair / name)
    ]
    # only one process logs, and the counts are those of the whole batch
    assert [entry["step"] for entry in logs[0]] == [entry["step"] for entry in logs[1]]
    assert logs[0][0]["slots"] == logs[1][0]["slots"]
    assert logs[0][0]["loss"] == pytest.approx(logs[1][0]["loss"], abs=1e-6)
    assert logs[0][0]["greedy"] == logs[1][0]["greedy"]


def test_own_output_rows_in_shards_train_as_in_one_piece(
    pair: Path, single: Callable[..., Path], tmp_path: Path
) -> None:
    assert _furthest(single(tmp_path / "alone", replace(BASE, lm_head="own")), pair / "own") < 1e-5


def test_one_process_goes_on_with_what_two_began(
    pair: Path, single: Callable[..., Path], alone: Path
) -> None:
    """A state in shards is written whole: it resumes in any number of processes."""
    for name in ("parallel", "shards"):
        (pair / name / "checkpoints" / "step-00000008.pt").unlink()
        assert _furthest(alone, single(pair / name)) < 1e-5


def test_shares_are_even_and_hold_every_sequence_once() -> None:
    rows = [5, 9, 3, 7, 8, 2, 6, 4]
    shares = share_batch(range(8), rows, 3)
    assert sorted(index for share in shares for index in share) == list(range(8))
    filled = [sum(rows[index] for index in share) for share in shares]
    assert max(filled) - min(filled) <= 3
    assert share_batch([4, 1, 2], rows, 1) == [[4, 1, 2]]
    assert share_batch([4], rows, 2) == [[4], []]


def test_shards_in_a_single_process_are_refused() -> None:
    with pytest.raises(SpecdecError, match=r"shard_weights \(true\) needs several processes"):
        Processes(shard=True)
