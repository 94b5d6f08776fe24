"""Distillation losses over a reduced vocabulary, never holding [batch, tokens, vocabulary].

Owns the pass over blocks of rows, and the gradients it forms on the way. Blocks are cut along the teacher's
rows: the target's logits at a position are computed once and serve every unroll step that predicts it. Of a
block two matrices of logits exist, and the gradient takes the place of one; the loss of a slot is
`specdec.kernels`' `draft_loss`, a Triton kernel on a card and plain torch elsewhere, where the formulas are.
Knows nothing of the unrolled forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.kernels import kernel, kernel_backend
from specdec.train.batching import RowBatch
from specdec.train.config import LossKind
from specdec.train.packed_rows import packed_product
from specdec.train.unroll import unroll

# how far below the first choice the logit of a token lies that top-k distillation leaves out
ABSENT = 1e4


@dataclass(frozen=True)
class Teacher:
    """The target's law for packed rows.

    `final` [rows, hidden] normed states; `log_norm` [rows] over the whole vocabulary; `weight` [draft_vocab,
    hidden] its output rows; `argmax_draft_ids` [rows] draft id of its first choice, -1 where not sayable.
    `top_k` keeps the most probable tokens of the draft vocabulary and takes the chance of all others for 0
    (top-k distillation, after HASS, arXiv:2408.15766); A is then that of the kept tokens alone. `packed` is
    `weight` as `packed_rows` lays it out.
    """

    final: Tensor
    log_norm: Tensor
    weight: Tensor
    argmax_draft_ids: Tensor
    top_k: int | None = None
    packed: Tensor | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """Logits of the draft vocabulary [len(rows), draft_vocab]."""
        final = self.final[rows].to(self.weight.dtype)
        logits = final @ self.weight.T if self.packed is None else packed_product(final, self.packed)
        if self.top_k is None or self.top_k >= logits.shape[-1]:
            return logits
        kept, ids = logits.topk(self.top_k, dim=-1)
        # a chance of exp(-1e4) is 0 in every precision, where that of -inf times its logarithm is no number
        return torch.full_like(logits, -ABSENT).add_(kept[:, :1]).scatter_(-1, ids, kept)


@dataclass(frozen=True)
class LossOptions:
    """`measure` also counts acceptance, which costs two more passes over each block on a CPU.

    `kernels` is a setting of `specdec.kernels.kernel_backend`.
    """

    kind: LossKind
    chunk_rows: int
    compute_dtype: torch.dtype
    measure: bool
    kernels: str = "auto"


class _Distill(torch.autograd.Function):
    """Weighted sum of slot losses; gradients are formed in the forward, block by block."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        slots: Tensor,
        slot_weights: Tensor,
        teacher: Teacher,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        compute = options.compute_dtype if wide == torch.float32 else wide
        matrix = weight.detach().to(compute)
        # the kernel computes in fp32; only gradient checks ask for fp64
        setting = options.kernels if wide == torch.float32 else "reference"
        slot_losses = kernel("draft_loss", kernel_backend(hidden.device, setting, compute))
        losses = torch.zeros(len(slots), dtype=wide, device=hidden.device)
        overlaps, hits = torch.zeros_like(losses), torch.zeros_like(losses)
        grad_hidden = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
        grad_weight = (
            torch.zeros(weight.shape, dtype=wide, device=hidden.device) if weight.requires_grad else None
        )
        for low in range(0, len(slots), options.chunk_rows):
            block = slice(low, low + options.chunk_rows)
            rows, inverse = torch.unique_consecutive(slots[block], return_inverse=True)
            inputs = hidden[block].to(compute)
            gradient = inputs @ matrix.T
            found = slot_losses(
                options.kind,
                gradient,
                teacher.logits(rows),
                inverse,
                teacher.log_norm[rows],
                slot_weights[block],
                measure=options.measure,
            )
            losses[block] = found.loss
            if options.measure:
                assert found.best is not None, "measuring gives the first choice"
                overlaps[block] = found.overlap
                hits[block] = (found.best == teacher.argmax_draft_ids[slots[block]]).to(wide)
            if grad_weight is not None:
                grad_weight += (gradient.T @ inputs).to(wide)
            grad_hidden[block] = (gradient @ matrix).to(wide)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.mark_non_differentiable(overlaps, hits)
        return (losses * slot_weights.to(wide)).sum(), overlaps, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scaled = None if grad_weight is None else (grad_weight * grads[0]).to(weight_dtype)
        return (grad_hidden * grads[0]).to(hidden_dtype), scaled, None, None, None, None


def distill(
    hidden: Tensor,
    weight: Tensor,
    slots: Tensor,
    slot_weights: Tensor,
    teacher: Teacher,
    options: LossOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted loss sum, and A and greedy agreement of each slot (zeros unless measured).

    Args:
        hidden: normed draft outputs [slots, hidden].
        weight: the draft's output rows [draft_vocab, hidden]; a gradient is formed when it wants one.
        slots: teacher row of each slot, ascending [slots].
        slot_weights: [slots].
        teacher: the target's law.
        options: kind, block size, matmul dtype.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        loss, overlaps, hits = _Distill.apply(hidden, weight, slots, slot_weights, teacher, options)
    return loss, overlaps, hits


@dataclass(frozen=True)
class UnrolledLoss:
    """Weighted loss sum of a batch; per step, the trained slots and the sums of A and of greedy agreement."""

    loss: Tensor
    slots: Tensor
    overlap: Tensor
    hits: Tensor


def unrolled_loss(
    head: Eagle3Head, batch: RowBatch, teacher: Teacher, weight: Tensor, options: LossOptions
) -> UnrolledLoss:
    """Unroll a head over a batch and sum the loss of its trained slots.

    Args:
        head: the draft head.
        batch: packed sequences.
        teacher: the target's law at the batch's rows.
        weight: the draft's output rows in the dtype of its products (a copy of frozen rows, or the
        parameter).
        options: loss options.
    """
    hidden, slots, weights, depth = [], [], [], []
    for step, output in enumerate(unroll(head, batch)):
        share = batch.weights[step, output.chains]
        kept = torch.nonzero(share > 0).flatten()
        hidden.append(head.normed(output.z[kept]))
        slots.append(batch.starts[output.chains[kept]] + step + 1)
        weights.append(share[kept])
        depth.append(torch.full_like(kept, step))
    teacher_rows = torch.cat(slots)
    order = torch.argsort(teacher_rows, stable=True)
    loss, overlaps, hits = distill(
        torch.cat(hidden)[order], weight, teacher_rows[order], torch.cat(weights)[order], teacher, options
    )
    steps, depths = len(batch.weights), torch.cat(depth)[order]
    zeros = torch.zeros(steps, dtype=overlaps.dtype, device=overlaps.device)
    return UnrolledLoss(
        loss=loss,
        slots=torch.bincount(depths, minlength=steps),
        overlap=zeros.index_add(0, depths, overlaps),
        hits=zeros.index_add(0, depths, hits),
    )
