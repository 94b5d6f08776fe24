"""Fixtures of the kernel tests: NaN in fresh memory, accuracy by comparison, the dtypes a machine can test.

The Triton interpreter is chosen in `tests/conftest.py`, above everything else: Triton decides when a kernel's
module is imported whether it is interpreted, and a test of another folder may import a kernel first, so a
variable set here would come too late in a run of the whole suite. It is set only where there is no CUDA
device, and nothing but Triton reads it; on a card the same tests run compiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
# the interpreter has no bf16 (triton-lang/triton #11584): tests in it are marked gpu
DTYPES = (torch.float32, torch.float16)
assert not INTERPRETED or os.environ.get("TRITON_INTERPRET") == "1", (
    "tests/conftest.py chooses the interpreter"
)


@pytest.fixture
def device() -> str:
    """Where kernel tests run: the card, or the processor under the interpreter."""
    return DEVICE


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype of the interpreter in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` gives with NaN (integers: the lowest), so that a row left unwritten shows."""

    def poison(made: Tensor) -> Tensor:
        if made.dtype.is_floating_point:
            made.fill_(float("nan"))
        elif made.dtype != torch.bool and not made.dtype.is_complex:
            made.fill_(torch.iinfo(made.dtype).min)
        return made

    def poisoned(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(real(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def even_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of an interpreted product has the same bits at every height of the block, as on a card.

    The interpreter multiplies with numpy, where a row may depend on their number (OpenBLAS with AVX2).
    """
    matmul = np.matmul

    def wide(a: np.ndarray, b: np.ndarray, dtype: type = np.float32) -> np.ndarray:
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", wide)


AccuracyCheck = Callable[[Tensor, Tensor, Tensor], None]


@pytest.fixture
def assert_as_accurate() -> AccuracyCheck:
    """Call with (kernel, plain, exact): the kernel errs at most twice as much as plain torch does.

    `plain` is the torch path in the kernel's dtype, `exact` the fp64 reference. One unit in the last place of
    the largest exact value is granted beside: plain torch can be exact where another order of sums is not.
    """

    def check(kernel: Tensor, plain: Tensor, exact: Tensor) -> None:
        assert kernel.shape == exact.shape == plain.shape
        assert not kernel.isnan().any(), "unwritten or poisoned values in the kernel's output"
        if exact.numel() == 0:
            return
        error = (kernel.double() - exact).abs().max()
        allowed = 2 * (plain.double() - exact).abs().max()
        unit = torch.finfo(kernel.dtype).eps * exact.abs().max()
        assert error <= allowed + unit, f"error {error:.3g}, plain torch {allowed / 2:.3g}, unit {unit:.3g}"

    return check
