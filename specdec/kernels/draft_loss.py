"""The draft loss, forward and backward, as one Triton kernel over tiles of the vocabulary.

Owns the kernel and its launch; signature, formulas and meaning are those of `reference_draft_loss`. A program
is one slot. It runs over its row of draft logits and of the target's two or three times, which a card's cache
serves after the first, and keeps nothing but sums: no probability is ever written, and the gradient takes the
place of the draft's logits. Computes in fp32.

Letters: V draft vocabulary; s, t logits of draft and target; p, q their laws; m mass of p; A acceptance.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.compiled import CompileCase
from specdec.kernels.reference_draft_loss import KINDS, TINY, SlotLosses

# columns a program holds: eight for each of 256 threads; were they fewer than threads, several threads would
# hold the same logit, and one could read it after another wrote the gradient there
TILE = 2048
NUM_WARPS = 8
_KL, _LK, _LK_MIX = (tl.constexpr(index) for index in range(3))
_TINY = tl.constexpr(TINY)


@triton.jit
def _logits(row_ptr, columns, V):
    return tl.load(row_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _draft_loss_kernel(
    student_ptr,
    teacher_ptr,
    rows_ptr,
    log_norm_ptr,
    scale_ptr,
    loss_ptr,
    overlap_ptr,
    best_ptr,
    student_stride,
    teacher_stride,
    V,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + slot).to(tl.int64)
    student = student_ptr + slot * student_stride
    teacher = teacher_ptr + row * teacher_stride
    lanes = tl.arange(0, BLOCK)

    # log-sum-exp of both rows, and the draft's first choice
    s_top = float("-inf")
    t_top = float("-inf")
    s_sum = 0.0
    t_sum = 0.0
    best = tl.zeros([], tl.int32)
    for low in range(0, V, BLOCK):
        columns = low + lanes
        s = _logits(student, columns, V)
        t = _logits(teacher, columns, V)
        s_here = tl.max(s, 0)
        first = tl.min(tl.where(s == s_here, columns, V), 0)
        best = tl.where(s_here > s_top, first, best)
        s_next = tl.maximum(s_top, s_here)
        t_next = tl.maximum(t_top, tl.max(t, 0))
        s_sum = s_sum * tl.exp(s_top - s_next) + tl.sum(tl.exp(s - s_next), 0)
        t_sum = t_sum * tl.exp(t_top - t_next) + tl.sum(tl.exp(t - t_next), 0)
        s_top = s_next
        t_top = t_next
    s_log = s_top + tl.log(s_sum)
    t_log = t_top + tl.log(t_sum)
    mass = tl.exp(t_log - tl.load(log_norm_ptr + row).to(tl.float32))
    scale = tl.load(scale_ptr + slot).to(tl.float32)

    kl = 0.0
    overlap = 0.0
    inside = 0.0
    for low in range(0, V, BLOCK):
        columns = low + lanes
        real = columns < V
        s_share = _logits(student, columns, V) - s_log
        t_share = _logits(teacher, columns, V) - t_log
        q = tl.exp(s_share)
        p = tl.exp(t_share) * mass
        # past the end both shares are -inf, whose difference is not a number
        kl += tl.sum(tl.where(real, p * (t_share - s_share), 0.0), 0)
        overlap += tl.sum(tl.minimum(p, q), 0)
        inside += tl.sum(tl.where(q < p, q, 0.0), 0)
        if KIND == _KL:
            gradient = (q * mass - p) * scale
            tl.store(student + columns, gradient.to(student_ptr.dtype.element_ty), mask=real)

    loss = kl
    if KIND != _KL:
        if KIND == _LK:
            safe = tl.maximum(overlap, _TINY)
            loss = -tl.log(safe)
            kl_share = 0.0
            fall_share = 1.0 / safe
        else:
            kl_share = tl.exp(-3.0 * overlap)
            fall_share = 1.0 - kl_share
            loss = kl_share * kl + fall_share * (1.0 - overlap)
        for low in range(0, V, BLOCK):
            columns = low + lanes
            q = tl.exp(_logits(student, columns, V) - s_log)
            p = tl.exp(_logits(teacher, columns, V) - t_log) * mass
            gradient = (q * inside - tl.where(q < p, q, 0.0)) * fall_share
            if KIND == _LK_MIX:
                gradient += (q * mass - p) * kl_share
            tl.store(student + columns, (gradient * scale).to(student_ptr.dtype.element_ty), mask=columns < V)
    tl.store(loss_ptr + slot, loss)
    tl.store(overlap_ptr + slot, overlap)
    tl.store(best_ptr + slot, best.to(tl.int64))


def draft_loss(
    kind: str,
    student: Tensor,
    teacher: Tensor,
    rows: Tensor,
    log_norm: Tensor,
    scale: Tensor,
    *,
    measure: bool,
) -> SlotLosses:
    """See `reference_draft_loss.draft_loss`; A and the first choice are free here and always given."""
    assert kind in KINDS, f"{kind} is no loss"
    assert student.dtype != torch.float64, "the kernel computes in fp32; fp64 is for the reference"
    assert student.stride(1) == teacher.stride(1) == 1, "a row of logits lies side by side"
    slots, vocab = student.shape
    assert TILE >= 32 * NUM_WARPS or not student.is_cuda, "a logit belongs to one thread"
    loss = torch.empty(slots, dtype=torch.float32, device=student.device)
    overlap, best = torch.empty_like(loss), torch.empty_like(loss, dtype=torch.int64)
    if slots:
        _draft_loss_kernel[(slots,)](
            student,
            teacher,
            rows,
            log_norm,
            scale,
            loss,
            overlap,
            best,
            student.stride(0),
            teacher.stride(0),
            vocab,
            KIND=KINDS.index(kind),
            BLOCK=TILE,
            num_warps=NUM_WARPS,
        )
    return SlotLosses(loss, overlap, best)


def compile_cases() -> list[CompileCase]:
    """The plain gradient as training in bf16 makes it, whose target stays in fp32, and the others."""
    cases = []
    for kind, student, teacher in (
        ("kl", "*bf16", "*fp32"),
        ("lk-mix", "*bf16", "*bf16"),
        ("lk", "*fp32", "*fp32"),
    ):
        numbers = ("log_norm_ptr", "scale_ptr", "loss_ptr", "overlap_ptr")
        sizes = ("student_stride", "teacher_stride", "V")
        cases.append(
            CompileCase(
                name=f"draft_loss/{kind}-{student[1:]}-{teacher[1:]}",
                kernel=_draft_loss_kernel,
                signature={
                    "student_ptr": student,
                    "teacher_ptr": teacher,
                    **dict.fromkeys(numbers, "*fp32"),
                    "rows_ptr": "*i64",
                    "best_ptr": "*i64",
                    **dict.fromkeys(sizes, "i32"),
                },
                constants={"KIND": KINDS.index(kind), "BLOCK": TILE},
                aligned=("student_ptr", "teacher_ptr", *numbers, *sizes),
                num_warps=NUM_WARPS,
            )
        )
    return cases
