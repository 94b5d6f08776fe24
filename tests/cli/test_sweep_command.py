"""`specdec sweep`: costs by the stated formulas, priced positions shared out, dominated points marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot

from specdec.audit.parity import Task
from specdec.audit.pricing import Prices
from specdec.audit.recording import VerifiedStep
from specdec.cli.main import main
from specdec.cli.sweeping.cost import (
    DraftCost,
    draft_cost,
    flops_per_token,
    row_flops,
    target_weights,
)
from specdec.cli.sweeping.measure import decode
from specdec.cli.sweeping.picture import draw_sweep
from specdec.cli.sweeping.points import AXES, check_lossy, grid, mark_dominated, parse_rule
from specdec.config import EngineConfig, ModelConfig
from specdec.drafts import PRETRAINED
from specdec.engine import Engine
from specdec.errors import SpecdecError, UsageError
from specdec.sampling_params import SamplingParams


def test_every_batch_of_tasks_has_its_share_of_the_priced_positions(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long first answers must not leave the last, hardest tasks unpriced."""
    tasks = [
        Task(
            id=str(index),
            category="x",
            difficulty=index,
            token_ids=[3, 4 + index],
            is_right=lambda text: True,
        )
        for index in range(6)
    ]
    base = Engine(tiny_llama, config=EngineConfig(max_num_seqs=2, kv_tokens=256))
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=0, ignore_eos=True)
    prices = Prices(law_at=lambda p, q: p, params=params, limit=30)
    after = []
    real = prices.take

    def counted(steps: list[VerifiedStep], *, share: float) -> None:
        real(steps, share=share)
        after.append(prices.positions)

    monkeypatch.setattr(prices, "take", counted)
    decode(base, tasks, params, 2, prices)
    assert after == [10, 20, 30]


def test_the_picture_is_drawn_without_pyplot_and_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {
        "draft": "ngram",
        "rule": "exact",
        "shape": "chain:3",
        "batch_size": 1,
        "dominated": False,
        "verify_cpu_ms_per_token": 3.0,
        "total_variation": 0.1,
        "total_variation_drafted": 0.2,
        "rejection_rate": 0.5,
        "draft_total_variation": 0.6,
    }
    path = tmp_path / "sweep.png"
    path.write_bytes(b"old")
    before = dict(matplotlib.rcParams)
    draw_sweep([figures], path, title="T")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["sweep.png"]
    assert pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


def test_flops_follow_the_formula(tiny_llama: Path) -> None:
    """Counted by hand for the tiny Llama: 4 layers, hidden 64, 4 heads over 2 KV heads of 24, MLP 96."""
    config = ModelConfig.from_folder(tiny_llama)
    layer = 64 * 96 + 2 * 64 * 48 + 96 * 64 + 3 * 64 * 96
    assert target_weights(config) == 4 * layer + config.vocab_size * 64
    width = 4 * 4 * 24
    found = flops_per_token(config, DraftCost(), verify_steps=10, drafted=30, committed=20, context=50.0)
    assert found is not None
    assert found[0] == pytest.approx(2 * (2 * target_weights(config) + 4 * width * 50.0))
    assert found[1] == 0.0
    assert row_flops(0, width, 50.0) == 4 * width * 50.0
    assert flops_per_token(config, DraftCost(), verify_steps=0, drafted=0, committed=0, context=1.0) is None


def test_the_shipped_draft_costs_what_its_record_says() -> None:
    cost = draft_cost("smollm2-135m")
    assert draft_cost("ngram+smollm2-135m") == cost
    config = json.loads((PRETRAINED / "smollm2-135m" / "config.json").read_text())
    tokens = config["specdec"]["training"]["answer_tokens"]
    assert cost.training_target_tokens == tokens > 300_000
    assert cost.training_tap_bytes == tokens * 3 * 576 * 2
    assert cost.weights > 16384 * 576
    assert cost.memory_bytes(10) == cost.weight_bytes + 10 * (4 * 2 * 3 * 64 + 4 * 3 * 576)
    assert draft_cost("ngram") == DraftCost()
    with pytest.raises(SpecdecError, match="nowhere"):
        draft_cost("nowhere")


def point(label: str, batch: int = 1, **values: float | None) -> dict[str, Any]:
    return {"label": label, "batch_size": batch, **dict.fromkeys(AXES, 1.0), **values}


def test_dominated_points_are_marked() -> None:
    """Better on one axis and no worse on the others; more acceptance is better; batches do not mix."""
    points = [
        point("a", acceptance_length=2.0),
        point("b", acceptance_length=1.5),
        point("c", acceptance_length=2.5, total_variation=1.2),
        point("d", batch=8, acceptance_length=1.0),
        point("e", acceptance_length=1.0, total_variation=None),
        point("a again", acceptance_length=2.0),
    ]
    assert mark_dominated(points) == [[], ["a", "a again"], [], [], [], []]


def test_the_grid_begins_with_plain_decoding() -> None:
    points = grid(["x", "y"], ["exact"], ["chain:2", "chain:3"], [1, 4])
    assert [point.label for point in points[:2]] == ["none, exact, -, batch 1", "none, exact, -, batch 4"]
    assert len(points) == 2 + 8
    assert len({point.key({"seed": 0}, None) for point in points}) == 10
    assert points[3].key({"seed": 0}, "a") != points[3].key({"seed": 1}, "a")
    assert points[3].key({"seed": 0}, "a") != points[3].key({"seed": 0}, "b")
    with pytest.raises(UsageError, match="--rule"):
        grid(["x"], ["exact", "exact"], ["chain:2"], [1])


def test_rules_are_spelled_with_their_knobs() -> None:
    bound = parse_rule("typical:epsilon=0.2,fallback=target")
    assert bound is not None
    assert "epsilon=0.2" in bound.label
    assert "fallback=target" in bound.label
    assert parse_rule("exact") is None
    with pytest.raises(SpecdecError, match="no knob"):
        parse_rule("block:x=1")
    with pytest.raises(SpecdecError):
        parse_rule("lenience:lenience=7")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rule", "lenience"], "--lossy"),
        (["--rule", "block", "--lossy", "--exact"], "--exact"),
        (["--rule", "block", "--shape", "bush"], "--shape"),
        (["--rule", "lenience", "--lossy", "--temperature", "0"], "--temperature"),
    ],
)
def test_lossy_never_by_accident(
    tiny_llama: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(tiny_llama), "--out", str(tmp_path / "s"), *words]) == 2
    assert message in capsys.readouterr().err
    check_lossy(["block", "exact"], lossy=False, exact=True)
