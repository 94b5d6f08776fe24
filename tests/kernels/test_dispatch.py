"""Which implementation runs: decided by device and setting, refused where it cannot be, and proved to run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.kernels import KERNEL_SETTINGS, OPERATIONS, kernel, kernel_backend, norms
from specdec.kernels import draft_loss as draft_loss_kernel
from specdec.train.loss import LossOptions, Teacher, distill


class Counted:
    """A jitted kernel that counts its launches."""

    def __init__(self, real: Any) -> None:
        self.real, self.launches = real, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.real[grid]


def test_auto_is_triton_on_a_card_and_the_reference_elsewhere() -> None:
    assert kernel_backend("cuda") == "triton"
    assert kernel_backend("cuda:1", "auto", torch.float16) == "triton"
    assert kernel_backend("cpu") == "reference"
    assert kernel_backend("cpu", "auto", torch.bfloat16) == "reference"
    assert kernel_backend("cuda", "reference") == "reference"


def test_triton_on_a_cpu_is_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(SpecdecError, match=r"'triton'.*CUDA device.*'cpu'.*'reference'.*TRITON_INTERPRET=1"):
        kernel_backend("cpu", "triton")


def test_the_interpreter_is_refused_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes wrong numbers without a word (triton-lang/triton #11584)."""
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert kernel_backend("cpu", "triton", torch.float16) == "triton"
    with pytest.raises(SpecdecError, match=r"bfloat16.*float32 or float16"):
        kernel_backend("cpu", "triton", torch.bfloat16)


@pytest.mark.parametrize("setting", ["auto", "triton"])
def test_a_card_without_triton_is_told_what_to_install(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "triton" else real(name, *more)
    )
    with pytest.raises(SpecdecError, match=r"pip install triton.*'reference'"):
        kernel_backend("cuda", setting)
    assert kernel_backend("cuda", "reference") == "reference"
    assert kernel_backend("cpu") == "reference"


def test_an_unknown_setting_names_the_known_ones() -> None:
    with pytest.raises(SpecdecError, match="'fast'.*" + ", ".join(KERNEL_SETTINGS)):
        kernel_backend("cpu", "fast")


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_kernel_and_reference_are_two_functions_with_the_same_arguments(operation: str) -> None:
    fast, plain = kernel(operation, "triton"), kernel(operation, "reference")
    assert fast is not plain
    assert fast.__name__ == plain.__name__ == operation
    ours = [(p.name, p.kind, p.default) for p in inspect.signature(fast).parameters.values()]
    assert ours == [(p.name, p.kind, p.default) for p in inspect.signature(plain).parameters.values()]


def test_the_kernel_that_was_asked_for_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Equal results prove nothing about which function made them: launches are counted."""
    counted = Counted(norms._rms_norm_kernel)
    monkeypatch.setattr(norms, "_rms_norm_kernel", counted)
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    slow = kernel("rms_norm", kernel_backend(device, "reference"))(x, weight, 1e-5)
    assert counted.launches == 0
    fast = kernel("rms_norm", kernel_backend(device, "triton"))(x, weight, 1e-5)
    assert counted.launches == 1
    torch.testing.assert_close(fast, slow)


@pytest.mark.parametrize("setting", ["auto", "triton", "reference"])
def test_training_runs_the_kernel_of_its_device(
    setting: str, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """On a card by itself, on a CPU when asked; loss and gradients agree within the loss's bound."""
    counted = Counted(draft_loss_kernel._draft_loss_kernel)
    monkeypatch.setattr(draft_loss_kernel, "_draft_loss_kernel", counted)
    monkeypatch.setattr(draft_loss_kernel, "TILE", 32 if device == "cpu" else draft_loss_kernel.TILE)
    generator = torch.Generator().manual_seed(0)

    def run(kernels: str) -> list[torch.Tensor]:
        generator.manual_seed(0)
        final, rows, hidden, own = (torch.randn(n, 6, generator=generator).to(device) for n in (4, 50, 7, 50))
        log_norm = torch.logsumexp(final @ rows.T, -1) + 0.3
        teacher = Teacher(final, log_norm, rows, torch.zeros(4, dtype=torch.long, device=device))
        slots = torch.tensor([0, 0, 1, 2, 2, 3, 3], device=device)
        options = LossOptions("kl", 3, torch.float32, True, kernels)
        hidden.requires_grad_()
        own.requires_grad_()
        loss, overlaps, hits = distill(hidden, own, slots, torch.ones(7, device=device), teacher, options)
        loss.backward()
        return [loss.detach(), overlaps, hits, hidden.grad, own.grad]

    found = run(setting)
    uses_triton = setting == "triton" or (setting == "auto" and device == "cuda")
    assert counted.launches == (3 if uses_triton else 0)
    for ours, plain in zip(found, run("reference"), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_the_runtime_imports_no_triton() -> None:
    """A machine without it must serve on its CPU: macOS, or a slim installation."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import specdec.kernels, specdec.models.decoder\n"
        "from specdec.kernels import OPERATIONS, kernel, kernel_backend\n"
        "for name in OPERATIONS: kernel(name, kernel_backend('cpu'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
