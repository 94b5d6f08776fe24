"""Estimators beyond the spectral ones agree with numpy and scipy and stay defined on degenerate input."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from specdec.layer_select.cka import hsic_matrix
from specdec.layer_select.entropy import ESTIMATORS
from specdec.layer_select.estimators.channel import channel_entropy, channel_softmax_entropy
from specdec.layer_select.estimators.gaussian import EPSILON, gaussian_entropy
from specdec.layer_select.estimators.histogram import BINS, TAIL, coordinate_entropies, histogram_entropy
from specdec.layer_select.estimators.logit_lens import logit_lens_entropy
from specdec.layer_select.estimators.sample import StateSample
from specdec.layer_select.rows import massive_boundaries, normalize_rows

# both sides compute in float64.
TOLERANCE = 1e-6
HEAD = torch.randn(9, 23, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def head(states: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    logits = states.to(HEAD.dtype)[:, : len(HEAD)] @ HEAD[: states.shape[1]]
    return torch.cat([reduce(block) for block in logits.split(5)])


def reference_histogram(column: np.ndarray) -> float:
    """Miller-Madow entropy of one coordinate from numpy's own quantiles and histogram."""
    low, high = np.quantile(column, [TAIL, 1 - TAIL])
    counts, _ = np.histogram(np.clip(column, low, high), bins=BINS, range=(low, high))
    return float(scipy.stats.entropy(counts)) + (np.count_nonzero(counts) - 1) / (2 * len(column))


@pytest.mark.parametrize("rows", [4, 31, 1001, 3000])
def test_histogram_entropy_agrees_with_numpy(rows: int) -> None:
    columns = torch.randn(rows, 5, dtype=torch.float64) * torch.tensor([1.0, 30.0, 0.01, 2.0, 1.0])
    columns[:, 3] = columns[:, 3].exp()
    expected = [reference_histogram(column) for column in columns.numpy().T]
    assert coordinate_entropies(columns).tolist() == pytest.approx(expected, abs=TOLERANCE)
    value = histogram_entropy(StateSample(states=columns[None], row_normalize=False)).item()
    assert value == pytest.approx(np.mean(expected) / math.log(BINS), abs=TOLERANCE)


def test_histogram_correction_takes_most_of_the_bias_of_few_rows() -> None:
    """Uniform coordinates have ln BINS nats; the plug-in value of 1,024 rows lacks about BINS / 2,048."""
    columns = torch.rand(1024, 64, dtype=torch.float64)
    assert coordinate_entropies(columns).mean().item() == pytest.approx(math.log(BINS), abs=0.01)


def test_histogram_reads_the_same_coordinates_at_every_boundary_and_all_of_a_narrow_state() -> None:
    states = torch.randn(1, 300, 40, dtype=torch.float64).repeat(3, 1, 1)
    values = histogram_entropy(StateSample(states=states, max_coordinates=7, seed=5))
    assert values.unique().numel() == 1
    whole = histogram_entropy(StateSample(states=states, max_coordinates=40))
    assert torch.equal(whole, histogram_entropy(StateSample(states=states, max_coordinates=4096, seed=9)))


@pytest.mark.parametrize(("rows", "hidden"), [(50, 6), (6, 50), (20, 20)])
def test_gaussian_entropy_agrees_with_scipy_and_ignores_scale_and_shift(rows: int, hidden: int) -> None:
    states = torch.randn(rows, hidden, dtype=torch.float64) @ torch.randn(hidden, hidden, dtype=torch.float64)
    scaled = states / states.square().mean().sqrt()
    covariance = np.cov(scaled.numpy().T, bias=True) + EPSILON * np.eye(hidden)
    expected = scipy.stats.multivariate_normal(np.zeros(hidden), covariance).entropy() / hidden
    value = gaussian_entropy(StateSample(states=states[None], row_normalize=False)).item()
    assert value == pytest.approx(expected, abs=TOLERANCE)
    larger = gaussian_entropy(StateSample(states=1e4 * states[None], row_normalize=False)).item()
    assert larger == pytest.approx(value, abs=TOLERANCE)


def test_channel_entropies_agree_with_scipy() -> None:
    states = torch.randn(40, 17, dtype=torch.float64)
    energy = states.square().numpy()
    expected = scipy.stats.entropy(energy, axis=1).mean() / math.log(17)
    assert channel_entropy(StateSample(states=states[None])).item() == pytest.approx(expected, abs=TOLERANCE)
    unit = states.numpy() / np.sqrt(energy.mean(axis=1, keepdims=True))
    law = scipy.special.softmax(unit, axis=1)
    expected = scipy.stats.entropy(law, axis=1).mean() / math.log(17)
    value = channel_softmax_entropy(StateSample(states=states[None])).item()
    assert value == pytest.approx(expected, abs=TOLERANCE)


def test_channel_entropy_of_one_channel_is_zero_and_of_equal_channels_is_one() -> None:
    states = torch.stack([torch.eye(8, dtype=torch.float64), torch.ones(8, 8, dtype=torch.float64) * -3])
    assert channel_entropy(StateSample(states=states)).tolist() == pytest.approx([0.0, 1.0])


def test_logit_lens_entropy_agrees_with_scipy_and_reads_as_many_rows_as_it_may() -> None:
    states = torch.randn(2, 30, 9, dtype=torch.float64)
    law = scipy.special.softmax((states @ HEAD).numpy(), axis=-1)
    expected = scipy.stats.entropy(law, axis=-1) / math.log(23)
    sample = StateSample(states=states, over_logits=head, lens_rows=30)
    assert logit_lens_entropy(sample).tolist() == pytest.approx(expected.mean(axis=1).tolist(), abs=TOLERANCE)
    seen: list[int] = []

    def counting_head(rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        seen.append(len(rows))
        return head(rows, reduce)

    logit_lens_entropy(StateSample(states=states, over_logits=counting_head, lens_rows=4))
    assert seen == [2 * 4]


def test_a_vocabulary_entry_that_the_target_masks_is_no_nan() -> None:
    def masked(rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        logits = head(rows, lambda block: block)
        logits[:, 5:] = -torch.inf
        return reduce(logits)

    value = logit_lens_entropy(StateSample(states=torch.randn(1, 6, 9), over_logits=masked)).item()
    assert 0 < value < math.log(5) / math.log(23) + 1e-9


def massive(shape: tuple[int, int, int]) -> Tensor:
    states = torch.randn(shape)
    states[:, 0, 1] = 3e5
    return states


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(
    "states",
    [
        pytest.param(torch.zeros(2, 6, 9), id="zero"),
        pytest.param(torch.full((2, 6, 9), 3.7), id="constant"),
        pytest.param(torch.randn(2, 1, 9), id="one-row"),
        pytest.param(torch.randn(2, 3, 9), id="three-rows"),
        pytest.param(torch.randn(2, 6, 1), id="one-channel"),
        pytest.param(massive((2, 40, 9)), id="massive"),
        pytest.param(1e-30 * torch.randn(2, 6, 9), id="tiny"),
    ],
)
def test_degenerate_states_have_a_finite_value_in_every_estimator(
    states: Tensor, name: str, normalize: bool
) -> None:
    """Catches divisions by ln 1, by zero widths, by zero traces, and logarithms of them."""
    sample = StateSample(states=states, over_logits=head, row_normalize=normalize)
    values = ESTIMATORS[name].compute(sample)
    assert values.shape == (2,)
    assert values.dtype == torch.float64
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("scale", [1e22, 1e-25])
def test_states_whose_squares_leave_fp32_are_no_zeros(scale: float) -> None:
    """A length that overflows to infinity made every row zero, and its boundary the most diverse of all."""
    states = torch.randn(2, 20, 64)
    for name, estimator in ESTIMATORS.items():
        if name != "logit_lens_entropy":
            found = estimator.compute(StateSample(states=scale * states))
            torch.testing.assert_close(
                found, estimator.compute(StateSample(states=states)), atol=1e-5, rtol=0
            )
    unit = normalize_rows(scale * states)
    torch.testing.assert_close(hsic_matrix(unit), hsic_matrix(normalize_rows(states)), rtol=1e-4, atol=1e-7)


def test_massive_rows_are_found_by_their_boundary() -> None:
    states = torch.ones(3, 20, 4)
    states[1, 7] *= 1000
    assert massive_boundaries(states, 100.0) == [1]
