"""RMS norm, residual sum with norm, and the gated activation: Triton against plain torch and fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.kernels import norms, reference_norms

SHAPES = [(1, 1), (3, 24), (5, 576), (2, 1000)]
EPS = 1e-5
# a row written outside its bounds lands here
GUARD = 7.0


def _rows(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows inside a wider matrix, as a slice of a fused projection is; values of very different size."""
    scale = torch.logspace(-2, 2, rows).unsqueeze(1)
    wide = torch.full((rows, width + 3), GUARD)
    wide[:, :width] = torch.randn(rows, width) * scale
    return wide.to(device, dtype)[:, :width]


def _check_all(rows: int, hidden: int, dtype: torch.dtype, device: str, check) -> None:
    x, update = _rows(rows, hidden, dtype, device), _rows(rows, hidden, dtype, device)
    weight = (1 + 0.2 * torch.randn(hidden)).to(device, dtype)
    exact = reference_norms.rms_norm(x.double(), weight.double(), EPS)
    check(norms.rms_norm(x, weight, EPS), reference_norms.rms_norm(x, weight, EPS), exact)

    fast, plain = _clone_strided(x), x.clone()
    normed = norms.add_rms_norm(update, fast, weight, EPS)
    expected = reference_norms.add_rms_norm(update, plain, weight, EPS)
    assert torch.equal(fast, plain), "the residual stream is the rounded sum"
    check(normed, expected, reference_norms.rms_norm(plain.double(), weight.double(), EPS))

    gate_up = _rows(rows, 2 * hidden, dtype, device)
    exact = reference_norms.silu_mul(gate_up.double())
    gate, up = gate_up.chunk(2, dim=-1)
    check(norms.silu_mul(gate_up), torch.nn.functional.silu(gate) * up, exact)


def _clone_strided(x: Tensor) -> Tensor:
    made = torch.full((x.shape[0], x.shape[1] + 5), GUARD, dtype=x.dtype, device=x.device)
    made[:, : x.shape[1]] = x
    return made[:, : x.shape[1]]


@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_norms_and_activation_are_as_accurate_as_plain_torch(
    rows: int, hidden: int, dtype: torch.dtype, device: str, assert_as_accurate
) -> None:
    _check_all(rows, hidden, dtype, device, assert_as_accurate)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "hidden"), [*SHAPES, (257, 4096), (3, 14336)])
def test_norms_and_activation_are_as_accurate_in_bfloat16(rows: int, hidden: int, assert_as_accurate) -> None:
    _check_all(rows, hidden, torch.bfloat16, "cuda", assert_as_accurate)


def test_a_row_has_the_same_bits_whatever_its_neighbours(device: str) -> None:
    """Catches a norm whose order of summation follows the batch: greedy text would follow it too."""
    x, weight = torch.randn(7, 100, device=device), torch.randn(100, device=device)
    together = norms.rms_norm(x, weight, EPS)
    assert all(torch.equal(norms.rms_norm(x[i : i + 1], weight, EPS)[0], together[i]) for i in range(7))


def test_the_residual_sum_writes_no_byte_beside_its_rows(device: str) -> None:
    residual = torch.full((3, 16), GUARD, device=device)
    norms.add_rms_norm(torch.ones(3, 11, device=device), residual[:, :11], torch.ones(11, device=device), EPS)
    assert bool((residual[:, 11:] == GUARD).all())
    assert bool((residual[:, :11] == GUARD + 1).all())


def test_large_gates_neither_overflow_nor_become_nan(device: str) -> None:
    """exp(-gate) overflows at gate = -100; silu is then -0."""
    gate_up = torch.tensor([[-1e4, -100.0, 1e4, 2.0, 2.0, 2.0]], device=device)
    assert torch.equal(norms.silu_mul(gate_up).cpu(), torch.tensor([[-0.0, -0.0, 2e4]]))


def test_no_rows_are_no_launch(device: str) -> None:
    empty, weight = torch.empty(0, 8, device=device), torch.ones(8, device=device)
    assert norms.rms_norm(empty, weight, EPS).shape == (0, 8)
    assert norms.add_rms_norm(empty, empty, weight, EPS).shape == (0, 8)
    assert norms.silu_mul(empty).shape == (0, 4)
