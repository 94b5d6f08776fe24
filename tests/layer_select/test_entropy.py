"""Spectral estimators agree with independent formulations; the registry says what each value means."""

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.entropy import ESTIMATORS, estimator_named, estimators_named
from specdec.layer_select.estimators.sample import StateSample, gram_spectrum, smaller_gram
from specdec.layer_select.estimators.spectral import matrix_entropy, renyi_two, spectral_entropy
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
    text = StateSample(states=states, center=prepared, row_normalize=prepared)
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
    sample = StateSample(states=orthogonal[None], center=False)
    spectral = ["matrix_entropy", "renyi_2", "renyi_0.5", "effective_rank", "effective_rank_roy_vetterli"]
    values = [estimator_named(name).compute(sample).item() for name in spectral]
    assert values == pytest.approx([1.0] * len(spectral))


def test_one_massive_token_does_not_decide_the_entropy_of_unit_rows() -> None:
    """Catches a trace dominated by one huge activation, which fakes a low-entropy valley."""
    states = torch.randn(1, 30, 16, dtype=torch.float64)
    massive = states.clone()
    massive[0, 4] *= 1e4
    scaled = StateSample(states=massive, center=False)
    assert torch.allclose(matrix_entropy(scaled), matrix_entropy(StateSample(states=states, center=False)))
    assert matrix_entropy(StateSample(states=massive, center=False, row_normalize=False)).item() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 64])
def test_constant_states_have_entropy_zero_not_that_of_rounding_noise(
    dtype: torch.dtype, num_tokens: int
) -> None:
    """Catches rounding residue blown up to unit length, which would look like the richest boundary."""
    states = (torch.randn(16, dtype=dtype) * 37 + 5).expand(2, num_tokens, 16)
    assert matrix_entropy(StateSample(states=states)).tolist() == [0.0, 0.0]
    for name in ("renyi_2", "renyi_0.5", "renyi_inf", "dataset_entropy"):
        assert estimator_named(name).compute(StateSample(states=states)).tolist() == [0.0, 0.0]


def test_fp32_states_give_the_fp64_entropy() -> None:
    states = torch.randn(2, 200, 48) + 10
    single = matrix_entropy(StateSample(states=states))
    assert torch.allclose(single, matrix_entropy(StateSample(states=states.double())), atol=1e-5)


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


@pytest.mark.parametrize("alpha", [0.3, 0.5, 1.5, 2.0, 3.0, 7.0])
@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (40, 9)])
def test_renyi_entropy_of_any_order_agrees_with_singular_values(alpha: float, shape: tuple[int, int]) -> None:
    states = torch.randn(2, *shape, dtype=torch.float64) + 1
    estimator = estimator_named(f"renyi_{alpha:g}")
    for one, value in zip(states, estimator.compute(StateSample(states=states)), strict=True):
        x = one.numpy() - one.numpy().mean(axis=0)
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        weights = scipy.linalg.svdvals(x) ** 2
        # centring leaves one direction less than rows; its rounding residue is no eigenvalue.
        weights = weights[weights > 1e-12 * weights.max()] / weights.sum()
        expected = np.log((weights**alpha).sum()) / (1 - alpha)
        assert value.item() == pytest.approx(expected / math.log(min(shape)), abs=TOLERANCE)


def test_orders_near_one_and_beyond_all_bounds_meet_shannon_and_min_entropy() -> None:
    spectrum = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    shannon = scipy.stats.entropy(spectrum.numpy())
    assert spectral_entropy(spectrum, 1.0).item() == pytest.approx(shannon, abs=1e-12)
    assert spectral_entropy(spectrum, 1.0 + 1e-7).item() == pytest.approx(shannon, abs=TOLERANCE)
    assert spectral_entropy(spectrum, math.inf).item() == pytest.approx(math.log(2))
    assert spectral_entropy(spectrum, 400.0).item() == pytest.approx(math.log(2), abs=5e-3)
    orders = [spectral_entropy(spectrum, alpha).item() for alpha in (0.2, 1.0, 2.0, 5.0, math.inf)]
    assert orders == sorted(orders, reverse=True)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("size", [1, 2, 33])
def test_one_hot_spectra_have_entropy_zero_and_uniform_ones_ln_n(alpha: float, size: int) -> None:
    one_hot = torch.zeros(size, dtype=torch.float64)
    one_hot[0] = 1.0
    uniform = torch.full((size,), 1.0 / size, dtype=torch.float64)
    assert spectral_entropy(one_hot, alpha).item() == pytest.approx(0.0, abs=1e-12)
    assert spectral_entropy(uniform, alpha).item() == pytest.approx(math.log(size), abs=1e-12)
    assert spectral_entropy(torch.zeros(size, dtype=torch.float64), alpha).item() == 0.0


@pytest.mark.parametrize("shape", [(6, 30), (30, 6)])
def test_order_two_needs_no_eigenvalues(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    states = torch.randn(3, *shape, dtype=torch.float64)
    expected = spectral_entropy(gram_spectrum(states), 2.0)

    def refuse(matrix: Tensor) -> Tensor:
        raise AssertionError("an eigensolve for order 2")

    monkeypatch.setattr(torch.linalg, "eigvalsh", refuse)
    assert torch.allclose(renyi_two(smaller_gram(states)), expected, atol=1e-12)
    estimator_named("renyi_2").compute(StateSample(states=states))


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (50, 9)])
def test_both_conventions_of_effective_rank_agree_with_singular_values_and_differ(
    shape: tuple[int, int],
) -> None:
    states = torch.randn(1, *shape, dtype=torch.float64)
    sample = StateSample(states=states, center=False, row_normalize=False)
    values = scipy.linalg.svdvals(states[0].numpy())
    squared = math.exp(scipy.stats.entropy(values**2)) / min(shape)
    plain = math.exp(scipy.stats.entropy(values)) / min(shape)
    assert ESTIMATORS["effective_rank"].compute(sample).item() == pytest.approx(squared, abs=TOLERANCE)
    roy_vetterli = ESTIMATORS["effective_rank_roy_vetterli"].compute(sample).item()
    assert roy_vetterli == pytest.approx(plain, abs=TOLERANCE)
    assert plain > squared


def test_rank_deficient_fp32_states_keep_their_rank_under_roots() -> None:
    """Catches roots of rounding residue: 1e-8 of a spectrum is 1e-4 of its roots."""
    states = torch.randn(1, 60, 3) @ torch.randn(3, 48)
    for name in ("effective_rank_roy_vetterli", "renyi_0.5"):
        single, double = (
            estimator_named(name).compute(StateSample(states=each)) for each in (states, states.double())
        )
        assert torch.allclose(single, double, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("surprise", "matrix_entropy, renyi_2, effective_rank"),
        ("renyi_zero", "order above 0"),
        ("renyi_0", "order above 0"),
        ("renyi_-1", "order above 0"),
        ("dataset_renyi_nan", "order above 0"),
    ],
)
def test_unknown_estimators_and_orders_are_refused_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        estimator_named(name)


def test_registry_says_what_every_value_means() -> None:
    assert all(key == e.name and e.sign in (-1, 1) and e.drop_bos for key, e in ESTIMATORS.items())
    assert all(e.normalization and e.level in ("text", "batch", "dataset") for e in ESTIMATORS.values())
    names = [estimator.name for estimator in estimators_named(("renyi_3", "all", "renyi_3"))]
    assert names == ["renyi_3", *ESTIMATORS]
