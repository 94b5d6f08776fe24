"""The learning rate over a run, and what the steps of an epoch are."""

from __future__ import annotations

import pytest

from specdec.train.batching import epoch_plan
from specdec.train.config import TrainConfig
from specdec.train.schedule import learning_rate


def test_rates_warm_up_and_end_at_the_minimum() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_ratio=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(step, 10, config) for step in range(10)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_stable_rate_falls_in_a_line_at_the_end() -> None:
    config = TrainConfig(
        learning_rate=1.0, warmup_ratio=0.2, min_lr_ratio=0.1, schedule="wsd", decay_ratio=0.4
    )
    rates = [learning_rate(step, 10, config) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])


def test_a_window_cut_short_by_the_end_of_an_epoch_is_a_step_of_its_own() -> None:
    """Catches windows thrown away, and a rate that ends early (Automodel #2257, #2369)."""
    plans = [epoch_plan([10] * 10, 40, 0, epoch) for epoch in range(2)]
    assert [len(batch) for plan in plans for batch in plan] == [4, 4, 2, 4, 4, 2]
    config = TrainConfig(learning_rate=1.0, min_lr_ratio=0.1)
    assert [learning_rate(step, 6, config) > 0.1 + 1e-9 for step in range(6)] == [True] * 5 + [False]
