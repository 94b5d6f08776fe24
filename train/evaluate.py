"""Offline acceptance: what a head would reach in the engine, from teacher-forced text.

Owns the simulation of greedy chains over held-out text. Knows nothing of trees, sampling or training.

A drafted chain is followed only while it agrees with the text, and until the first disagreement the tokens it
feeds itself ARE the text. One unrolled pass over the true tokens therefore gives, for every row at once, the
number of tokens a greedy chain from that row would get accepted; walking the text from the first answer
token, skipping what each step commits, gives the engine's verify steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.train.batching import SequenceStates, pack
from specdec.train.sequences import TrainSequence
from specdec.train.states import StateSource, TargetStates
from specdec.train.unroll import unroll

# rows of one evaluation pass; attention memory grows with sequence length, not with this.
EVAL_ROWS = 4096


@dataclass(frozen=True, kw_only=True)
class OfflineAcceptance:
    """Counts and rates of simulated greedy chains (definitions of the design: bonus and recovered included).

    `conditional[d]` is accepted at depth d+1 given accepted before, None where never reached; `overlap` is
    the mean of sum min(p, q) at depth 1, p cut to the draft vocabulary; `greedy_share` is the share of
    answer tokens that are the target's first choice: below 1 the text is not the target's own greedy answer.
    """

    depth: int
    sequences: int
    tokens: int
    verify_steps: int
    committed: int
    acceptance_length: float | None
    conditional: tuple[float | None, ...]
    unconditional: tuple[float | None, ...]
    overlap: float | None
    coverage: float | None
    greedy_share: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            name: [round(x, 4) if x is not None else None for x in value]
            if isinstance(value, tuple)
            else round(value, 4)
            if isinstance(value, float)
            else value
            for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class ChainAgreement:
    """How a chain from each row of one conversation agrees with the target, along the text.

    `accepted` [rows]: tokens a greedy chain gets accepted, at most the depth. At each depth, given the text
    up to it, `overlap` [depth, rows] is sum min(p, q) and `divergence` [depth, rows] is KL(p || q), in nats,
    with p cut to the draft vocabulary and renormalised; both 0 where no answer token is left to draft.
    """

    accepted: Tensor
    overlap: Tensor
    divergence: Tensor


def offline_acceptance(
    head: Eagle3Head, target_model: Any, sequences: Sequence[TrainSequence], depth: int
) -> OfflineAcceptance:
    """Simulate greedy chains of `depth` over the answers of `sequences`.

    Args:
        head: the head as served (cast to its stored dtype).
        target_model: the Hugging Face target, or a `StateSource` that already has its states.
        sequences: held-out conversations; a chain never starts before the first answer token.
        depth: drafted tokens a step.
    """
    source: StateSource = (
        TargetStates(target_model, head.config.boundaries)
        if isinstance(target_model, torch.nn.Module)
        else target_model
    )
    counts = ChainCounts(depth)
    for each in sequence_counts(head, source, sequences, depth):
        counts.add(each)
    return counts.result(len(sequences))


def sequence_counts(
    head: Eagle3Head, source: StateSource, sequences: Sequence[TrainSequence], depth: int
) -> list[ChainCounts]:
    """What `offline_acceptance` counts, for each conversation by itself, in order."""
    found: list[ChainCounts] = []
    batch: list[TrainSequence] = []
    rows = 0
    for sequence in sequences:
        if batch and rows + len(sequence.token_ids) > EVAL_ROWS:
            found += _count(head, source, batch, depth)
            batch, rows = [], 0
        batch.append(sequence)
        rows += len(sequence.token_ids)
    return found + (_count(head, source, batch, depth) if batch else [])


class ChainCounts:
    """Counts of simulated greedy chains of `depth`, and sums of overlap and divergence at each depth.

    `rows[d]` rows have an answer token to draft at depth d + 1; `overlap[d]` and `divergence[d]` are sums
    over them (see `ChainAgreement`).
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tried, self.reached, self.passed = [0] * depth, [0] * depth, [0] * depth
        self.steps = self.committed = self.tokens = self.greedy = self.covered = 0
        self.rows = [0] * depth
        self.overlap, self.divergence = [0.0] * depth, [0.0] * depth

    def add(self, other: ChainCounts) -> None:
        """Add the counts of another conversation."""
        for name, value in vars(other).items():
            if isinstance(value, list):
                setattr(self, name, [a + b for a, b in zip(getattr(self, name), value, strict=True)])
            elif name != "depth":
                setattr(self, name, getattr(self, name) + value)

    def result(self, sequences: int) -> OfflineAcceptance:
        """Rates over all that was added."""

        def rate(part: float, whole: float) -> float | None:
            return part / whole if whole else None

        return OfflineAcceptance(
            depth=self.depth,
            sequences=sequences,
            tokens=self.tokens,
            verify_steps=self.steps,
            committed=self.committed,
            acceptance_length=rate(self.committed, self.steps),
            conditional=tuple(rate(p, r) for p, r in zip(self.passed, self.reached, strict=True)),
            unconditional=tuple(rate(p, t) for p, t in zip(self.passed, self.tried, strict=True)),
            overlap=rate(self.overlap[0], self.rows[0]),
            coverage=rate(self.covered, self.tokens),
            greedy_share=rate(self.greedy, self.tokens),
        )


@torch.no_grad()
def _count(
    head: Eagle3Head, source: StateSource, batch: list[TrainSequence], depth: int
) -> list[ChainCounts]:
    states = source.fetch(batch)
    sayable = head.vocab.t2d
    agreements = chain_agreement(head, batch, states, depth, source.output_rows(head.vocab.ids))
    found = []
    for sequence, state, agreement in zip(batch, states, agreements, strict=True):
        counts = ChainCounts(depth)
        ids, mask = torch.tensor(sequence.token_ids), torch.tensor(sequence.assistant_mask)
        answer = torch.nonzero(mask).flatten()
        counts.tokens = len(answer)
        counts.covered = int(sayable[ids[answer]].sum())
        counts.greedy = int((state.argmax[answer - 1] == ids[answer]).sum())
        for first, last in _spans(mask):
            begin = first - 1
            for level in range(depth):
                end = max(last - 1 - level, begin)
                counts.rows[level] += end - begin
                counts.overlap[level] += float(agreement.overlap[level, begin:end].sum())
                counts.divergence[level] += float(agreement.divergence[level, begin:end].sum())
            _walk(agreement.accepted, first, last, depth, counts)
        found.append(counts)
    return found


def _walk(accepted: Tensor, first: int, last: int, depth: int, counts: ChainCounts) -> None:
    """Walk one answer: `first` and `last` are the positions of its first and last token.

    With x_c the last committed token the chain starts at row c - 1 and proposes x_{c+1}, x_{c+2}, ...
    """
    committed_at = first
    while committed_at < last:
        left = last - committed_at
        reach = min(depth, left)
        passed = min(int(accepted[committed_at - 1]), reach)
        for level in range(reach):
            counts.tried[level] += 1
            counts.reached[level] += level <= passed
            counts.passed[level] += level < passed
        step = min(passed + 1, left)
        counts.steps += 1
        counts.committed += step
        committed_at += step


def _spans(mask: Tensor) -> list[tuple[int, int]]:
    """First and last position of each run of answer tokens."""
    edges = torch.diff(
        mask.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8), append=torch.zeros(1, dtype=torch.int8)
    )
    begins, ends = torch.nonzero(edges == 1).flatten(), torch.nonzero(edges == -1).flatten() - 1
    return [(int(a), int(b)) for a, b in zip(begins, ends, strict=True) if a > 0]


def chain_agreement(
    head: Eagle3Head,
    sequences: Sequence[TrainSequence],
    states: Sequence[SequenceStates],
    depth: int,
    teacher_rows: Tensor,
) -> list[ChainAgreement]:
    """Accepted tokens of a greedy chain from every row of each sequence that starts in its answers.

    Args:
        head: the draft head.
        sequences: conversations.
        states: target states of each.
        depth: drafted tokens.
        teacher_rows: the target's output rows of the draft vocabulary [draft_vocab, hidden].
    """
    weights = []
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids)
        weight = torch.zeros(depth, len(ids) - 1)
        mask = torch.tensor(sequence.assistant_mask)
        for step in range(depth):
            count = len(ids) - 2 - step
            if count > 0:
                # rows whose next token is an answer token: the first is where the engine's first chain
                # starts.
                weight[step, :count] = (mask[1 : count + 1] & mask[step + 2 :]).float()
        weights.append(weight)
    batch = pack(sequences, states, weights)
    rows = batch.num_rows
    agree = torch.zeros(depth, rows, dtype=torch.bool)
    overlap, divergence = torch.zeros(depth, rows), torch.zeros(depth, rows)
    if len(batch.starts):
        for step, output in enumerate(unroll(head, batch)):
            starts = batch.starts[output.chains]
            kept = batch.weights[step, output.chains] > 0
            starts, z = starts[kept], output.z[kept]
            for low in range(0, len(starts), 256):
                part = starts[low : low + 256]
                logits = head.logits(z[low : low + 256]).float()
                proposed = head.vocab.ids[logits.argmax(-1)]
                agree[step, part] = proposed == batch.next_ids[part + step + 1]
                teacher = batch.final[part + step + 1].float() @ teacher_rows.T
                log_q = torch.log_softmax(logits, -1)
                p = torch.exp(teacher - batch.log_norm[part + step + 1].unsqueeze(-1))
                overlap[step, part] = torch.minimum(p, log_q.exp()).sum(-1)
                log_p = torch.log_softmax(teacher, -1)
                divergence[step, part] = (log_p.exp() * (log_p - log_q)).sum(-1)
    accepted = agree.to(torch.int64).cumprod(0).sum(0)
    cuts = zip(batch.row_offsets, batch.row_offsets[1:], strict=False)
    return [
        ChainAgreement(accepted[low:high], overlap[:, low:high], divergence[:, low:high])
        for low, high in cuts
    ]
