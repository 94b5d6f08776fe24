"""An interrupted pass continues to the same bits; a file of another run is refused."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import hf
from specdec.errors import SpecdecError
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.score import LayerScores, ScoreProgress, score_layers
from specdec.layer_select.texts import CalibrationText

CONFIG = ScoreConfig(
    batch_tokens=100, estimators=("all",), probe_tokens=200, probe_heldout=60, probe_dims=16, cka_rows=40
)


def some_texts() -> list[CalibrationText]:
    generator = torch.Generator().manual_seed(0)
    return [
        CalibrationText(
            token_ids=tuple(torch.randint(0, 256, (30,), generator=generator).tolist()),
            first_kept=1,
            domain=domain,
        )
        for domain in ["code", "prose"] * 9
    ]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return hf.load_hf_model(tiny_llama)


def stop_after(batches: int) -> Callable[[ScoreProgress], None]:
    seen = []

    def progress(now: ScoreProgress) -> None:
        seen.append(now.done)
        if len(seen) == batches:
            raise KeyboardInterrupt

    return progress


def check_equal(first: LayerScores, second: LayerScores) -> None:
    for each in fields(LayerScores):
        one, other = getattr(first, each.name), getattr(second, each.name)
        if isinstance(one, Tensor):
            assert torch.equal(one, other), each.name
        elif isinstance(one, dict):
            assert list(one) == list(other)
            assert all(torch.equal(one[name], other[name]) for name in one), each.name
        elif each.name not in ("seconds", "costs", "probe"):
            assert one == other, each.name
    assert first.probe is not None
    assert second.probe is not None
    subsets = [(1,), (0, 2, 4), (1, 2, 3)]
    assert torch.equal(first.probe.explained(subsets), second.probe.explained(subsets))
    assert first.probe.score(subsets) == second.probe.score(subsets)


@pytest.mark.parametrize("stops", [[1], [2, 1, 1]])
def test_interrupted_passes_continue_to_the_bits_of_a_whole_one(
    model: Any, tmp_path: Path, stops: list[int]
) -> None:
    path = tmp_path / "pass.resume"
    texts = some_texts()
    whole = score_layers(model, texts, CONFIG)
    assert whole.num_batches > 4
    for batches in stops:
        with pytest.raises(KeyboardInterrupt):
            score_layers(model, texts, CONFIG, resume=path, progress=stop_after(batches))
    done: list[int] = []
    resumed = score_layers(model, texts, CONFIG, resume=path, progress=lambda now: done.append(now.done))
    assert len(done) == whole.num_batches - sum(stops)
    check_equal(whole, resumed)
    assert [each.name for each in tmp_path.iterdir()] == ["pass.resume"]


def test_a_complete_pass_is_read_back_without_a_forward(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "pass.resume"
    whole = score_layers(model, some_texts(), CONFIG, resume=path)
    done: list[ScoreProgress] = []
    check_equal(whole, score_layers(model, some_texts(), CONFIG, resume=path, progress=done.append))
    assert done == []


def test_an_interrupt_inside_a_batch_or_a_write_leaves_the_last_whole_batch(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a file cut short by Ctrl-C, and sums that a half-measured batch has already changed."""
    path = tmp_path / "pass.resume"
    with pytest.raises(KeyboardInterrupt):
        score_layers(model, some_texts(), CONFIG, resume=path, progress=stop_after(2))
    before = path.read_bytes()
    save, calls = torch.save, []

    def cut_short(content: Any, target: Any) -> None:
        calls.append(1)
        Path(target).write_bytes(before[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", cut_short)
    with pytest.raises(KeyboardInterrupt):
        score_layers(model, some_texts(), CONFIG, resume=path)
    monkeypatch.setattr(torch, "save", save)
    assert calls
    assert path.read_bytes() == before
    check_equal(
        score_layers(model, some_texts(), CONFIG), score_layers(model, some_texts(), CONFIG, resume=path)
    )


def test_a_file_of_another_run_is_refused_saying_what_differs(
    model: Any, tmp_path: Path, tiny_model_factory: Callable[..., Path]
) -> None:
    path = tmp_path / "pass.resume"
    texts = some_texts()
    score_layers(model, texts, CONFIG, resume=path)
    before = path.read_bytes()
    other = hf.load_hf_model(tiny_model_factory("llama", seed=5))
    for arguments, what in (
        ((other, texts, CONFIG), "other target;"),
        ((model, texts[1:], CONFIG), "other texts;"),
        ((model, [replace(text, domain="") for text in texts], CONFIG), "other texts;"),
        ((model, texts, replace(CONFIG, seed=1)), "other settings;"),
        ((model, texts[1:], replace(CONFIG, seed=1)), "other texts and settings;"),
    ):
        with pytest.raises(SpecdecError, match=what):
            score_layers(*arguments, resume=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"no tensor file", b"PK\x03\x04 cut"])
def test_a_file_that_is_no_saved_pass_is_refused_and_kept(model: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "precious.txt"
    path.write_bytes(content)
    with pytest.raises(SpecdecError, match=r"precious\.txt"):
        score_layers(model, some_texts(), CONFIG, resume=path)
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_written_is_an_error_naming_the_file(model: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="absent"):
        score_layers(model, some_texts(), CONFIG, resume=tmp_path / "absent" / "pass.resume")
