"""Distillation losses over a reduced vocabulary, never holding [batch, tokens, vocabulary].

Owns the loss per slot, its closed-form gradient, and the pass over blocks of rows. Blocks are cut along the
teacher's rows: the target's law at a position is computed once and serves every unroll step that predicts it.
Knows nothing of the unrolled forward.

With p the target's law cut to the draft vocabulary (summing to its mass m <= 1), q the draft's law, both over
the draft vocabulary, and A = sum_v min(p_v, q_v) the chance that a sampled draft is accepted:

    kl      m * KL(p / m || q), gradient in the logits  m q - p
    lk      -log A              gradient  -(q 1[q<p] - q sum_u q_u 1[q_u<p_u]) / A
    lk-mix  lam * kl + (1 - lam) * (1 - A) with lam = exp(-3 A) held fixed

Sources: EAGLE-3 (arXiv:2503.01840) for the soft cross-entropy, LK losses (arXiv:2602.23881).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.train.batching import RowBatch
from specdec.train.config import LossKind
from specdec.train.unroll import unroll

# below this a mass or an acceptance chance is rounding, and its logarithm noise.
TINY = 1e-30


@dataclass(frozen=True)
class Teacher:
    """The target's law for packed rows.

    `final` [rows, hidden] normed states; `log_norm` [rows] over the whole vocabulary; `weight` [draft_vocab,
    hidden] its output rows; `argmax_draft_ids` [rows] draft id of its first choice, -1 where not sayable.
    """

    final: Tensor
    log_norm: Tensor
    weight: Tensor
    argmax_draft_ids: Tensor

    def law(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """P [len(rows), draft_vocab] and sum p log(p / m) [len(rows)]."""
        logits = self.final[rows].to(self.weight.dtype) @ self.weight.T
        log_mass = torch.logsumexp(logits, -1) - self.log_norm[rows].to(logits.dtype)
        log_share = torch.log_softmax(logits, dim=-1)
        p = torch.exp(log_share + log_mass.unsqueeze(-1))
        return p, (p * log_share).sum(-1)


@dataclass(frozen=True)
class LossOptions:
    """`measure` also counts acceptance, which costs two more passes over each block."""

    kind: LossKind
    chunk_rows: int
    compute_dtype: torch.dtype
    measure: bool


def slot_loss(
    kind: LossKind, logits: Tensor, p: Tensor, neg_entropy: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss [rows], its gradient in the logits [rows, draft_vocab], and A [rows] where the loss needs it."""
    q = torch.softmax(logits, dim=-1)
    if kind == "kl":
        return *_kl(logits, q, p, neg_entropy), None
    overlap = torch.minimum(p, q).sum(-1)
    inside = torch.where(q < p, q, torch.zeros((), dtype=q.dtype, device=q.device))
    # minus the gradient of A in the logits
    fall = q * inside.sum(-1, keepdim=True) - inside
    if kind == "lk":
        safe = overlap.clamp_min(TINY)
        return -safe.log(), fall / safe.unsqueeze(-1), overlap
    loss, gradient = _kl(logits, q, p, neg_entropy)
    lam = torch.exp(-3.0 * overlap)
    return (
        lam * loss + (1 - lam) * (1 - overlap),
        gradient * lam.unsqueeze(-1) + fall * (1 - lam).unsqueeze(-1),
        overlap,
    )


def _kl(logits: Tensor, q: Tensor, p: Tensor, neg_entropy: Tensor) -> tuple[Tensor, Tensor]:
    mass = p.sum(-1)
    # log-sum-exp from the largest probability, two reductions instead of another exponential pass.
    log_norm = logits.amax(-1) - q.amax(-1).log()
    loss = neg_entropy - (p * logits).sum(-1) + mass * log_norm
    return loss, torch.addcmul(-p, q, mass.unsqueeze(-1))


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
        losses = torch.zeros(len(slots), dtype=wide, device=hidden.device)
        overlaps, hits = torch.zeros_like(losses), torch.zeros_like(losses)
        grad_hidden = torch.empty(hidden.shape, dtype=wide, device=hidden.device)
        grad_weight = (
            torch.zeros(weight.shape, dtype=wide, device=hidden.device) if weight.requires_grad else None
        )
        for low in range(0, len(slots), options.chunk_rows):
            block = slice(low, low + options.chunk_rows)
            rows, inverse = torch.unique_consecutive(slots[block], return_inverse=True)
            p, neg_entropy = teacher.law(rows)
            p, neg_entropy = p[inverse].to(wide), neg_entropy[inverse].to(wide)
            inputs = hidden[block].to(compute)
            logits = (inputs @ matrix.T).to(wide)
            losses[block], gradient, overlap = slot_loss(options.kind, logits, p, neg_entropy)
            if options.measure:
                hits[block] = (logits.argmax(-1) == teacher.argmax_draft_ids[slots[block]]).to(wide)
                if overlap is None:
                    overlap = torch.minimum(p, torch.softmax(logits, -1)).sum(-1)
                overlaps[block] = overlap
            scale = slot_weights[block].to(wide).unsqueeze(-1)
            if grad_weight is not None:
                grad_weight += ((gradient * scale).to(compute).T @ inputs).to(wide)
            grad_hidden[block] = (gradient.to(compute) @ matrix).to(wide) * scale
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
