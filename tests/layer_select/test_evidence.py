"""Block influence and cosine to the final state, against scikit-learn."""

import pytest
import torch
from sklearn.metrics.pairwise import paired_cosine_distances

from specdec.layer_select.evidence import block_influence, cosine_to_final

TOLERANCE = 1e-6


def test_block_influence_and_final_cosine_agree_with_scikit_learn() -> None:
    states = torch.randn(5, 30, 12, dtype=torch.float64).cumsum(dim=0) * 7 + 1
    x = states.numpy()
    moved = [paired_cosine_distances(x[b], x[b + 1]).mean() for b in range(4)]
    near = [1 - paired_cosine_distances(x[b], x[4]).mean() for b in range(5)]
    assert block_influence(states).tolist() == pytest.approx(moved, abs=TOLERANCE)
    assert cosine_to_final(states).tolist() == pytest.approx(near, abs=TOLERANCE)


def test_a_block_that_only_lengthens_the_stream_has_no_influence_and_one_that_turns_it_back_two() -> None:
    state = torch.randn(20, 8)
    influence = block_influence(torch.stack([state, 3 * state, -3 * state]))
    assert influence.tolist() == pytest.approx([0.0, 2.0], abs=1e-6)


def test_zero_states_count_as_unlike_anything_without_nan() -> None:
    states = torch.stack([torch.zeros(6, 4), torch.randn(6, 4)])
    assert block_influence(states).tolist() == [1.0]
    assert cosine_to_final(states).tolist() == pytest.approx([0.0, 1.0])
