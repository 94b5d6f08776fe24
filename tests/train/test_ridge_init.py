"""The closed-form start: it is the regression it claims to be, and better than noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.train.batching import SequenceStates
from specdec.train.ridge_init import RidgeSums, ridge_start
from specdec.train.sequences import TrainSequence


def _linear_world(head: Eagle3Head, rank: int, lengths: list[int]) -> Any:
    """Sequences whose next state is a linear function of normed taps and of a rank-limited token part."""
    generator = torch.Generator().manual_seed(2)
    hidden, taps = head.config.hidden_size, head.config.num_taps
    fusion = torch.randn(hidden, taps * hidden, generator=generator)
    token = torch.randn(hidden, rank, generator=generator) @ torch.randn(rank, hidden, generator=generator)
    sequences, states = [], []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, head.config.vocab_size, (length,), generator=generator)
        x = torch.randn(length - 1, taps, hidden, generator=generator)
        embeds = head.embed(ids[1:])
        unit = [t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True)) for t in (x, embeds)]
        final = torch.zeros(length - 1, hidden)
        final[1:] = (unit[0].flatten(1) @ fusion.T + unit[1] @ token.T)[:-1]
        sequences.append(TrainSequence(f"s{number}", tuple(ids.tolist()), (True,) * length))
        states.append(SequenceStates(x, final, torch.zeros(length - 1).int(), torch.ones(length - 1) * 50))
    return sequences, states


def test_a_linear_target_is_found_when_the_values_are_wide_enough(
    make_head: Callable[..., Eagle3Head], target_rows: Tensor
) -> None:
    """Catches rows paired one position off, and heads of a group that share values but not outputs."""
    head = make_head().float()
    rows = target_rows[head.vocab.ids].float()
    weight = torch.ones(head.config.hidden_size)
    explained = {}
    # two KV heads of six: the token part passes whole up to rank 12.
    for rank in (8, 16):
        sums = RidgeSums(head, weight)
        sums.add(*_linear_world(head, rank, [90, 120, 200, 60]))
        sums.add(*_linear_world(head, rank, [300]))
        explained[rank] = ridge_start(head, sums, rows)
    assert explained[8] > 0.99
    assert explained[16] < explained[8]


def test_a_self_attending_row_puts_out_the_prediction(
    make_head: Callable[..., Eagle3Head], target_rows: Tensor
) -> None:
    head = make_head().float()
    sequences, states = _linear_world(head, 8, [300, 200])
    sums = RidgeSums(head, torch.ones(head.config.hidden_size))
    sums.add(sequences, states)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            if name.endswith("v_proj.weight"):
                parameter.zero_()
        ridge_start(head, sums, target_rows[head.vocab.ids].float())
        head.midlayer.mlp.down_proj.weight.zero_()
        row = 7
        features = head.fuse(states[0].taps[row : row + 1])
        token = torch.tensor(sequences[0].token_ids[row + 1 : row + 2])
        _, _, values, residual = head.qkv(head.embed(token), features)
        group = head.config.num_heads // head.config.num_kv_heads
        z = head.finish(values.repeat_interleave(group, 1).flatten(1), residual)
    expected = states[0].final[row + 1]
    assert (z[0] - expected).norm() / expected.norm() < 0.1
