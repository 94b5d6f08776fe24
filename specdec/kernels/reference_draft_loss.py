"""The draft loss over pieces of its slots in plain torch: a CPU's path, and what `draft_loss` equals.

Owns the loss of a slot and its closed-form gradient, from logits that the caller made. The gradient takes the
place of the draft's logits; probabilities exist only for a few slots at a time, so two matrices of logits are
all that is held. Knows nothing of draft heads, or of how slots are weighed.

With p the target's law cut to the draft vocabulary (summing to its mass m <= 1), q the draft's law, both over
the draft vocabulary, and A = sum_v min(p_v, q_v) the chance that a sampled draft is accepted:

    kl      m * KL(p / m || q), gradient in the logits  m q - p
    lk      -log A              gradient  (q sum_u q_u 1[q_u<p_u] - q 1[q<p]) / A
    lk-mix  lam * kl + (1 - lam) * (1 - A) with lam = exp(-3 A) held fixed

Both laws come from softmax, whose exponential is several times faster on a CPU than `torch.exp`; log-sum-exp
is read off the largest probability. Sources: EAGLE-3 (arXiv:2503.01840) for the soft cross-entropy, LK losses
(arXiv:2602.23881).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# below this an acceptance chance is rounding, and its logarithm noise
TINY = 1e-30
KINDS = ("kl", "lk", "lk-mix")
# numbers in a piece [slots, draft vocabulary] for each thread: a few such in fp32 stay in the cache of a core
PIECE_NUMBERS = 1 << 18


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
    losses = torch.empty(len(student), dtype=wide, device=student.device)
    overlaps = torch.empty_like(losses) if measure else None
    best = torch.empty_like(losses, dtype=torch.int64) if measure else None
    log_norm, scale = log_norm.to(wide).unsqueeze(-1), scale.to(wide).unsqueeze(-1)
    for piece in _pieces(student):
        logits = student[piece].to(wide)
        used, which = torch.unique_consecutive(rows[piece], return_inverse=True)
        law = _target_law(teacher[used].to(wide), log_norm[used])
        if len(used) < len(logits):
            law = _TargetLaw(law.p.index_select(0, which), law.mass[which], law.entropy[which])
        q = torch.softmax(logits, -1)
        kl = (law.p * logits).sum(-1, keepdim=True).sub_(_log_sum_exp(logits, q) * law.mass)
        kl = kl.add_(law.entropy).neg_()
        if best is not None:
            best[piece] = logits.argmax(-1)
        overlap = torch.minimum(law.p, q).sum(-1, keepdim=True) if kind != "kl" or measure else None
        if overlaps is not None:
            assert overlap is not None, "measuring counts A"
            overlaps[piece] = overlap[:, 0]
        if kind == "kl":
            losses[piece] = kl[:, 0]
            student[piece] = q.mul_(law.mass).sub_(law.p).mul_(scale[piece])
            continue

        assert overlap is not None, "both LK losses are made of A"
        # a comparison written as numbers: masks of bools are many times slower than products on a CPU
        below = q.clone().lt_(law.p).mul_(q)
        if kind == "lk":
            safe = overlap.clamp_min(TINY)
            loss, of_p, of_fall = -safe.log(), None, scale[piece] / safe
        else:
            kl_share = torch.exp(-3.0 * overlap)
            loss = kl_share * kl + (1 - kl_share) * (1 - overlap)
            of_p, of_fall = kl_share * scale[piece], (1 - kl_share) * scale[piece]
        losses[piece] = loss[:, 0]
        # the gradient is linear in q, in q where q < p, and in p
        of_q = of_fall * below.sum(-1, keepdim=True)
        if of_p is not None:
            of_q += of_p * law.mass
        gradient = q.mul_(of_q).addcmul_(below, of_fall, value=-1)
        student[piece] = gradient if of_p is None else gradient.addcmul_(law.p, of_p, value=-1)
    return SlotLosses(losses, overlaps, best)


@dataclass(frozen=True)
class _TargetLaw:
    """p [rows, draft_vocab], its mass [rows, 1], and -sum p log(p / m) [rows, 1]."""

    p: Tensor
    mass: Tensor
    entropy: Tensor


def _target_law(logits: Tensor, log_norm: Tensor) -> _TargetLaw:
    p = torch.softmax(logits, -1)
    log_sum = _log_sum_exp(logits, p)
    mass = torch.exp(log_sum - log_norm)
    entropy = log_sum.sub_((p * logits).sum(-1, keepdim=True)).mul_(mass)
    return _TargetLaw(p.mul_(mass), mass, entropy)


def _pieces(logits: Tensor) -> Iterator[slice]:
    slots = max(1, PIECE_NUMBERS * torch.get_num_threads() // logits.shape[1])
    return (slice(low, low + slots) for low in range(0, len(logits), slots))


def _log_sum_exp(logits: Tensor, law: Tensor) -> Tensor:
    """[rows, 1], of logits whose softmax is `law`."""
    return logits.amax(-1, keepdim=True) - law.amax(-1, keepdim=True).log()
