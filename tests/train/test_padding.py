"""Padding, packing and splitting change nothing: the loop's own gradients, from a target's padded forward on.

A batch has filler in two places. The target reads conversations side by side, short ones padded to the
longest; and where several processes share a batch, one without work repeats a conversation for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafts.vocab import DraftVocab
from specdec.hf import load_hf_model
from specdec.train import states as states_module
from specdec.train.config import TrainConfig
from specdec.train.head_init import head_weight
from specdec.train.head_start import start_head
from specdec.train.processes import Processes
from specdec.train.sequences import TrainSequence
from specdec.train.states import TargetStates
from specdec.train.trainer import Trainer

# fp32 sums in another order; gradients here are of the size of 0.1
CLOSE = 1e-6
# very different lengths: most of the padded forward of this batch is filler
LENGTHS = (5, 97, 12, 41, 7)
BOUNDARIES = (1, 3, 4)


class _OneOfTwo(Processes):
    """One of two processes that exchange nothing: what it computes by itself is what is looked at."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    @property
    def world(self) -> int:
        return 2

    @property
    def rank(self) -> int:
        return self._rank

    def total(self, values: Tensor) -> Tensor:
        return values

    def start_alike(self, module: torch.nn.Module) -> None:
        pass

    @contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        yield


@pytest.fixture(scope="module")
def source(tiny_llama: Path) -> TargetStates:
    """A target in fp64: its states do not depend on how many others are computed beside them.

    In fp32 they do by an ulp or so, which the fp16 of stored taps turns into 1e-3 where one falls on the
    border between two numbers.
    """
    return TargetStates(load_hf_model(tiny_llama).double(), BOUNDARIES)


@pytest.fixture(scope="module")
def sequences() -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(1, 200, (length,), generator=generator).tolist()
        found.append(TrainSequence(f"s{number}", tuple(ids), tuple(place >= 3 for place in range(length))))
    return found


@pytest.fixture
def trainer(source: TargetStates, sequences: list[TrainSequence], tmp_path: Path) -> Callable[..., Trainer]:
    """Call with processes and options: a trainer of the same head every time."""

    def make(processes: Processes | None = None, **options: Any) -> Trainer:
        config = TrainConfig(
            draft_vocab_size=64, unroll=3, compute_dtype="float32", init="random", seed=2, **options
        )
        vocab = DraftVocab(torch.arange(64) * 4, head_weight(source.model).shape[0])
        head = start_head(source.model, BOUNDARIES, vocab, sequences, source, config).head.float()
        return Trainer(
            head,
            sequences,
            source,
            config,
            tmp_path,
            contract={},
            report=lambda line: None,
            on_evaluate=lambda step, weights: {},
            processes=processes or Processes(),
        )

    return make


def _gradients(trainer: Trainer, batch: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss of a batch and the gradient of every trained weight, both per trained slot."""
    trainer.optimizer.zero_grad(set_to_none=True)
    found, _ = trainer.gradients(batch, measure=False)
    named = trainer.head.named_parameters()
    return found.loss, {name: p.grad.clone() for name, p in named if p.grad is not None}


def _slots(trainer: Trainer, batch: Sequence[int]) -> float:
    return sum(float(trainer.weights[index].sum()) for index in batch)


def _require_close(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], abs=CLOSE)
    assert one[1].keys() == other[1].keys()
    assert any(bool(gradient.abs().max() > 100 * CLOSE) for gradient in other[1].values())
    for name, gradient in one[1].items():
        assert float((gradient - other[1][name]).abs().max()) < CLOSE, name


def test_padding_changes_no_loss_and_no_gradient(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of conversations of very different lengths is the mean of each alone, by trained slots."""
    work = trainer()
    shapes: list[tuple[int, ...]] = []
    run_decoder = states_module.run_decoder

    def watched(model: Any, ids: Tensor) -> Any:
        shapes.append(tuple(ids.shape))
        return run_decoder(model, ids)

    monkeypatch.setattr(states_module, "run_decoder", watched)
    batch = range(len(LENGTHS))
    together = _gradients(work, batch)
    assert shapes == [(len(LENGTHS), max(LENGTHS))], "the batch must be read in one padded forward"
    shapes.clear()
    loss, gradients = 0.0, {name: torch.zeros_like(g) for name, g in together[1].items()}
    for index in batch:
        part = _slots(work, [index]) / _slots(work, batch)
        alone = _gradients(work, [index])
        loss += part * alone[0]
        for name, gradient in alone[1].items():
            gradients[name] += part * gradient
    assert shapes == [(1, length) for length in LENGTHS], "alone there must be nothing to pad"
    _require_close(together, (loss, gradients))


def test_what_stands_in_the_padding_changes_nothing(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: the forward has the same shape, only the ids behind each conversation are others."""
    work, batch = trainer(), range(len(LENGTHS))
    zeros = _gradients(work, batch)
    run_decoder = states_module.run_decoder
    filled: list[int] = []

    def poisoned(model: Any, ids: Tensor) -> Any:
        generator = torch.Generator().manual_seed(1)
        noise = torch.randint(1, 200, ids.shape, generator=generator)
        ends = torch.tensor(sorted(LENGTHS)).unsqueeze(1)
        padding = torch.arange(ids.shape[1]) >= ends
        assert not ids[padding].any()
        filled.append(int(padding.sum()))
        return run_decoder(model, torch.where(padding, noise, ids))

    monkeypatch.setattr(states_module, "run_decoder", poisoned)
    others = _gradients(work, batch)
    assert filled == [len(LENGTHS) * max(LENGTHS) - sum(LENGTHS)]
    assert others[0] == zeros[0]
    assert all(torch.equal(gradient, zeros[1][name]) for name, gradient in others[1].items())


def test_a_process_without_work_adds_no_loss_and_no_gradient(trainer: Callable[..., Trainer]) -> None:
    """Of one conversation and two processes, one repeats it as filler: all its gradients are zero."""
    busy, idle = (_gradients(trainer(_OneOfTwo(rank)), [1]) for rank in (0, 1))
    assert idle[0] == 0.0
    assert idle[1], "the filler must run backward, or the others would wait for it"
    assert not any(bool(gradient.any()) for gradient in idle[1].values())
    alone = _gradients(trainer(), [1])
    # every process's gradient counts once in a mean over two
    _require_close((busy[0], {name: gradient / 2 for name, gradient in busy[1].items()}), alone)


@pytest.mark.parametrize("rows", [1, 60])
def test_splitting_a_packed_batch_changes_no_gradient_of_the_loop(
    rows: int, trainer: Callable[..., Trainer]
) -> None:
    """At one row a pass every conversation is by itself, so this is also packed against unpacked."""
    batch = range(len(LENGTHS))
    _require_close(_gradients(trainer(micro_batch_rows=rows), batch), _gradients(trainer(), batch))
