"""What a run leaves beside its weights: averages, speed and memory, the log, the picture, trackers, plans."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from specdec.cli.main import main
from specdec.drafts.checkpoint import load_draft
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.train.checkpoint import latest_state
from specdec.train.config import TrainConfig
from specdec.train.curve import draw_curve
from specdec.train.run import TrainResult, train_draft
from specdec.train.trackers import check_tracker

BOUNDARIES = (1, 3, 4)
BASE = TrainConfig(
    draft_vocab_size=64,
    unroll=3,
    batch_rows=40,
    steps=4,
    compute_dtype="float32",
    init="random",
    eval_sequences=0,
    log_every=1,
)


@pytest.fixture(scope="module")
def answers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten conversations of 6 + 16 tokens."""
    model = load_hf_model(tiny_llama)
    prompts = torch.randint(0, 200, (10, 6), generator=torch.Generator().manual_seed(0))
    texts = model.generate(prompts, max_new_tokens=16, do_sample=False, eos_token_id=None).tolist()
    path = tmp_path_factory.mktemp("answers") / "responses.jsonl"
    path.write_text(
        "".join(
            json.dumps({"id": f"p{number}", "prompt_token_ids": ids[:6], "response_token_ids": ids[6:]})
            + "\n"
            for number, ids in enumerate(texts)
        )
    )
    return path


@pytest.fixture
def run(tiny_llama: Path, answers: Path, tmp_path: Path) -> Callable[..., TrainResult]:
    def start(name: str = "draft", config: TrainConfig = BASE, **options: Any) -> TrainResult:
        return train_draft(
            tiny_llama, boundaries=BOUNDARIES, data=answers, out=tmp_path / name, config=config, **options
        )

    return start


@pytest.fixture
def words(tiny_llama: Path, answers: Path, tmp_path: Path) -> list[str]:
    """A command line of the same run."""
    named = ["--layers", "1,3,4", "--data", str(answers), "--out", str(tmp_path / "draft")]
    small = ["--steps", "4", "--batch-tokens", "40", "--draft-vocab-size", "64", "--unroll", "3"]
    quick = ["--init", "random", "--dtype", "float32", "--eval-sequences", "0"]
    return ["train", str(tiny_llama), *named, *small, *quick]


def test_averaged_weights_are_what_is_saved_as_a_draft(
    run: Callable[..., TrainResult], tiny_llama: Path
) -> None:
    result = run(config=replace(BASE, steps=6, ema=0.7, learning_rate=1e-2))
    state = torch.load(latest_state(result.folder), weights_only=True)  # type: ignore[arg-type]
    model = load_hf_model(tiny_llama)
    embed, rows = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    saved = load_draft(result.folder, embed, rows).head.state_dict()
    for name, tensor in state["average"].items():
        assert torch.equal(saved[name].float(), tensor.half().float()), name
        assert not torch.equal(tensor, state["weights"][name]), name


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
    ],
)
def test_memory_that_runs_out_names_what_to_lower(
    error: RuntimeError, run: Callable[..., TrainResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise error

    monkeypatch.setattr("specdec.train.objective.unrolled_loss", full)
    with pytest.raises(
        SpecdecError, match=r"step 1: \d+ rows .* longest conversation 22 tokens, draft vocabulary 64"
    ):
        run()


def test_a_run_tells_its_speed_its_memory_and_its_course(run: Callable[..., TrainResult]) -> None:
    """Accepted tokens are those of the engine too, where asked for, and the picture is there at the end."""
    result = run(
        config=replace(
            BASE, steps=4, eval_every=2, accept_every=4, eval_fraction=0.2, eval_sequences=2, accept_tokens=6
        )
    )
    summary = result.summary
    assert 0 < summary["flop_utilisation"] < 1
    assert summary["answer_tokens_per_second"] > 0
    parts = summary["memory_parts"]
    assert summary["memory_parts_sum"] == sum(parts.values())
    # other tests of this process may have held more than this run ever did
    assert max(parts["program"], parts["weights"]) <= summary["peak_bytes"]
    assert 1.0 <= summary["engine_acceptance_length"] <= 1 + BASE.eval_depth
    entries = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    measured = {entry["step"]: entry["eval"] for entry in entries if "eval" in entry}
    assert "engine" not in measured[2]
    assert measured[4]["engine"]["tokens"] == 2 * 6 - 2
    assert (result.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    loss, simulated, length = cast(Any, draw_curve(entries).axes)
    assert loss.lines[0].get_ydata().tolist() == [entry["loss"] for entry in entries if "loss" in entry]
    assert len(simulated.lines) == BASE.unroll
    assert [line.get_xdata().tolist() for line in length.lines] == [[2, 4], [4]]


@pytest.mark.parametrize(("native", "settled"), [(True, "bfloat16"), (False, "float32")])
def test_products_are_in_what_the_processor_multiplies_and_the_record_says_so(
    run: Callable[..., TrainResult], monkeypatch: pytest.MonkeyPatch, native: bool, settled: str
) -> None:
    """Products of bf16 numbers on a processor without them once made training seven times as slow."""
    monkeypatch.setattr("specdec.train.precision.multiplies_bf16", lambda: native)
    started = replace(BASE, compute_dtype="auto")
    result = run(config=started)
    assert result.config == replace(BASE, compute_dtype=settled)
    state = torch.load(cast(Path, latest_state(result.folder)), weights_only=True)
    assert state["contract"]["compute_dtype"] == settled
    monkeypatch.setattr("specdec.train.precision.multiplies_bf16", lambda: not native)
    with pytest.raises(SpecdecError, match="compute_dtype"):
        run(config=started)


def test_a_plan_is_what_the_run_then_takes(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes on disk within 5 % (the memory row of faults), steps exactly; nothing is written by planning."""
    words = [*words, "--states-cache", str(tmp_path / "cache"), "--ema", "0.9", "--keep", "1"]
    assert main([*words, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not (tmp_path / "draft").exists()
    assert not (tmp_path / "cache").exists()
    assert main(words) == 0
    ran = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["steps"] == ran["steps"] == 4
    assert plan["answer_tokens"] == ran["answer_tokens"] == 160
    assert plan["seconds"] > 0
    [store] = (tmp_path / "cache").glob("*/states.bin")
    assert plan["states_bytes"] == pytest.approx(store.stat().st_size, rel=0.05)
    [checkpoint] = (tmp_path / "draft" / "checkpoints").iterdir()
    assert plan["checkpoint_bytes"] == pytest.approx(checkpoint.stat().st_size, rel=0.05)
    state = torch.load(checkpoint, weights_only=True)["weights"]
    assert plan["trained_parameters"] == sum(tensor.numel() for tensor in state.values())
    memory = {key: value for key, value in ran["memory_parts"].items() if key != "program"}
    assert plan["memory"] == memory


def test_a_plan_for_a_full_disk_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    assert main([*words, "--dry-run"]) == 1
    assert "free space, lower --keep" in capsys.readouterr().err


def test_options_come_from_a_file_and_the_command_line_counts_before_it(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.toml"
    file.write_text("lr = 1e-3\nsteps = 3\nema = 0.5\nkeep_checkpoints = 1\n")
    assert main([*words, "--config", str(file)]) == 2
    assert "keep_checkpoints is no option; options are" in capsys.readouterr().err
    file.write_text('lr = 1e-3\nsteps = 3\nbatch_tokens = 50\nschedule = "wsd"\n')
    assert main([*words, "--config", str(file)]) == 0
    record = json.loads((tmp_path / "draft" / "run.json").read_text())
    assert record["defaults"]["learning_rate"] == 1e-3
    assert record["defaults"]["schedule"] == "wsd"
    assert record["defaults"]["batch_rows"] == 40
    assert record["extra"]["steps"] == 4
    file.write_text("lr = 'fast'\n")
    assert main([*words, "--config", str(file)]) == 2


def test_a_tracker_that_is_not_there_is_refused_before_anything_is_done(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecdecError, match=r"tracker \(abacus\) must be one of .*tensorboard, trackio"):
        check_tracker("abacus")
    monkeypatch.setattr("specdec.train.trackers.get_available_trackers", list)
    assert main([*words, "--tracker", "trackio"]) == 1
    assert "pip install trackio" in capsys.readouterr().err
    assert not (tmp_path / "draft").exists()


def test_tensorboard_gets_the_numbers_of_the_log(run: Callable[..., TrainResult]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    folder = run(tracker="tensorboard").folder
    events = event_accumulator.EventAccumulator(str(folder / "specdec"))
    events.Reload()
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in entries if "loss" in entry]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses, rel=1e-6)
    assert "greedy/1" in events.Tags()["scalars"]


def test_a_checkpoint_older_than_an_option_stands_for_its_default(run: Callable[..., TrainResult]) -> None:
    folder = run(config=replace(BASE, steps=2)).folder
    path = latest_state(folder)
    assert path is not None
    state = torch.load(path, weights_only=True)
    for name in ("schedule", "ema", "decay_ratio"):
        del state["contract"][name]
    torch.save(state, path)
    assert run(config=replace(BASE, steps=2)).outcome.new_steps == 0
    with pytest.raises(SpecdecError, match=r"^schedule \(wsd\) differs .* \(cosine\)"):
        run(config=replace(BASE, steps=2, schedule="wsd"))


def test_the_time_of_a_step_is_told_by_part(run: Callable[..., TrainResult]) -> None:
    summary = run().summary
    assert set(summary["seconds_by_part"]) == {"states", "forward and loss", "backward", "optimiser"}
    assert sum(summary["seconds_by_part"].values()) <= summary["seconds"] + 0.1
