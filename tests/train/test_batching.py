"""Which slots carry loss, and how sequences become batches."""

from __future__ import annotations

import torch

from specdec.train.batching import (
    epoch_plan,
    sample_depths,
    sequence_weights,
    shared_prefix_len,
    slot_weights,
    split_micro,
)
from specdec.train.config import TrainConfig
from specdec.train.sequences import TrainSequence


def _slots(weights: torch.Tensor, step: int, ids: list[str]) -> dict[int, str]:
    return {row: ids[row + step + 2] for row in torch.nonzero(weights[step]).flatten().tolist()}


def test_a_slot_carries_loss_exactly_when_it_predicts_answer_text() -> None:
    """Catches a mask not shifted with the targets (SpecForge #885, speculators #865); table by hand."""
    ids = ["BOS", "u1", "u2", "A1", "A2", "A3", "EOT"]
    trained = torch.tensor([name[0] == "A" or name == "EOT" for name in ids])
    weights = slot_weights(trained, 3)
    assert weights.shape == (3, 6)
    assert _slots(weights, 0, ids) == {1: "A1", 2: "A2", 3: "A3", 4: "EOT"}
    assert _slots(weights, 1, ids) == {0: "A1", 1: "A2", 2: "A3", 3: "EOT"}
    assert _slots(weights, 2, ids) == {0: "A2", 1: "A3", 2: "EOT"}


def test_the_last_slots_of_a_document_carry_no_loss() -> None:
    """At step s the last s+1 rows have nothing to predict: labels that cross a border would be used there."""
    weights = slot_weights(torch.ones(8, dtype=torch.bool), 4)
    for step in range(4):
        assert weights[step].tolist() == [1.0] * (6 - step) + [0.0] * (step + 1)


def test_step_weights_fall_geometrically() -> None:
    weights = slot_weights(torch.ones(9, dtype=torch.bool), 3, step_weight=0.5)
    assert weights[:, 0].tolist() == [1.0, 0.5, 0.25]


def _sequence(ids: list[int], prompt: int) -> TrainSequence:
    return TrainSequence("x", tuple(ids), tuple(i >= prompt for i in range(len(ids))))


def test_prompt_rows_are_trained_only_when_asked_and_never_on_the_shared_prefix() -> None:
    sequence = _sequence([1, 2, 3, 4, 5, 6], 4)
    off = sequence_weights(sequence, TrainConfig(prompt_rows=False, unroll=1), 2)
    on = sequence_weights(sequence, TrainConfig(prompt_rows=True, prompt_row_weight=0.5, unroll=1), 3)
    assert off[0].tolist() == [0, 0, 1, 1, 0]
    assert on[0].tolist() == [0, 0.5, 1, 1, 0]


def test_the_shared_prefix_is_what_all_sequences_begin_with() -> None:
    sequences = [_sequence([1, 2, 3, 9], 3), _sequence([1, 2, 4, 9], 3), _sequence([1, 2, 3, 8], 3)]
    assert shared_prefix_len(sequences) == 2
    assert shared_prefix_len(sequences[:1]) == 0


def test_an_epoch_visits_every_sequence_once_in_an_order_of_its_own() -> None:
    rows = [5, 9, 3, 7, 8, 2, 6, 4]
    first, second = epoch_plan(rows, 12, 0, 0), epoch_plan(rows, 12, 0, 1)
    assert sorted(i for batch in first for i in batch) == list(range(8))
    assert first != second
    assert first == epoch_plan(rows, 12, 0, 0)
    assert all(sum(rows[i] for i in batch) <= 12 + 9 / 2 for batch in first)


def test_micro_batches_keep_order_and_limit() -> None:
    assert split_micro([0, 1, 2, 3], [5, 5, 5, 20], 10) == [[0, 1], [2], [3]]


def test_depth_sampling_keeps_the_expected_weights() -> None:
    weights = slot_weights(torch.ones(20_003, dtype=torch.bool), 3, step_weight=0.8)[:, :20_000]
    sampled = sample_depths(weights, 0.8, torch.Generator().manual_seed(0))
    assert bool(((sampled == 0) | ((sampled - 1).abs() < 1e-6)).all())
    # 20,000 draws: three standard deviations of a share are below 0.011.
    assert torch.allclose(sampled.mean(1), torch.tensor([1.0, 0.8, 0.64]), atol=0.011)
    # a chain that goes on to a step has also taken the ones before it.
    assert bool(((sampled[1:] > 0) <= (sampled[:-1] > 0)).all())
