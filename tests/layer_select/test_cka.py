"""CKA agrees with explicit formulas, is debiased where it says so (fault B05), and streams."""

import numpy as np
import pytest
import torch

from specdec.errors import SpecdecError
from specdec.layer_select.cka import (
    cka_from_hsic,
    debiased_cka,
    degenerate_boundaries,
    hsic_matrix,
    hsic_pair,
    linear_cka,
    minibatch_hsic,
)

TOLERANCE = 1e-6
ROWS, HIDDEN, SEEDS = 32, 64, 50


def reference_hsic_1(x: np.ndarray, y: np.ndarray) -> float:
    """HSIC_1 as written in Song et al. 2012, without any centring."""
    n = len(x)
    k, g = x @ x.T, y @ y.T
    np.fill_diagonal(k, 0)
    np.fill_diagonal(g, 0)
    ones = np.ones(n)
    value = np.trace(k @ g) + (ones @ k @ ones) * (ones @ g @ ones) / ((n - 1) * (n - 2))
    return float((value - 2 / (n - 2) * (ones @ k @ g @ ones)) / (n * (n - 3)))


def reference_linear_cka(x: np.ndarray, y: np.ndarray) -> float:
    """Biased CKA from centred Gram matrices, H K H."""
    h = np.eye(len(x)) - 1 / len(x)
    k, g = h @ x @ x.T @ h, h @ y @ y.T @ h
    return float((k * g).sum() / np.linalg.norm(k) / np.linalg.norm(g))


@pytest.mark.parametrize("rows", [4, 5, 17, 60])
def test_hsic_of_all_pairs_agrees_with_the_published_formula(rows: int) -> None:
    states = torch.randn(3, rows, 9, dtype=torch.float64) * torch.tensor([1.0, 5.0, 0.1])[:, None, None] + 3
    states[1] += states[0]
    x = states.numpy()
    expected = [[reference_hsic_1(a, b) for b in x] for a in x]
    assert np.allclose(hsic_matrix(states).numpy(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("rows", "first", "second"), [(20, 6, 9), (20, 40, 3), (8, 30, 30)])
def test_biased_cka_agrees_with_centred_grams_in_both_forms(rows: int, first: int, second: int) -> None:
    x, y = torch.randn(rows, first, dtype=torch.float64), torch.randn(rows, second, dtype=torch.float64)
    y[:, 0] += x[:, 0]
    assert linear_cka(x, y).item() == pytest.approx(reference_linear_cka(x.numpy(), y.numpy()), abs=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cka_ignores_rotation_scale_and_shift(dtype: torch.dtype) -> None:
    x = torch.randn(50, 24, dtype=dtype)
    rotation = torch.linalg.qr(torch.randn(24, 24, dtype=dtype)).Q
    y = 3 * x @ rotation + 7
    assert linear_cka(x, y).item() == pytest.approx(1.0, abs=1e-5)
    assert debiased_cka(x, y).item() == pytest.approx(1.0, abs=1e-5)


def test_debiased_cka_of_unrelated_features_is_zero_where_the_biased_one_is_not() -> None:
    """Catches B05: HSIC with its diagonal kept looks high between unrelated features with few samples."""
    debiased, biased = [], []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, ROWS, HIDDEN, generator=generator, dtype=torch.float64)
        debiased.append(debiased_cka(x, y).item())
        biased.append(linear_cka(x, y).item())
    assert abs(np.mean(debiased)) < 0.03
    assert np.mean(biased) > 0.4


def test_minibatch_value_does_not_move_with_the_batch_size() -> None:
    """Catches averaging of per-batch ratios or of biased estimates: both grow as batches shrink."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randn(8192, 24, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, 8192, 24, generator=generator, dtype=torch.float64)
    states = torch.stack([shared + noise[0], shared + noise[1]])
    # population value of linear CKA here: (1 / 2)^2 = 0.25; sampling error at 8,192 rows about 0.005.
    values = {
        size: cka_from_hsic(minibatch_hsic(states.split(size, dim=1)))[0, 1].item() for size in (16, 64, 512)
    }
    assert all(value == pytest.approx(0.25, abs=0.015) for value in values.values()), values
    biased = [linear_cka(*part).item() for part in states.split(16, dim=1)]
    assert np.mean(biased) > 0.5


def test_common_shift_of_states_costs_no_digits_in_fp32() -> None:
    """Residual streams share a large mean; an uncentred fp32 Gram would drown the differences."""
    states = torch.randn(2, 100, 32)
    exact = cka_from_hsic(hsic_matrix(states.double()))
    shifted = cka_from_hsic(hsic_matrix(states + 100))
    assert torch.allclose(exact, shifted, atol=1e-3)


def test_constant_features_have_cka_zero_with_others_and_are_named() -> None:
    states = torch.stack([torch.randn(40, 8), torch.full((40, 8), 1.7), torch.randn(40, 8)])
    hsic = hsic_matrix(states)
    assert degenerate_boundaries(hsic) == [1]
    cka = cka_from_hsic(hsic)
    assert torch.isfinite(cka).all()
    assert cka[1].tolist() == [0.0, 1.0, 0.0]
    assert linear_cka(states[0], states[1]).item() == 0.0


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_than_four_rows_are_an_error_with_both_numbers(rows: int) -> None:
    with pytest.raises(SpecdecError, match=f"at least 4 rows, {rows} given"):
        hsic_matrix(torch.randn(2, rows, 5))


@pytest.mark.parametrize("rows", [4, 17])
def test_biased_hsic_of_all_pairs_agrees_with_centred_grams(rows: int) -> None:
    states = torch.randn(3, rows, 9, dtype=torch.float64)
    states[1] += states[0]
    h = np.eye(rows) - 1 / rows
    grams = [x @ x.T for x in states.numpy()]
    expected = [[np.trace(k @ h @ g @ h) / (rows - 1) ** 2 for g in grams] for k in grams]
    pair = hsic_pair(states)
    assert np.allclose(pair.biased.numpy(), expected, atol=TOLERANCE)
    assert torch.equal(pair.debiased, hsic_matrix(states))
    cka = cka_from_hsic(pair.biased)
    assert cka[0, 1].item() == pytest.approx(linear_cka(states[0], states[1]).item(), abs=TOLERANCE)


@pytest.mark.parametrize("hidden", [3, 64])
def test_streamed_cka_of_either_kind_is_positive_semi_definite(hidden: int) -> None:
    """A k-DPP takes determinants of it: one negative eigenvalue and the search means nothing.

    HSIC_1 over shared rows is an inner product of U-centred Grams, so the debiased matrix is one as well.
    """
    states = torch.randn(20, 40, hidden, dtype=torch.float64).cumsum(dim=0)
    parts = [hsic_pair(part) for part in states.split(5, dim=1)]
    for kind in (lambda part: part.biased, lambda part: part.debiased):
        cka = cka_from_hsic(torch.stack([kind(part) for part in parts]).mean(dim=0))
        assert torch.linalg.eigvalsh(cka).min() > -1e-10


def test_biased_value_grows_as_minibatches_shrink() -> None:
    """The known bias, stated where the batch size is chosen (ScoreConfig.cka_rows)."""
    states = torch.randn(2, 512, 64, dtype=torch.float64)
    values = []
    for size in (16, 64, 512):
        parts = torch.stack([hsic_pair(part).biased for part in states.split(size, dim=1)])
        values.append(cka_from_hsic(parts.mean(dim=0))[0, 1].item())
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.6
    assert values[-1] < 0.2
