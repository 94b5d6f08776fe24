"""A kill -9 at any moment leaves the last complete checkpoint, and the run goes on from it bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.hf import load_hf_model
from specdec.train.checkpoint import TrainState, latest_state, load_state, save_state
from specdec.train.config import TrainConfig
from specdec.train.run import train_draft

BOUNDARIES = (1, 3, 4)
LONG = TrainConfig(
    draft_vocab_size=64,
    unroll=2,
    batch_rows=20,
    steps=120,
    compute_dtype="float32",
    init="random",
    eval_sequences=0,
    save_every=3,
    ema=0.9,
    schedule="wsd",
    depth_sampling=True,
)


def _wait_for(what: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


# 4 MB are written for long enough to be hit
SAVER = """
import sys, torch
from pathlib import Path
from specdec.train.checkpoint import TrainState, save_state
step = int(sys.argv[2])
while True:
    step += 1
    weights = {"w": torch.full((1 << 20,), float(step))}
    state = TrainState(step=step, epoch=0, batch=0, total_steps=9, slots_seen=0, seconds=0.0, weights=weights,
                       optimizer={}, rng=torch.get_rng_state(), contract={})
    save_state(Path(sys.argv[1]), state, keep=2)
"""


def test_whatever_moment_a_kill_comes_the_newest_checkpoint_is_whole(tmp_path: Path) -> None:
    chance = random.Random(0)
    saver = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), "0"])
    seen: list[int] = []
    try:
        _wait_for(lambda: latest_state(tmp_path), 120)
        for _ in range(6):
            time.sleep(chance.uniform(0.0, 0.05))
            # what a kill would leave is what lies there now: a stopped process writes nothing
            saver.send_signal(signal.SIGSTOP)
            path = latest_state(tmp_path)
            assert path is not None
            state = load_state(path, {})
            assert bool((state.weights["w"] == state.step).all())
            seen.append(state.step)
            saver.send_signal(signal.SIGCONT)
    finally:
        saver.kill()
        saver.wait()
    path = latest_state(tmp_path)
    assert path is not None
    state = load_state(path, {})
    assert bool((state.weights["w"] == state.step).all())
    assert seen == sorted(seen)
    # half a file of the killed one is taken away by the next that is written
    (path.parent / ".step-00000002.pt.partial").write_bytes(b"half")
    kept = save_state(tmp_path, TrainState(**{**vars(state), "step": state.step + 5}), keep=2)
    assert sorted(found.name for found in path.parent.iterdir()) == sorted({path.name, kept.name})


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(tiny_llama: Path, tmp_path: Path) -> None:
    """Weights, averages, optimiser and log, from wherever the kill came."""
    model = load_hf_model(tiny_llama)
    data = tmp_path / "responses.jsonl"
    generator = torch.Generator().manual_seed(0)
    lines = []
    for number in range(6):
        prompt = torch.randint(0, 200, (1, 5), generator=generator)
        ids = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist()
        lines.append(
            json.dumps({"id": f"p{number}", "prompt_token_ids": ids[:5], "response_token_ids": ids[5:]})
        )
    data.write_text("\n".join(lines) + "\n")
    plan = {
        "target": str(tiny_llama),
        "data": str(data),
        "boundaries": BOUNDARIES,
        "base": {key: value for key, value in asdict(LONG).items() if key != "adam_betas"},
        "runs": [{"out": str(tmp_path / "killed"), "change": {}}],
        "processes": 1,
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).with_name("train_script.py")
    run = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "plan.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        _wait_for(lambda: latest_state(tmp_path / "killed"), 120)
        time.sleep(random.Random(1).uniform(0.0, 0.3))
    finally:
        run.kill()
        run.wait()
    said: list[str] = []
    results = [
        train_draft(
            tiny_llama, boundaries=BOUNDARIES, data=data, out=tmp_path / name, config=LONG, report=take
        )
        for name, take in (("killed", said.append), ("straight", lambda line: None))
    ]
    assert results[0].outcome.new_steps < 120
    newest = f"step-{120 - results[0].outcome.new_steps:08d}.pt"
    assert any(f"resuming from {tmp_path / 'killed' / 'checkpoints' / newest}" in line for line in said)
    states = [torch.load(latest_state(result.folder), weights_only=True) for result in results]  # type: ignore[arg-type]
    for part in ("weights", "average"):
        assert all(torch.equal(states[0][part][name], states[1][part][name]) for name in states[1][part])
    for key, entry in states[1]["optimizer"]["state"].items():
        assert all(torch.equal(states[0]["optimizer"]["state"][key][name], entry[name]) for name in entry)
    logs = [
        [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
        for result in results
    ]
    assert [(e["step"], e.get("loss"), e.get("lr")) for e in logs[0]] == [
        (e["step"], e.get("loss"), e.get("lr")) for e in logs[1]
    ]
