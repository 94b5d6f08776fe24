"""The distillation loss: closed-form gradients, blocks, and what the numbers mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.train.config import LOSS_KINDS, LossKind
from specdec.train.loss import LossOptions, Teacher, distill, unrolled_loss
from specdec.train.packed_rows import packed_rows

ROWS, DRAFT, HIDDEN, VOCAB = 9, 7, 5, 20


def _options(kind: LossKind, chunk: int = 256, measure: bool = False) -> LossOptions:
    return LossOptions(kind, chunk, torch.float64, measure)


@pytest.fixture
def case() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    final = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    ids = torch.tensor([0, 2, 5, 9, 11, 15, 19])
    logits = final @ full.T
    inverse = torch.full((VOCAB,), -1)
    inverse[ids] = torch.arange(DRAFT)
    teacher = Teacher(final, torch.logsumexp(logits, -1), full[ids], inverse[logits.argmax(-1)])
    slots = torch.tensor([0, 0, 1, 2, 2, 2, 4, 5, 5, 8])
    return {
        "teacher": teacher,
        "p": torch.softmax(logits, -1)[:, ids],
        "hidden": torch.randn(len(slots), HIDDEN, generator=generator, dtype=torch.float64),
        "weight": torch.randn(DRAFT, HIDDEN, generator=generator, dtype=torch.float64),
        "slots": slots,
        "slot_weights": torch.rand(len(slots), generator=generator, dtype=torch.float64) + 0.1,
    }


def _plain(kind: str, p: Tensor, logits: Tensor, fixed: Tensor) -> Tensor:
    """The definitions, written out; `fixed` is the mixing weight of lk-mix, not differentiated."""
    q = torch.softmax(logits, -1)
    mass = p.sum(-1)
    kl = (p * ((p / mass.unsqueeze(-1)).log() - q.log())).sum(-1)
    overlap = torch.minimum(p, q).sum(-1)
    if kind == "kl":
        return kl
    if kind == "lk":
        return -overlap.log()
    return fixed * kl + (1 - fixed) * (1 - overlap)


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_blockwise_loss_and_gradients_equal_the_plain_definitions(
    kind: LossKind, chunk: int, case: dict[str, Any]
) -> None:
    hidden, weight = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
    loss, _, _ = distill(
        hidden, weight, case["slots"], case["slot_weights"], case["teacher"], _options(kind, chunk)
    )
    (3 * loss).backward()

    other, rows = case["hidden"].clone().requires_grad_(), case["weight"].clone().requires_grad_()
    logits = other @ rows.T
    p = case["p"][case["slots"]]
    fixed = torch.exp(-3 * torch.minimum(p, torch.softmax(logits, -1)).sum(-1)).detach()
    expected = (_plain(kind, p, logits, fixed) * case["slot_weights"]).sum()
    (3 * expected).backward()
    assert abs(float((loss - expected).detach())) < 1e-10
    assert hidden.grad is not None
    assert other.grad is not None
    assert weight.grad is not None
    assert rows.grad is not None
    assert (hidden.grad - other.grad).abs().max() < 1e-10
    assert (weight.grad - rows.grad).abs().max() < 1e-10


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("top_k", [1, 3, 7, 100])
def test_top_k_distillation_counts_the_most_probable_tokens_alone(
    kind: LossKind, top_k: int, case: dict[str, Any]
) -> None:
    """All others have the chance 0; at the size of the draft vocabulary nothing changes."""
    teacher = replace(case["teacher"], top_k=top_k)
    hidden = case["hidden"].clone().requires_grad_()
    loss, overlap, _ = distill(
        hidden, case["weight"], case["slots"], case["slot_weights"], teacher, _options(kind, 3, True)
    )
    loss.backward()

    other = case["hidden"].clone().requires_grad_()
    logits = other @ case["weight"].T
    kept = case["p"].topk(min(top_k, DRAFT), -1)
    p = torch.zeros_like(case["p"]).scatter(-1, kept.indices, kept.values)[case["slots"]]
    q = torch.softmax(logits, -1)
    mass, minima = p.sum(-1, keepdim=True), torch.minimum(p, q).sum(-1)
    # a token left out adds nothing: x log x is 0 at 0
    kl = (torch.xlogy(p, p / mass) - p * q.log()).sum(-1)
    fixed = torch.exp(-3 * minima).detach()
    plain = {"kl": kl, "lk": -minima.log(), "lk-mix": fixed * kl + (1 - fixed) * (1 - minima)}[kind]
    (plain * case["slot_weights"]).sum().backward()
    assert (overlap - minima).abs().max() < 1e-10
    assert abs(float((loss - (plain * case["slot_weights"]).sum()).detach())) < 1e-10
    assert hidden.grad is not None
    assert other.grad is not None
    assert (hidden.grad - other.grad).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_gradients_equal_finite_differences(kind: LossKind, case: dict[str, Any]) -> None:
    """fp64; lk-mix holds its mixing weight fixed, so its gradient is by design not that of its value."""

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        return distill(
            hidden, weight, case["slots"], case["slot_weights"], case["teacher"], _options(kind, 4)
        )[0]

    assert torch.autograd.gradcheck(
        value, (case["hidden"].requires_grad_(), case["weight"].requires_grad_()), eps=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "flags", [{"lm_head": "own"}, {"hidden_size": 12, "qk_norm": True, "attention_bias": True}]
)
def test_unrolled_gradients_equal_finite_differences(
    flags: dict[str, Any], make_head: Callable[..., Eagle3Head], make_batch: Any, target_rows: Tensor
) -> None:
    """The whole graph: fusion, attention over own keys, feedback, loss; a few weights of every tensor."""
    head = make_head(**flags)
    batch = make_batch(target_rows, [(8, 2), (6, 3)]).packed(3)

    def value() -> Tensor:
        teacher = Teacher(
            batch.final,
            batch.log_norm,
            target_rows[head.vocab.ids],
            head.vocab.draft_ids()[batch.argmax.long()],
        )
        return unrolled_loss(head, batch, teacher, head.head_weight, _options("kl", 5)).loss

    value().backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in head.named_parameters():
        flat = parameter.detach().view(-1)
        assert parameter.grad is not None, name
        for place in torch.randint(0, len(flat), (3,), generator=generator).tolist():
            kept = float(flat[place])
            with torch.no_grad():
                flat[place] = kept + 1e-5
                up = float(value())
                flat[place] = kept - 1e-5
                down = float(value())
                flat[place] = kept
            numeric = (up - down) / 2e-5
            assert abs(numeric - float(parameter.grad.view(-1)[place])) < 1e-6 * max(1, abs(numeric)), name


def test_acceptance_is_measured_over_the_whole_target_vocabulary(case: dict[str, Any]) -> None:
    """A target that always says what the draft cannot: agreement 0, and A at most the sayable mass."""
    teacher = case["teacher"]
    unsayable = Teacher(teacher.final, teacher.log_norm + 5.0, teacher.weight, torch.full((ROWS,), -1))
    _, overlap, hits = distill(
        case["hidden"],
        case["weight"],
        case["slots"],
        case["slot_weights"],
        unsayable,
        _options("kl", 4, True),
    )
    assert not hits.any()
    assert bool((overlap <= case["p"][case["slots"]].sum(-1) * torch.exp(torch.tensor(-5.0)) + 1e-12).all())


def test_measured_overlap_is_sum_of_minima(case: dict[str, Any]) -> None:
    p, q = case["p"][case["slots"]], torch.softmax(case["hidden"] @ case["weight"].T, -1)
    for kind in LOSS_KINDS:
        _, overlap, _ = distill(
            case["hidden"],
            case["weight"],
            case["slots"],
            case["slot_weights"],
            case["teacher"],
            _options(kind, 4, True),
        )
        assert (overlap - torch.minimum(p, q).sum(-1)).abs().max() < 1e-12


def test_splitting_a_batch_changes_no_gradient(
    make_head: Callable[..., Eagle3Head], make_batch: Any, target_rows: Tensor
) -> None:
    """Sums divided by the whole batch's weight: micro-batches of unequal size count by their slots."""
    head = make_head()
    data = make_batch(target_rows, [(9, 2), (5, 3), (12, 6)])

    def gradient(groups: list[list[int]]) -> Tensor:
        head.zero_grad()
        for group in groups:
            part = type(data)([data.sequences[i] for i in group], [data.states[i] for i in group])
            batch = part.packed(3)
            teacher = Teacher(
                batch.final,
                batch.log_norm,
                target_rows[head.vocab.ids],
                head.vocab.draft_ids()[batch.argmax.long()],
            )
            unrolled_loss(head, batch, teacher, head.head_weight, _options("kl", 6)).loss.backward()
        return torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])

    assert (gradient([[0, 1, 2]]) - gradient([[0], [1, 2]])).abs().max() < 1e-10


def test_rows_laid_out_for_onednn_give_the_same_law() -> None:
    """fp32 sums in another order, nothing else; a card and fp64 go without."""
    generator = torch.Generator().manual_seed(0)
    weight, final = (torch.randn(rows, 33, generator=generator) for rows in (75, 9))
    packed = packed_rows(weight)
    if packed is None:
        pytest.skip("this build of torch has no oneDNN")
    plain = Teacher(final, torch.zeros(9), weight, torch.zeros(9))
    rows = torch.tensor([0, 3, 8])
    assert (replace(plain, packed=packed).logits(rows) - plain.logits(rows)).abs().max() < 1e-5
    assert packed_rows(weight.double()) is None
