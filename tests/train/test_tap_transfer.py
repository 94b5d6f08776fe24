"""Moving a trained head to other boundaries: the fusion is the best linear one, the rest is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import Ridge

from specdec.drafts.eagle3 import Eagle3Head
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.layer_select.ridge import RIDGE_PENALTY
from specdec.train.config import TrainConfig
from specdec.train.head_init import build_head, head_weight
from specdec.train.head_start import choose_vocab
from specdec.train.sequences import TrainSequence
from specdec.train.states import TargetStates
from specdec.train.tap_transfer import move_head

OLD = (1, 3, 4)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load_hf_model(tiny_llama)


@pytest.fixture(scope="module")
def sequences() -> list[TrainSequence]:
    generator = torch.Generator().manual_seed(4)
    return [
        TrainSequence(
            f"s{n}", tuple(torch.randint(0, 200, (40,), generator=generator).tolist()), (True,) * 40
        )
        for n in range(20)
    ]


@pytest.fixture
def make_head(model: Any, sequences: list[TrainSequence], tiny_tokenizer: Any) -> Callable[..., Eagle3Head]:
    def make(**options: Any) -> Eagle3Head:
        config = TrainConfig(draft_vocab_size=100, init="random", self_attending=False, **options)
        vocab = choose_vocab(sequences, tiny_tokenizer, model, model.config.vocab_size, config)
        return build_head(model, OLD, vocab, config, torch.ones(3))

    return make


@pytest.mark.parametrize("fc_norm", [True, False])
def test_a_head_moved_to_its_own_boundaries_stays_the_same(
    fc_norm: bool, model: Any, sequences: list[TrainSequence], make_head: Callable[..., Eagle3Head]
) -> None:
    """The fit finds the fusion that made the features, up to what the penalty shrinks."""
    head = make_head(fc_norm=fc_norm)
    moved, explained = move_head(head, OLD, model, head_weight(model), sequences)
    assert explained > 0.99
    states = TargetStates(model, OLD).fetch(sequences[:1])[0].taps.float()
    assert (moved.fuse(states)[1:] - head.fuse(states)[1:]).std() < 0.1 * head.fuse(states)[1:].std()


@pytest.mark.parametrize("boundaries", [(2,), (2, 3), (0, 1, 2, 4)])
def test_the_new_fusion_is_the_ridge_regression_of_the_old_feature(
    boundaries: tuple[int, ...],
    model: Any,
    sequences: list[TrainSequence],
    make_head: Callable[..., Eagle3Head],
) -> None:
    head = make_head()
    moved, explained = move_head(head, boundaries, model, head_weight(model), sequences)
    x = torch.cat(
        [moved.tap_rows(s.taps[1:].float()) for s in TargetStates(model, boundaries).fetch(sequences)]
    )
    y = torch.cat([head.fuse(s.taps[1:].float()) for s in TargetStates(model, OLD).fetch(sequences)])
    x, y = x.detach().double(), y.detach().double()
    penalty = RIDGE_PENALTY * float(x.square().sum(0).mean())
    reference = Ridge(alpha=penalty, fit_intercept=False).fit(x.numpy(), y.numpy())
    torch.testing.assert_close(
        moved.fc.weight.detach().double(), torch.from_numpy(reference.coef_), rtol=1e-3, atol=1e-5
    )
    left = (y - torch.from_numpy(reference.predict(x.numpy()))).square().sum()
    assert explained == pytest.approx(1 - float(left / (y - y.mean(0)).square().sum()), abs=1e-3)


def test_no_data_is_refused(model: Any, make_head: Callable[..., Eagle3Head]) -> None:
    with pytest.raises(SpecdecError, match="cannot be moved"):
        move_head(make_head(), (2,), model, head_weight(model), [])
