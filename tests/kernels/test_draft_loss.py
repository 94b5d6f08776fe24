"""The fused draft loss: Triton and pieces in torch against the definitions, in value and gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.kernels import draft_loss, reference_draft_loss
from specdec.kernels.reference_draft_loss import KINDS

# sums of a few thousand fp32 terms of size one; the project's bound for this loss
TOLERANCE = 1e-5


@dataclass
class Case:
    student: Tensor
    teacher: Tensor
    rows: Tensor
    log_norm: Tensor
    scale: Tensor

    def run(self, module, kind: str, **more):
        """Losses, and what became of the logits."""
        student = self.student.clone()
        found = module.draft_loss(
            kind, student, self.teacher, self.rows, self.log_norm, self.scale, **({"measure": True} | more)
        )
        return found, student


def _case(vocab: int, dtype: torch.dtype, device: str) -> Case:
    """Nine slots on five rows of the target, laws peaked and flat; half of the target's mass is unsayable."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.tensor([0.1, 1.0, 3.0, 8.0, 1.0]).unsqueeze(1)
    teacher = (torch.randn(5, vocab, generator=generator) * spread + 20).to(dtype)
    rows = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3, 4])
    student = (torch.randn(9, vocab, generator=generator) * 2 - 5).to(dtype)
    # a slot that agrees with its target almost everywhere
    student[8] = (teacher[4].double() - 13).to(dtype)
    log_norm = torch.logsumexp(teacher.double(), -1) + 0.7
    return Case(
        student=student.to(device),
        teacher=teacher.to(device),
        rows=rows.to(device),
        log_norm=log_norm.to(device, torch.float64 if dtype == torch.float64 else torch.float32),
        scale=(torch.rand(9, generator=generator) + 0.1).to(device),
    )


def _defined(case: Case, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, gradient times scale, and A from the definitions, by autograd in fp64."""
    logits = case.student.double().requires_grad_()
    p = torch.exp(case.teacher.double() - case.log_norm.double().unsqueeze(-1))[case.rows]
    q = torch.softmax(logits, -1)
    kl = (p * ((p / p.sum(-1, keepdim=True)).log() - torch.log_softmax(logits, -1))).sum(-1)
    overlap = torch.minimum(p, q).sum(-1)
    lam = torch.exp(-3 * overlap).detach()
    loss = {"kl": kl, "lk": -overlap.log(), "lk-mix": lam * kl + (1 - lam) * (1 - overlap)}[kind]
    (gradient,) = torch.autograd.grad((loss * case.scale.double()).sum(), logits)
    return loss.detach(), gradient, overlap.detach()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Many tiles and pieces at a vocabulary that the interpreter can do; on a card tiles stay as they are."""
    if device == "cpu":
        monkeypatch.setattr(draft_loss, "TILE", 32)
    monkeypatch.setattr(reference_draft_loss, "PIECE_NUMBERS", 2 * 75)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [7, 32, 75])
def test_kernel_equals_the_definitions_in_value_and_gradient(kind: str, vocab: int, device: str) -> None:
    case = _case(vocab, torch.float32, device)
    found, gradient = case.run(draft_loss, kind)
    loss, expected, overlap = _defined(case, kind)
    assert (found.loss - loss).abs().max() < TOLERANCE
    assert (gradient - expected).abs().max() < TOLERANCE
    assert (found.overlap - overlap).abs().max() < TOLERANCE
    assert torch.equal(found.best, case.student.argmax(-1))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_is_as_accurate_as_torch_in_half_precision(
    kind: str, dtype, device: str, assert_as_accurate
) -> None:
    case = _case(75, dtype, device)
    _, gradient = case.run(draft_loss, kind)
    _, plain = case.run(reference_draft_loss, kind)
    assert_as_accurate(gradient, plain, _defined(case, kind)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [7, 2048, 32001])
def test_kernel_is_as_accurate_in_bfloat16(kind: str, vocab: int, assert_as_accurate) -> None:
    case = _case(vocab, torch.bfloat16, "cuda")
    found, gradient = case.run(draft_loss, kind)
    _, plain = case.run(reference_draft_loss, kind)
    loss, expected, _ = _defined(case, kind)
    assert_as_accurate(gradient, plain, expected)
    torch.testing.assert_close(found.loss.double(), loss, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 7, 75])
def test_pieces_in_torch_equal_the_definitions_in_fp64(kind: str, vocab: int, device: str) -> None:
    case = _case(vocab, torch.float64, device)
    found, gradient = case.run(reference_draft_loss, kind)
    loss, expected, overlap = _defined(case, kind)
    assert (found.loss - loss).abs().max() < 1e-11
    assert (gradient - expected).abs().max() < 1e-11
    assert (found.overlap - overlap).abs().max() < 1e-11
    assert torch.equal(found.best, case.student.argmax(-1))
    unmeasured, same = case.run(reference_draft_loss, kind, measure=False)
    assert unmeasured.best is None
    assert torch.equal(same, gradient)


@pytest.mark.parametrize("module", [draft_loss, reference_draft_loss], ids=["triton", "reference"])
def test_disjoint_laws_and_huge_logits_stay_finite(module, device: str) -> None:
    """A is 0 to the last bit, where -log A needs its floor; logits of 1e4 overflow a plain exponential."""
    student, teacher = torch.zeros(2, 40, device=device), torch.zeros(2, 40, device=device)
    student[:, 0], teacher[:, 1] = 1e4, 1e4
    case = Case(
        student,
        teacher,
        torch.tensor([0, 1], device=device),
        torch.logsumexp(teacher, -1),
        torch.ones(2, device=device),
    )
    for kind in KINDS:
        found, gradient = case.run(module, kind)
        assert bool(found.loss.isfinite().all())
        assert bool(gradient.isfinite().all())
        assert bool((found.loss > 0).all())


def test_a_row_of_logits_beside_the_draft_vocabulary_is_not_touched(device: str) -> None:
    """Logits may be a slice of a padded matrix: the columns past the end are neither read nor written."""
    case = _case(75, torch.float32, device)
    wide = torch.full((9, 80), float("nan"), device=device)
    wide[:, :75] = case.student
    expected, gradient = case.run(draft_loss, "kl")
    found = draft_loss.draft_loss(
        "kl", wide[:, :75], case.teacher, case.rows, case.log_norm, case.scale, measure=True
    )
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(wide[:, :75], gradient)
    assert bool(wide[:, 75:].isnan().all())


def test_pieces_hold_a_fraction_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise of the module: no copy of [slots, vocabulary] beside the two matrices of logits."""
    case = _case(1500, torch.float32, "cpu")
    monkeypatch.setattr(reference_draft_loss, "PIECE_NUMBERS", 2 * 1500)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            if (
                isinstance(made, Tensor)
                and made.untyped_storage().data_ptr() != student.untyped_storage().data_ptr()
            ):
                inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
                if made.untyped_storage().data_ptr() not in inputs:
                    largest = max(largest, made.untyped_storage().nbytes())
            return made

    student = case.student.clone()
    for kind in KINDS:
        with Watch():
            reference_draft_loss.draft_loss(
                kind, student, case.teacher, case.rows, case.log_norm, case.scale, measure=True
            )
    assert 0 < largest <= 2 * 1500 * 4
