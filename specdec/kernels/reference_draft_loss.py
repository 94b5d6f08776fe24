"""The draft loss over pieces of the vocabulary in plain torch: a CPU's path, and what `draft_loss` equals.

Owns the loss of a slot and its closed-form gradient, from logits that the caller made. The gradient takes the
place of the draft's logits; probabilities exist only for a piece of the vocabulary at a time, so two matrices
of logits are all that is held. Knows nothing of draft heads, or of how slots are weighed.

With p the target's law cut to the draft vocabulary (summing to its mass m <= 1), q the draft's law, both over
the draft vocabulary, and A = sum_v min(p_v, q_v) the chance that a sampled draft is accepted:

    kl      m * KL(p / m || q), gradient in the logits  m q - p
    lk      -log A              gradient  (q sum_u q_u 1[q_u<p_u] - q 1[q<p]) / A
    lk-mix  lam * kl + (1 - lam) * (1 - A) with lam = exp(-3 A) held fixed

Sources: EAGLE-3 (arXiv:2503.01840) for the soft cross-entropy, LK losses (arXiv:2602.23881).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# below this an acceptance chance is rounding, and its logarithm noise
TINY = 1e-30
KINDS = ("kl", "lk", "lk-mix")
# numbers in a piece [slots, columns]: a few fp32 pieces stay in a 2 MB cache of one core
PIECE_NUMBERS = 1 << 17
# fewer columns than this make more calls than work
MIN_COLUMNS = 512


@dataclass(frozen=True)
class SlotLosses:
    """Of every slot: its loss, A, and the draft's first choice; the last two None where nobody asked."""

    loss: Tensor
    overlap: Tensor | None
    best: Tensor | None


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
    """Loss of every slot; `student` becomes the gradient in it, times `scale`.

    Args:
        kind: "kl", "lk" or "lk-mix".
        student: the draft's logits [slots, draft_vocab], overwritten.
        teacher: the target's logits [rows, draft_vocab], each row serving one slot or more.
        rows: row of `teacher` of every slot [slots].
        log_norm: log of the target's normaliser over its whole vocabulary [rows].
        scale: factor of every slot's gradient [slots].
        measure: also give A and the first choice.
    """
    assert kind in KINDS, f"{kind} is no loss"
    wide = torch.float64 if student.dtype == torch.float64 else torch.float32
    best = student.argmax(-1) if measure else None
    log_sum, log_part = _log_sum_exp(student, wide), _log_sum_exp(teacher, wide)
    log_norm = log_norm.to(wide).unsqueeze(-1)
    mass = torch.exp(log_part - log_norm)[rows]
    shared = len(teacher) < len(student)

    def laws(piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        log_q = student[:, piece].to(wide) - log_sum
        p = torch.exp(teacher[:, piece].to(wide) - log_norm)
        return log_q, torch.exp(log_q), p[rows] if shared else p

    neg_entropy = torch.zeros(len(teacher), dtype=wide, device=student.device)
    cross = torch.zeros(len(student), dtype=wide, device=student.device)
    overlap, inside = torch.zeros_like(cross), torch.zeros_like(cross)
    factor = scale.to(wide).unsqueeze(-1)
    for piece in _pieces(student):
        if kind != "lk":
            target = teacher[:, piece].to(wide)
            neg_entropy += (torch.exp(target - log_norm) * (target - log_part)).sum(-1)
        log_q, q, p = laws(piece)
        if kind != "lk":
            cross += log_q.mul_(p).sum(-1)
        if kind != "kl" or measure:
            overlap += torch.minimum(p, q).sum(-1)
        if kind == "kl":
            student[:, piece] = q.mul_(mass).sub_(p).mul_(factor)
        else:
            inside += q.masked_fill_(q >= p, 0.0).sum(-1)
    loss = neg_entropy[rows] - cross
    if kind == "kl":
        return SlotLosses(loss, overlap if measure else None, best)

    if kind == "lk":
        safe = overlap.clamp_min(TINY)
        loss, kl_share, fall_share = -safe.log(), None, 1 / safe
    else:
        kl_share = torch.exp(-3.0 * overlap)
        fall_share = 1 - kl_share
        loss = kl_share * loss + fall_share * (1 - overlap)
    # the gradient is linear in q, in q where q < p, and in p
    of_inside = fall_share.unsqueeze(-1) * factor
    of_q = of_inside * inside.unsqueeze(-1)
    of_p = None if kl_share is None else kl_share.unsqueeze(-1) * factor
    if of_p is not None:
        of_q = of_q + of_p * mass
    for piece in _pieces(student):
        _, q, p = laws(piece)
        below = q.masked_fill(q >= p, 0.0)
        gradient = q.mul_(of_q).addcmul_(below, of_inside, value=-1)
        student[:, piece] = gradient if of_p is None else gradient.addcmul_(p, of_p, value=-1)
    return SlotLosses(loss, overlap, best)


def _pieces(logits: Tensor) -> Iterator[slice]:
    columns = max(MIN_COLUMNS, PIECE_NUMBERS // max(1, len(logits)))
    return (slice(low, low + columns) for low in range(0, logits.shape[1], columns))


def _log_sum_exp(logits: Tensor, wide: torch.dtype) -> Tensor:
    """[rows, 1], a piece at a time; `torch.logsumexp` would hold another matrix."""
    top = logits.amax(-1, keepdim=True).to(wide)
    total = torch.zeros_like(top)
    for piece in _pieces(logits):
        total += torch.exp(logits[:, piece].to(wide) - top).sum(-1, keepdim=True)
    return top + total.log()
