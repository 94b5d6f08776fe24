"""Which rows and slots of a sequence are trained, and how sequences become batches.

Owns the loss mask by predicted token, the order of sequences in an epoch, and the packed batch. Sequences are
laid end to end without padding: linear layers see one flat list of rows, attention is per sequence. Knows
nothing of weights or losses.

Layout of a sequence of ids x_0..x_{n-1} (rows 0..n-2; the last position has no next token to pair with):

    row k            state k (taps at position k), embedding of x_{k+1}, rotary position k
    slot (s, j)      step j of the chain that starts at row s: embedding of x_{s+j+1}, rotary position s+j,
                     predicts x_{s+j+2}; its teacher is the target's law at position s+j+1
    slot exists      s + j + 2 <= n - 1
    slot is trained  when x_{s+j+2}, the token it predicts, is assistant text or its end of turn

For [BOS u u A1 A2 A3 EOT], trained (row: predicted) pairs:  j=0: 1:A1 2:A2 3:A3 4:EOT;
j=1: 0:A1 1:A2 2:A3 3:EOT;  j=2: 0:A2 1:A3 2:EOT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.train.config import TrainConfig
from specdec.train.sequences import TrainSequence


@dataclass(frozen=True)
class SequenceStates:
    """Target outputs at rows 0..n-2 of one sequence.

    `taps` [rows, taps, hidden]; `final` [rows, hidden] after the final norm; `argmax` [rows] and `log_norm`
    [rows] (log-sum-exp) of the logits over the whole target vocabulary.
    """

    taps: Tensor
    final: Tensor
    argmax: Tensor
    log_norm: Tensor


@dataclass(frozen=True)
class RowBatch:
    """Packed sequences.

    Flat rows: `next_ids`, `positions` [rows]; `states` [rows, taps, hidden]; `final` [rows, hidden];
    `argmax`, `log_norm` [rows]. Chains: `starts` [chains] flat row of each, ascending; `weights` [steps,
    chains] of each slot, 0 where it is not trained; `chain_sequence` [chains] and `row_offsets` [sequences
    + 1] tie them.
    """

    next_ids: Tensor
    positions: Tensor
    states: Tensor
    final: Tensor
    argmax: Tensor
    log_norm: Tensor
    starts: Tensor
    weights: Tensor
    chain_sequence: Tensor
    row_offsets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Flat rows of all sequences."""
        return self.row_offsets[-1]

    def to(self, device: torch.device) -> RowBatch:
        """The same batch with its tensors on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def slot_weights(
    trained: Tensor, steps: int, *, step_weight: float = 1.0, token_weights: Tensor | None = None
) -> Tensor:
    """Weights [steps, rows] of the slots of one sequence.

    Args:
        trained: whether each token carries loss when predicted, bool [tokens].
        steps: unroll steps.
        step_weight: weight of step j is step_weight ** j.
        token_weights: weight of each predicted token, [tokens]; default 1 where trained.
    """
    tokens = trained.to(torch.float32) if token_weights is None else token_weights * trained
    rows = len(trained) - 1
    weights = torch.zeros(steps, rows)
    for step in range(steps):
        count = rows - 1 - step
        if count > 0:
            weights[step, :count] = tokens[step + 2 :] * step_weight**step
    return weights


def token_weights(sequence: TrainSequence, config: TrainConfig, shared_prefix: int) -> Tensor:
    """Loss weight of each token when predicted: 1 on answers; on prompts as the options say.

    Prompt tokens every sequence shares (a fixed system turn) teach nothing and are left out.
    """
    weights = torch.zeros(len(sequence.token_ids))
    if config.prompt_rows:
        weights[shared_prefix:] = config.prompt_row_weight
    weights[torch.tensor(sequence.assistant_mask)] = 1.0
    return weights


def shared_prefix_len(sequences: Sequence[TrainSequence]) -> int:
    """Number of leading tokens that all sequences share; 0 for fewer than two sequences."""
    if len(sequences) < 2:
        return 0
    first = min(sequences, key=lambda s: s.token_ids).token_ids
    last = max(sequences, key=lambda s: s.token_ids).token_ids
    return next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )


def sequence_weights(sequence: TrainSequence, config: TrainConfig, shared_prefix: int) -> Tensor:
    """Slot weights [steps, rows] of one sequence under the options."""
    tokens = token_weights(sequence, config, shared_prefix)
    return slot_weights(tokens > 0, config.unroll, step_weight=config.step_weight, token_weights=tokens)


def sample_depths(weights: Tensor, step_weight: float, generator: torch.Generator) -> Tensor:
    """Trade step weights for chances: a chain reaches step j with chance step_weight ** j, then weighs 1.

    The expected loss is that of `weights` [steps, chains]; deep slots cost less.
    """
    steps, chains = weights.shape
    draw = torch.rand(chains, generator=generator)
    scale = step_weight ** torch.arange(steps, dtype=torch.float32).unsqueeze(1)
    return torch.where(draw.unsqueeze(0) < scale, weights / scale, torch.zeros(()))


def epoch_plan(rows: Sequence[int], batch_rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of an epoch as sequence indices: a shuffle by (seed, epoch), cut at about `batch_rows`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    plan: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for index in torch.randperm(len(rows), generator=generator).tolist():
        # a batch closes at the size nearest to the wish, so that no batch is twice as large as another.
        if current and filled + rows[index] / 2 > batch_rows:
            plan.append(current)
            current, filled = [], 0
        current.append(index)
        filled += rows[index]
    if current:
        plan.append(current)
    return plan


def split_micro(batch: Sequence[int], rows: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a batch into micro-batches of at most `limit` rows (a longer sequence stands alone)."""
    micros: list[list[int]] = [[]]
    filled = 0
    for index in batch:
        if micros[-1] and filled + rows[index] > limit:
            micros.append([])
            filled = 0
        micros[-1].append(index)
        filled += rows[index]
    return micros


def share_batch(batch: Sequence[int], rows: Sequence[int], shares: int) -> list[list[int]]:
    """Cut a batch into shares of nearly as many rows, one a process: every sequence in one of them."""
    if shares == 1:
        return [list(batch)]
    found: list[list[int]] = [[] for _ in range(shares)]
    filled = [0] * shares
    for index in sorted(batch, key=lambda index: (-rows[index], index)):
        lightest = filled.index(min(filled))
        found[lightest].append(index)
        filled[lightest] += rows[index]
    return found


def pack(
    sequences: Sequence[TrainSequence], states: Sequence[SequenceStates], weights: Sequence[Tensor]
) -> RowBatch:
    """Lay sequences end to end; a row is a chain when any of its slots is trained.

    Args:
        sequences: the sequences of the batch.
        states: target outputs of each.
        weights: slot weights [steps, rows] of each.
    """
    next_ids, positions, starts, chain_weights, owner = [], [], [], [], []
    offsets = [0]
    for number, (sequence, weight) in enumerate(zip(sequences, weights, strict=True)):
        ids = torch.tensor(sequence.token_ids)
        rows = len(ids) - 1
        assert states[number].taps.shape[0] == rows, "states must cover every row of their sequence"
        next_ids.append(ids[1:])
        positions.append(torch.arange(rows))
        chains = torch.nonzero((weight > 0).any(0)).flatten()
        starts.append(chains + offsets[-1])
        chain_weights.append(weight[:, chains])
        owner.append(torch.full((len(chains),), number))
        offsets.append(offsets[-1] + rows)
    return RowBatch(
        next_ids=torch.cat(next_ids),
        positions=torch.cat(positions),
        states=torch.cat([item.taps for item in states]),
        final=torch.cat([item.final for item in states]),
        argmax=torch.cat([item.argmax for item in states]),
        log_norm=torch.cat([item.log_norm for item in states]),
        starts=torch.cat(starts),
        weights=torch.cat(chain_weights, dim=1),
        chain_sequence=torch.cat(owner),
        row_offsets=tuple(offsets),
    )
