"""Informativeness estimators agree with independent formulations and stay defined on degenerate input."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.entropy import (
    ESTIMATORS,
    TextStates,
    estimator_named,
    gram_spectrum,
    matrix_entropy,
    spectral_entropy,
)
from specdec.layer_select.rows import center, normalize_rows, require_finite

# both sides compute in float64; the decompositions differ (eigenvalues against singular values).
TOLERANCE = 1e-6


def reference_entropy(states: Tensor, *, prepared: bool) -> float:
    """Entropy from singular values by numpy and scipy, an independent route to the same number."""
    x = states.double().numpy()
    if prepared:
        x = x - x.mean(axis=0)
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    squared = scipy.linalg.svdvals(x) ** 2
    return float(scipy.stats.entropy(squared / squared.sum()))


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9), (2, 5), (100, 33)])
@pytest.mark.parametrize("prepared", [True, False])
def test_matrix_entropy_agrees_with_singular_values(shape: tuple[int, int], prepared: bool) -> None:
    states = torch.randn(3, *shape, dtype=torch.float64) + 2
    text = TextStates(states=states, center=prepared, row_normalize=prepared)
    expected = [reference_entropy(one, prepared=prepared) / math.log(min(shape)) for one in states]
    assert matrix_entropy(text).tolist() == pytest.approx(expected, abs=TOLERANCE)
    rank = ESTIMATORS["effective_rank"].compute(text)
    expected_rank = [math.exp(reference_entropy(one, prepared=prepared)) / min(shape) for one in states]
    assert rank.tolist() == pytest.approx(expected_rank, abs=TOLERANCE)


def test_gram_of_tokens_and_gram_of_features_have_one_spectrum() -> None:
    states = torch.randn(4, 20, 6, dtype=torch.float64)
    tall = gram_spectrum(states)
    wide = torch.linalg.eigvalsh(states @ states.mT)[:, -6:] / states.square().sum((1, 2))[:, None]
    assert torch.allclose(tall, wide, atol=1e-12)


def test_entropy_of_one_direction_is_zero_and_of_orthogonal_states_is_ln_n() -> None:
    line = torch.outer(torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.randn(8)).double()
    assert spectral_entropy(gram_spectrum(line)).item() == pytest.approx(0.0, abs=1e-12)
    orthogonal = torch.linalg.qr(torch.randn(8, 5, dtype=torch.float64)).Q.mT * 3
    assert spectral_entropy(gram_spectrum(orthogonal)).item() == pytest.approx(math.log(5), abs=1e-12)
    text = TextStates(states=orthogonal[None], center=False)
    assert [e.compute(text).item() for e in ESTIMATORS.values()] == pytest.approx([1.0, 1.0])


def test_one_massive_token_does_not_decide_the_entropy_of_unit_rows() -> None:
    """Catches a trace dominated by one huge activation, which fakes a low-entropy valley."""
    states = torch.randn(1, 30, 16, dtype=torch.float64)
    massive = states.clone()
    massive[0, 4] *= 1e4
    scaled = TextStates(states=massive, center=False)
    assert torch.allclose(matrix_entropy(scaled), matrix_entropy(TextStates(states=states, center=False)))
    assert matrix_entropy(TextStates(states=massive, center=False, row_normalize=False)).item() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 64])
def test_constant_states_have_entropy_zero_not_that_of_rounding_noise(
    dtype: torch.dtype, num_tokens: int
) -> None:
    """Catches rounding residue blown up to unit length, which would look like the richest boundary."""
    states = (torch.randn(16, dtype=dtype) * 37 + 5).expand(2, num_tokens, 16)
    for estimator in ESTIMATORS.values():
        values = estimator.compute(TextStates(states=states))
        assert torch.isfinite(values).all()
    assert matrix_entropy(TextStates(states=states)).tolist() == [0.0, 0.0]


def test_fp32_states_give_the_fp64_entropy() -> None:
    states = torch.randn(2, 200, 48) + 10
    single = matrix_entropy(TextStates(states=states))
    assert torch.allclose(single, matrix_entropy(TextStates(states=states.double())), atol=1e-5)


def test_rows_are_centred_and_scaled_and_zero_rows_stay_zero() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert normalize_rows(rows).tolist() == [[0.6, 0.8], [0.0, 0.0]]
    assert center(rows).mean(dim=0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_an_error_naming_the_boundary(bad: float) -> None:
    states = torch.zeros(3, 4, 2)
    states[2, 1, 0] = bad
    with pytest.raises(SpecdecError, match="boundary 7"):
        require_finite(states, [5, 6, 7])


def test_unknown_estimator_lists_the_known_ones() -> None:
    with pytest.raises(SpecdecError, match="matrix_entropy, effective_rank"):
        estimator_named("surprise")


def test_registry_keys_are_the_estimators_own_names() -> None:
    assert all(key == e.name and e.sign in (-1, 1) and e.drop_bos for key, e in ESTIMATORS.items())
