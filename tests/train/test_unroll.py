"""The unrolled forward against a chain-by-chain one that keeps a growing key list, as serving does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.models.rope import apply_rope
from specdec.train import unroll as unroll_module
from specdec.train.batching import RowBatch, pack
from specdec.train.unroll import unroll

EXACT = 1e-10  # fp64 against fp64: only the order of sums differs


def _attend(head: Eagle3Head, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query [heads, d] over lists of rows [kv, d]."""
    group = head.config.num_heads // head.config.num_kv_heads
    out = []
    for index in range(head.config.num_heads):
        rows = torch.stack([key[index // group] for key in keys])
        weights = torch.softmax(rows @ query[index] / math.sqrt(head.config.head_dim), 0)
        out.append(weights @ torch.stack([value[index // group] for value in values]))
    return torch.cat(out)


def slow_chain(head: Eagle3Head, states: Tensor, next_ids: Tensor, start: int, steps: int) -> list[Tensor]:
    """Z of each step of the chain that starts at row `start`: a draft cache grown one row at a time."""
    keys, values, found = [], [], []
    feature = head.fuse(states[: start + 1])
    for row in range(start + steps):
        if row > start:
            current = head.feedback(found[-1])
        else:
            current = feature[row]
        q, k, v, residual = head.qkv(head.embed(next_ids[row : row + 1]), current[None])
        cos, sin = head.rope.cos_sin(torch.tensor([row]), 256)
        keys.append(apply_rope(k, cos, sin)[0])
        values.append(v[0])
        if row >= start:
            attention = _attend(head, apply_rope(q, cos, sin)[0], keys, values)
            found.append(head.finish(attention[None], residual)[0])
    return found


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_output": False, "fc_norm": False},
        {"norm_before_residual": True},
        {"norm_before_fc": True, "fc_norm": False},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"qk_norm": True, "attention_bias": True},
        {"hidden_size": 20, "embed": "own", "lm_head": "own"},
        {"hidden_size": 10, "boundaries": (1, 3, 4)},
    ],
)
def test_unrolling_equals_a_chain_grown_row_by_row(
    flags: dict[str, Any], make_head: Callable[..., Eagle3Head], make_batch: Any, target_rows: Tensor
) -> None:
    """Catches a step that sees later true rows, misses its own earlier keys, or sits at a wrong position."""
    head = make_head(**flags)
    data = make_batch(target_rows, [(11, 4), (7, 2)])
    batch = data.packed(4)
    seen = 0
    for step, output in enumerate(unroll(head, batch)):
        for chain, z in zip(output.chains.tolist(), output.z, strict=True):
            number = int(batch.chain_sequence[chain])
            start = int(batch.starts[chain]) - batch.row_offsets[number]
            ids = torch.tensor(data.sequences[number].token_ids)[1:]
            expected = slow_chain(head, data.states[number].taps, ids, start, step + 1)[step]
            assert (z - expected).abs().max() < EXACT
            seen += 1
    assert seen == int(sum((w[j:] > 0).any(0).sum() for w in data.weights(4) for j in range(4)))


def _outputs(head: Eagle3Head, batch: RowBatch) -> list[Tensor]:
    return [step.z for step in unroll(head, batch)]


def test_packing_changes_nothing(
    make_head: Callable[..., Eagle3Head], make_batch: Any, target_rows: Tensor
) -> None:
    """Catches attention or labels that cross from one packed document into the next."""
    head, data = make_head(), make_batch(target_rows, [(7, 3), (5, 2), (4, 1)])
    weights = data.weights(3)
    together = _outputs(head, pack(data.sequences, data.states, weights))
    alone = [
        _outputs(head, pack([s], [t], [w]))
        for s, t, w in zip(data.sequences, data.states, weights, strict=True)
    ]
    for step, packed in enumerate(together):
        parts = torch.cat([outputs[step] for outputs in alone if step < len(outputs)])
        assert (packed - parts).abs().max() < EXACT


def test_a_later_state_moves_no_earlier_chain(
    make_head: Callable[..., Eagle3Head], make_batch: Any, target_rows: Tensor
) -> None:
    head, data = make_head(), make_batch(target_rows, [(12, 1)])
    before = data.packed(3)
    outputs = _outputs(head, before)
    data.states[0].taps[6] += 1.0
    after = _outputs(head, data.packed(3))
    for old, new in zip(outputs, after, strict=True):
        moved = (old - new).abs().amax(-1) > 0
        starts = before.starts[: len(moved)]
        assert not moved[starts < 6].any()
        assert moved[starts >= 6].all()


def test_query_blocks_change_nothing(
    make_head: Callable[..., Eagle3Head],
    make_batch: Any,
    target_rows: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, data = make_head(), make_batch(target_rows, [(13, 3), (6, 2)])
    whole = _outputs(head, data.packed(3))
    monkeypatch.setattr(unroll_module, "QUERY_BLOCK", 3)
    for block, full in zip(_outputs(head, data.packed(3)), whole, strict=True):
        assert (block - full).abs().max() < EXACT


def test_chains_follow_the_trained_slots_only(
    make_head: Callable[..., Eagle3Head], make_batch: Any, target_rows: Tensor
) -> None:
    """Prompt rows off: rows that only serve as keys get no query, no feed-forward and no chain."""
    data = make_batch(target_rows, [(20, 15)])
    with_prompt, without = data.packed(2), data.packed(2, prompt_rows=False)
    assert len(with_prompt.starts) > len(without.starts)
    assert without.starts.tolist() == list(range(12, 18))
    head = make_head()
    full = {int(with_prompt.starts[c]): z for c, z in zip(*_first(head, with_prompt), strict=True)}
    for chain, z in zip(*_first(head, without), strict=True):
        assert (full[int(without.starts[chain])] - z).abs().max() < EXACT


def _first(head: Eagle3Head, batch: RowBatch) -> tuple[list[int], Tensor]:
    step = unroll(head, batch)[0]
    return step.chains.tolist(), step.z


# what each chain sees, drawn out: true rows of two packed documents of 5 and 4 tokens, then its own keys of
# steps 1 and 2; a chain is named by its start row s, and step j of it predicts token s + j + 2
MASKS = {
    0: {
        0: "1... ... ..",
        1: "11.. ... ..",
        2: "111. ... ..",
        4: ".... 1.. ..",
        5: ".... 11. ..",
    },
    1: {
        0: "1... ... 1.",
        1: "11.. ... 1.",
        4: ".... 1.. 1.",
    },
    2: {
        0: "1... ... 11",
    },
}


def test_every_step_sees_what_the_drawn_matrix_shows(
    make_head: Callable[..., Eagle3Head],
    make_batch: Any,
    target_rows: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read off the gradients of values: a key that has no weight gets none."""
    head = make_head()
    batch = make_batch(target_rows, [(5, 1), (4, 1)]).packed(3)
    probes: list[tuple[int, int, Tensor, list[Tensor]]] = []
    block = unroll_module._block

    def probed(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, own: Any) -> Tensor:
        values = values.detach().clone().requires_grad_()
        own = [type(item)(item.keys, item.values.detach().clone().requires_grad_()) for item in own]
        mixed = block(queries, keys, values, allowed, own)
        for row in range(len(mixed)):
            wanted = [values, *(item.values for item in own)]
            grads = torch.autograd.grad(mixed[row].sum(), wanted, retain_graph=True)
            probes.append((len(own), row, grads[0], [grad[row] for grad in grads[1:]]))
            # nobody else's own keys
            assert all(
                not grad[other].any() for grad in grads[1:] for other in range(len(grad)) if other != row
            )
        return mixed

    monkeypatch.setattr(unroll_module, "_block", probed)
    steps = unroll(head, batch)
    found: dict[int, dict[int, str]] = {step: {} for step in range(3)}
    taken = iter(probes)
    for step, output in enumerate(steps):
        for chain in output.chains.tolist():
            number, start = int(batch.chain_sequence[chain]), int(batch.starts[chain])
            depth, _, true, own = next(taken)
            assert depth == step
            rows = ["." for _ in range(7)]
            for place, grad in enumerate(true, start=batch.row_offsets[number]):
                rows[place] = "1" if grad.any() else "."
            drawn = "".join(rows)
            tail = "".join("1" if grad.any() else "." for grad in own).ljust(2, ".")
            found[step][start] = f"{drawn[:4]} {drawn[4:]} {tail}"
    assert next(taken, None) is None
    assert found == MASKS
