"""The loop on a tiny target: it learns, resumes bit for bit, and stops before numbers go bad."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.drafts.checkpoint import load_draft, read_draft_config
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.models.layers import SLOW_BF16
from specdec.train.checkpoint import latest_state
from specdec.train.config import TrainConfig
from specdec.train.evaluate import offline_acceptance
from specdec.train.prepare import split_held_out
from specdec.train.run import TrainResult, train_draft
from specdec.train.sequences import TrainSequence
from specdec.train.states import TargetStates
from specdec.train.trainer import Trainer

BOUNDARIES = (1, 3, 4)
# as small and as short as shows the point; fp32, since these runs compare bits.
BASE = TrainConfig(
    draft_vocab_size=64,
    unroll=3,
    batch_rows=40,
    steps=20,
    compute_dtype="float32",
    init="random",
    eval_sequences=0,
    save_every=5,
    log_every=1,
    seed=3,
)


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy answers of the tiny target to random prompts."""
    model = load_hf_model(tiny_llama)
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("answers") / "responses.jsonl"
    with open(path, "w") as file:
        for number in range(10):
            prompt = torch.randint(0, 200, (1, 6), generator=generator)
            text = model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)[0].tolist()
            record = {"id": f"p{number}", "prompt_token_ids": text[:6], "response_token_ids": text[6:]}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture
def run(tiny_llama: Path, answers: Path, tmp_path: Path) -> Callable[..., TrainResult]:
    def start(name: str = "draft", config: TrainConfig = BASE, **options: Any) -> TrainResult:
        chosen = {"boundaries": BOUNDARIES, "data": answers, **options}
        return train_draft(tiny_llama, out=tmp_path / name, config=config, **chosen)

    return start


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    path = latest_state(folder)
    assert path is not None
    return torch.load(path, weights_only=True)["weights"]


def _same(first: Path, second: Path) -> bool:
    """Weights, and averages where the runs keep some."""
    states = [torch.load(latest_state(folder), weights_only=True) for folder in (first, second)]  # type: ignore[arg-type]
    a, b = ({**state["weights"], **(state["average"] or {})} for state in states)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# lk-mix keeps the total variation, which falls more slowly than the divergence.
@pytest.mark.parametrize(("loss", "bound"), [("kl", 0.12), ("lk-mix", 0.5)])
def test_a_fixed_tiny_set_is_learnt(
    loss: Any, bound: float, run: Callable[..., TrainResult], tiny_llama: Path
) -> None:
    """Loss near zero, acceptance near one, and the saved draft reaches what was reported."""
    config = replace(
        BASE,
        loss=loss,
        steps=160,
        batch_rows=400,
        learning_rate=5e-3,
        prompt_rows=False,
        draft_vocab_size=160,
    )
    result = run(config=config, states_cache="online")
    assert result.outcome.last_loss < bound
    model = load_hf_model(tiny_llama)
    embed, rows = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    head = load_draft(result.folder, embed, rows).head
    sequences = _sequences_of(result)
    acceptance = offline_acceptance(head, model, sequences, 3)
    assert acceptance.greedy_share == 1.0
    assert acceptance.acceptance_length is not None
    # 15 tokens after the first answer token: chains of 3 commit 4 at a time, 15 / 4 steps at best.
    assert acceptance.acceptance_length > 3.0


def _sequences_of(result: TrainResult) -> list[TrainSequence]:
    lines = Path(result.summary["data"]).read_text().splitlines()
    found = []
    for line in lines:
        record = json.loads(line)
        ids = record["prompt_token_ids"] + record["response_token_ids"]
        found.append(TrainSequence(record["id"], tuple(ids), tuple(i >= 6 for i in range(len(ids)))))
    return found


EVERYTHING = replace(
    BASE,
    compute_dtype="bfloat16",
    micro_batch_rows=15,
    depth_sampling=True,
    schedule="wsd",
    ema=0.8,
    loss="lk-mix",
)


@pytest.mark.parametrize(("parts", "config"), [((10, 20), EVERYTHING), ((5, 10, 20), BASE)])
def test_a_resumed_run_ends_bit_for_bit_like_the_uninterrupted_one(
    parts: tuple[int, ...],
    config: TrainConfig,
    run: Callable[..., TrainResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights, rates and order of batches; across epochs, and twice (SpecForge #243, Automodel #763)."""
    straight = run("straight", config)
    step = Trainer._step

    def stop_at(limit: int) -> Any:
        def wrapped(self: Trainer, *args: Any) -> Any:
            done = step(self, *args)
            if self.step + 1 == limit:
                os.kill(os.getpid(), signal.SIGTERM)
            return done

        return wrapped

    for limit in parts[:-1]:
        monkeypatch.setattr(Trainer, "_step", stop_at(limit))
        stopped = run("parts", config)
        assert not stopped.outcome.complete
        assert stopped.outcome.steps == limit
    monkeypatch.setattr(Trainer, "_step", step)
    resumed = run("parts", config)
    assert resumed.outcome.complete
    assert straight.outcome.epochs > 1
    assert _same(straight.folder, resumed.folder)
    logs = [(f / "metrics.jsonl").read_text().splitlines() for f in (straight.folder, resumed.folder)]
    rates = [[json.loads(line).get("lr") for line in log] for log in logs]
    losses = [[json.loads(line).get("loss") for line in log] for log in logs]
    assert rates[0] == rates[1]
    assert losses[0] == losses[1]


def test_a_kill_between_checkpoints_resumes_from_the_last_complete_one(
    run: Callable[..., TrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run("straight")
    step = Trainer._step

    def killed(self: Trainer, *args: Any) -> Any:
        if self.step == 13:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Trainer, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    monkeypatch.setattr(Trainer, "_step", step)
    folder = straight.folder.parent / "killed"
    # what a kill inside the writing leaves behind.
    (folder / "checkpoints" / ".step-00000015.pt.partial").write_bytes(b"half")
    lines: list[str] = []
    run("killed", report=lines.append)
    assert any("step-00000010.pt at step 10" in line for line in lines)
    assert _same(straight.folder, folder)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"learning_rate": 2e-3}, "learning_rate"), ({"seed": 4}, "seed"), ({"loss": "lk"}, "loss")],
)
def test_resuming_under_other_options_is_refused_by_name(
    change: dict[str, Any], field: str, run: Callable[..., TrainResult]
) -> None:
    run(config=replace(BASE, steps=2))
    with pytest.raises(SpecdecError, match=f"^{field} "):
        run(config=replace(BASE, steps=2, **change))
    fresh = run(config=replace(BASE, steps=2, **change), resume=False)
    assert fresh.outcome.steps == 2


def test_a_bad_state_stops_the_run_before_the_weights_are_touched(
    run: Callable[..., TrainResult], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a loss that is NaN from some step on while the run goes on: ModelOpt #2483, Medusa #134."""
    fetch = TargetStates.fetch
    calls = {"count": 0}

    def poisoned(self: TargetStates, sequences: Any) -> Any:
        found = fetch(self, sequences)
        calls["count"] += 1
        # the first call measures the taps for the head's start.
        if calls["count"] == 7:
            found[0].final[:] = math.inf
        return found

    monkeypatch.setattr(TargetStates, "fetch", poisoned)
    with pytest.raises(SpecdecError, match=r"step 6 is not finite, in a batch of samples p\d"):
        run()
    weights = _weights(tmp_path / "draft")
    assert latest_state(tmp_path / "draft") is not None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


def test_bf16_products_move_fp32_weights(run: Callable[..., TrainResult]) -> None:
    """Catches weights or moments in bf16, which round small updates away (Automodel #2248)."""
    config = replace(BASE, compute_dtype="bfloat16", learning_rate=1e-5, steps=1, warmup_ratio=0.0)
    start = _weights(run("start", config).folder)
    moved = _weights(run("moved", replace(config, steps=40)).folder)
    state = torch.load(latest_state(run("moved", replace(config, steps=40)).folder), weights_only=True)  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in moved.values()} == {torch.float32}
    moments = [entry["exp_avg_sq"].dtype for entry in state["optimizer"]["state"].values()]
    assert set(moments) == {torch.float32}
    changed = sum(int((start[name] != moved[name]).sum()) for name in start)
    assert changed > 0.5 * sum(tensor.numel() for tensor in start.values())


def test_a_target_in_slow_bf16_is_named(
    run: Callable[..., TrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.train.prepare.multiplies_bf16", lambda: False)
    for target_dtype, said in (("float32", 0), ("bfloat16", 1)):
        lines: list[str] = []
        run(target_dtype, config=replace(BASE, steps=1, target_dtype=target_dtype), report=lines.append)
        assert sum(SLOW_BF16 in line for line in lines) == said


def test_only_the_newest_checkpoints_are_kept(run: Callable[..., TrainResult]) -> None:
    result = run()
    names = sorted(path.name for path in (result.folder / "checkpoints").iterdir())
    assert names == ["step-00000015.pt", "step-00000020.pt"]


def test_a_stored_and_an_online_run_are_the_same_run(run: Callable[..., TrainResult], tmp_path: Path) -> None:
    online = run("online", states_cache="online")
    stored = run("stored", states_cache=str(tmp_path / "cache"))
    assert _same(online.folder, stored.folder)


def test_micro_batches_train_to_the_same_weights(run: Callable[..., TrainResult]) -> None:
    whole = run("whole", replace(BASE, steps=5))
    split = run("split", replace(BASE, steps=5, micro_batch_rows=15))
    a, b = _weights(whole.folder), _weights(split.folder)
    # fp32 sums in another order, five AdamW steps of 1e-3.
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 2e-5


def test_the_draft_records_its_contract_and_its_acceptance(run: Callable[..., TrainResult]) -> None:
    result = run(config=replace(BASE, steps=3, eval_sequences=2, eval_fraction=0.2))
    config, contract = read_draft_config(result.folder)
    assert config.boundaries == BOUNDARIES
    assert contract.target_fingerprint == result.summary["target_fingerprint"]
    assert contract.training["offline_acceptance"]["sequences"] == 2
    assert config.rope.theta == 10000.0
    assert config.fc_norm
    assert config.norm_output


def test_a_warm_start_keeps_vocabulary_and_shape(run: Callable[..., TrainResult]) -> None:
    """Catches lm_head rows relabelled by a new map: SpecForge #534."""
    first = run("first", replace(BASE, steps=3, lm_head="own"))
    again = run("again", replace(BASE, steps=1, learning_rate=1e-9), init_from=first.folder)
    with_vocab = [torch.load(latest_state(r.folder), weights_only=True)["weights"] for r in (first, again)]  # type: ignore[arg-type]
    assert read_draft_config(again.folder)[0] == read_draft_config(first.folder)[0]
    # stored as fp16 in between: 11 bits.
    assert torch.allclose(
        with_vocab[0]["lm_head.weight"], with_vocab[1]["lm_head.weight"], rtol=1e-3, atol=1e-4
    )


def test_a_warm_start_at_other_boundaries_keeps_all_but_the_fusion(run: Callable[..., TrainResult]) -> None:
    first = run("first", replace(BASE, steps=3))
    config = replace(BASE, steps=1, learning_rate=1e-12)
    moved = run("moved", config, init_from=first.folder, boundaries=(2, 4))
    before, after = (torch.load(latest_state(r.folder), weights_only=True)["weights"] for r in (first, moved))  # type: ignore[arg-type]
    assert read_draft_config(moved.folder)[0].boundaries == (2, 4)
    assert after["fc.weight"].shape[1] == 2 * before["fc.weight"].shape[1] // 3
    for name in before:
        if not name.startswith("fc"):
            assert torch.allclose(before[name], after[name], rtol=1e-3, atol=1e-4), name


def test_starting_from_the_last_layer_copies_it(run: Callable[..., TrainResult], tiny_llama: Path) -> None:
    config = replace(BASE, init="last-layer", self_attending=False, steps=1, learning_rate=1e-12)
    weights = _weights(run(config=config).folder)
    layer = load_hf_model(tiny_llama).model.layers[-1]
    assert torch.allclose(weights["midlayer.mlp.up_proj.weight"], layer.mlp.up_proj.weight, atol=1e-6)
    assert torch.allclose(
        weights["midlayer.self_attn.q_proj.weight"][:, 64:], layer.self_attn.q_proj.weight, atol=1e-6
    )
    attending = _weights(run("self", replace(config, self_attending=True)).folder)
    keys = attending["midlayer.self_attn.k_proj.weight"].unflatten(0, (2, 24)).repeat_interleave(2, 0)
    assert torch.allclose(attending["midlayer.self_attn.q_proj.weight"], keys.flatten(0, 1), atol=1e-6)


def test_the_ridge_start_beats_noise_before_any_training(run: Callable[..., TrainResult]) -> None:
    config = replace(BASE, steps=1, learning_rate=1e-12, unroll=1)
    noise, ridge = run("noise", config), run("ridge", replace(config, init="ridge"))
    assert ridge.outcome.last_loss < 0.7 * noise.outcome.last_loss


def test_the_last_short_window_is_divided_by_its_own_weight(run: Callable[..., TrainResult]) -> None:
    """Its loss is a mean like any other's: with one conversation left in it, not a third of that."""
    result = run(config=replace(BASE, steps=4, learning_rate=1e-9, step_weight=1.0))
    losses = [
        json.loads(line)["loss"]
        for line in (result.folder / "metrics.jsonl").read_text().splitlines()
        if "loss" in line
    ]
    assert max(losses) < 1.5 * min(losses)


def test_the_held_out_part_barely_moves_when_data_is_added() -> None:
    config = TrainConfig(eval_fraction=0.1, eval_sequences=50)
    sequences = [TrainSequence(f"id{i}", (1, 2, 3), (False, True, True)) for i in range(400)]
    small = {s.id for s in split_held_out(sequences[:300], config)[1]}
    training, held = split_held_out(sequences, config)
    assert len(held) == 40
    assert not {s.id for s in training} & {s.id for s in held}
    assert len(small & {s.id for s in held}) > 20


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: (p / "draft").write_text("x"), "is a file"),
        (lambda p: ((p / "draft").mkdir(), (p / "draft" / "thesis.txt").write_text("x")), "not empty"),
        (
            lambda p: (
                (p / "draft").mkdir(),
                (p / "draft" / "config.json").write_text('{"model_type": "llama"}'),
            ),
            "another model",
        ),
    ],
)
def test_a_folder_in_use_for_something_else_is_refused_untouched(
    make: Callable[[Path], Any], words: str, run: Callable[..., TrainResult], tmp_path: Path
) -> None:
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecdecError, match=words):
        run()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unroll": 0}, "unroll \\(0\\)"),
        ({"batch_rows": 1.5}, "batch_rows \\(1.5\\)"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"loss": "mse"}, "must be one of kl, lk, lk-mix"),
        ({"init": "zeros"}, "must be one of ridge, random, last-layer"),
        ({"compute_dtype": "int8"}, "compute_dtype"),
        ({"steps": -5}, "steps"),
        ({"max_hours": 0.0}, "max_hours"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        TrainConfig(**change)


def test_taps_outside_the_target_are_refused(run: Callable[..., TrainResult]) -> None:
    with pytest.raises(SpecdecError, match=r"boundary \(5\) must be in 0\.\.4"):
        run(boundaries=(1, 5))
