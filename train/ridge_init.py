"""A closed-form start for a head: the best linear predictor of the target's next state.

Owns the regression and how its solution is written into a head. Knows nothing of the loop. The head must turn
(state k, token x_{k+1}) into the target's state at k+1, so ridge regression of the one on the other is
already a draft; training then starts from it instead of from noise. It is the ridge probe that layer
selection describes as a cheap oracle, kept.

    y_{k+1} = final state at k+1 over the final norm's weight       (unit scale, what `norm` must put out)
    z_k     = A [norm(tap_1); ...; norm(tap_K)] + B norm(embed(x_{k+1}))

A becomes `fc`. B goes through the values of a self-attending row, whose width caps its rank, so it is
projected on its leading output directions and A fitted again to what is left. `norm` takes the final norm's
weight, scaled to the confidence that fits best: a linear predictor is less sure than the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.layer_select.ridge import ridge_solve, unit_rms
from specdec.train.batching import SequenceStates
from specdec.train.sequences import TrainSequence

CONFIDENCES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
CONFIDENCE_ROWS = 1024
# rows kept of each added group of sequences.
SAMPLE_ROWS = 64
# the feed-forward block starts close to silent, so that the start is the predictor and not noise.
DOWN_STD = 0.005


class RidgeSums:
    """Running sums of the regression over whole sequences, and a sample of rows for the confidence.

    The first position is left out: it is a sink in many targets.
    """

    def __init__(self, head: Eagle3Head, final_weight: Tensor) -> None:
        config = head.config
        self.head, self.final_weight = head, final_weight
        self.taps = config.num_taps * config.target_hidden_size
        width = self.taps + config.hidden_size
        self.gram = torch.zeros(width, width)
        self.cross = torch.zeros(width, config.hidden_size)
        self.square, self.total = 0.0, torch.zeros(config.hidden_size)
        self.rows = 0
        self.sample: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def add(self, sequences: Sequence[TrainSequence], states: Sequence[SequenceStates]) -> None:
        """Add the rows of some sequences."""
        inputs, targets, log_norm = [], [], []
        for sequence, state in zip(sequences, states, strict=True):
            embeds = self.head.embed(torch.tensor(sequence.token_ids[2:-1])).float()
            inputs.append(torch.cat((unit_rms(state.taps[1:-1].float()).flatten(1), unit_rms(embeds)), dim=1))
            targets.append(state.final[2:] / self.final_weight)
            log_norm.append(state.log_norm[2:])
        x, y = torch.cat(inputs), torch.cat(targets)
        self.gram.addmm_(x.T, x)
        self.cross.addmm_(x.T, y)
        self.square += float(y.pow(2).sum())
        self.total += y.sum(0)
        self.rows += len(x)
        step = max(1, len(x) // SAMPLE_ROWS)
        self.sample.append((x[::step], y[::step], torch.cat(log_norm)[::step]))


@torch.no_grad()
def ridge_start(head: Eagle3Head, sums: RidgeSums, teacher_rows: Tensor) -> float:
    """Write the regression into `head`; return the share of variance that it explains.

    Args:
        head: a head whose taps are normed (`fc_norm`), with random weights.
        sums: what to fit.
        teacher_rows: the target's output rows of the draft vocabulary.
    """
    config, taps, gram, cross = head.config, sums.taps, sums.gram, sums.cross
    width = config.num_kv_heads * config.head_dim
    token_part = ridge_solve(gram, cross)[taps:].T
    # leading output directions of what the token contributes, by its second moment.
    moment = token_part @ gram[taps:, taps:] @ token_part.T
    leading = torch.linalg.eigh(moment.double()).eigenvectors[:, -width:].float()
    if leading.shape[1] < width:
        leading = torch.nn.functional.pad(leading, (0, width - leading.shape[1]))
    values = leading.T @ token_part
    whole = leading @ values
    fusion = ridge_solve(gram[:taps, :taps], cross[:taps] - gram[:taps, taps:] @ whole.T).T
    _write(head, fusion, values, leading)
    linear = torch.cat((fusion, whole), dim=1)
    head.norm.weight.copy_(sums.final_weight * _confidence(linear, sums, teacher_rows))
    # |y - Wx|^2 summed over the rows, from the sums alone.
    left = sums.square - 2 * float((linear.T * cross).sum()) + float(((linear @ gram) * linear).sum())
    spread = sums.square - float(sums.total.pow(2).sum()) / sums.rows
    return 1.0 - left / spread


def _write(head: Eagle3Head, fusion: Tensor, values: Tensor, leading: Tensor) -> None:
    config, attention = head.config, head.midlayer.self_attn
    hidden, group = config.hidden_size, config.num_heads // config.num_kv_heads
    head.fc.weight.copy_(fusion)
    # the product is what counts; equal norms of both factors let Adam move them alike.
    balance = (leading.norm() / values.norm()).sqrt()
    attention.v_proj.weight[: values.shape[0], :hidden].copy_(values * balance)
    blocks = leading.unflatten(1, (config.num_kv_heads, config.head_dim)) / balance / group
    attention.o_proj.weight.copy_(blocks.repeat_interleave(group, 1).flatten(1))
    generator = torch.Generator().manual_seed(0)
    head.midlayer.mlp.down_proj.weight.normal_(0.0, DOWN_STD, generator=generator)


def _confidence(linear: Tensor, sums: RidgeSums, teacher_rows: Tensor) -> float:
    """The scale of the output norm with the least cross-entropy on the sampled rows."""
    step = max(1, len(sums.sample) * SAMPLE_ROWS // CONFIDENCE_ROWS)
    x, y, log_norm = (torch.cat(column)[::step] for column in zip(*sums.sample, strict=True))
    p = torch.exp((y * sums.final_weight) @ teacher_rows.T - log_norm.unsqueeze(-1))
    draft = (unit_rms(x @ linear.T) * sums.final_weight) @ teacher_rows.T
    losses = [float(-(p * torch.log_softmax(scale * draft, -1)).sum(-1).mean()) for scale in CONFIDENCES]
    return CONFIDENCES[losses.index(min(losses))]
