"""Training-time test: a head unrolled over its own outputs, all chains of a batch at once.

Owns the unrolled forward. Knows nothing of losses or optimisers. Source: EAGLE-3 (arXiv:2503.01840).

Tensors of step j are kept by the chain's start row s, so that every step has the same causal mask over the
true keys, and the chain's own earlier keys are a diagonal:

    step   feature                       token      position   attends to
    0      fuse(state s)                 x_{s+1}    s          true keys 0..s
    j      feedback(z of step j-1)       x_{s+j+1}  s+j        true keys 0..s, own keys of steps 1..j

which is what serving does: cache rows up to s come from true states, later ones from the head's own outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.models.rope import apply_rope
from specdec.train.batching import RowBatch

# queries attend in blocks, so that half of the causal square is never computed.
QUERY_BLOCK = 256


@dataclass(frozen=True)
class UnrollStep:
    """Outputs of one step: `chains` [active] indices into the batch's chains, `z` [active, hidden]."""

    chains: Tensor
    z: Tensor


@dataclass(frozen=True)
class _OwnKeys:
    """Keys and values [active, kv_heads, head_dim] of one earlier step of the same chains."""

    keys: Tensor
    values: Tensor


def unroll(head: Eagle3Head, batch: RowBatch) -> list[UnrollStep]:
    """Run the head for `len(batch.weights)` steps; a chain ends after its last trained slot."""
    longest = int(batch.positions.max()) + len(batch.weights) + 1
    features = head.fuse(batch.states.to(head.fc.weight.dtype))
    x, residual = head.attention_input(head.embed(batch.next_ids), features)
    keys, values = head.keys_values(x)
    cos, sin = head.rope.cos_sin(batch.positions, longest)
    keys = apply_rope(keys, cos, sin).to(values.dtype)

    chains = torch.arange(len(batch.starts), device=batch.starts.device)
    x, residual = x[batch.starts], residual[batch.starts]
    own: list[_OwnKeys] = []
    steps: list[UnrollStep] = []
    for step in range(len(batch.weights)):
        if step > 0:
            active = torch.nonzero((batch.weights[step:, chains] > 0).any(0)).flatten()
            if len(active) == 0:
                break
            z = steps[-1].z
            if len(active) < len(chains):
                chains, z = chains[active], z[active]
                own = [_OwnKeys(item.keys[active], item.values[active]) for item in own]
            x, residual = head.attention_input(head.embed(_tokens(batch, chains, step)), head.feedback(z))
        positions = batch.positions[batch.starts[chains]] + step
        cos, sin = head.rope.cos_sin(positions, longest)
        queries = head.queries(x)
        queries = apply_rope(queries, cos, sin).to(queries.dtype)
        if step > 0:
            k, v = head.keys_values(x)
            own.append(_OwnKeys(apply_rope(k, cos, sin).to(v.dtype), v))
        attention = _attend(batch, chains, queries, keys, values, own)
        steps.append(UnrollStep(chains, head.finish(attention, residual)))
    return steps


def _tokens(batch: RowBatch, chains: Tensor, step: int) -> Tensor:
    """Token ids x_{s+step+1} of the given chains, [active]."""
    # a chain still active at `step` has that row in its sequence: only its later slots may be missing.
    return batch.next_ids[batch.starts[chains] + step]


def _attend(
    batch: RowBatch, chains: Tensor, queries: Tensor, keys: Tensor, values: Tensor, own: list[_OwnKeys]
) -> Tensor:
    """Attention [active, heads * head_dim] of chain queries [active, heads, head_dim], per sequence."""
    counts = torch.bincount(batch.chain_sequence[chains], minlength=len(batch.row_offsets) - 1).tolist()
    starts = batch.starts[chains]
    outputs: list[Tensor] = []
    begin = 0
    for number, count in enumerate(counts):
        first_row = batch.row_offsets[number]
        for low in range(begin, begin + count, QUERY_BLOCK):
            high = min(low + QUERY_BLOCK, begin + count)
            last_row = int(starts[high - 1]) + 1
            allowed = torch.arange(first_row, last_row, device=starts.device) <= starts[low:high, None]
            outputs.append(
                _block(
                    queries[low:high],
                    keys[first_row:last_row],
                    values[first_row:last_row],
                    allowed,
                    [_OwnKeys(item.keys[low:high], item.values[low:high]) for item in own],
                )
            )
        begin += count
    return torch.cat(outputs).flatten(1)


def _block(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor, own: list[_OwnKeys]) -> Tensor:
    """Attend queries [q, heads, d] to keys [k, kv, d] where `allowed` [q, k], and to their own rows."""
    num_queries, heads, dim = queries.shape
    kv = keys.shape[1]
    grouped = queries.view(num_queries, kv, heads // kv, dim)
    # [kv, q * group, d] against [kv, d, k]: one product per KV head serves its whole group.
    flat = grouped.transpose(0, 1).reshape(kv, -1, dim)
    scores = torch.bmm(flat, keys.permute(1, 2, 0)).view(kv, num_queries, heads // kv, -1)
    scores = scores.masked_fill(~allowed[None, :, None, :], float("-inf"))
    if own:
        diagonal = torch.stack([(grouped * item.keys.unsqueeze(2)).sum(-1) for item in own], dim=-1)
        scores = torch.cat((scores, diagonal.transpose(0, 1).to(scores.dtype)), dim=-1)
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores / math.sqrt(dim), dim=-1, dtype=wide).to(values.dtype)
    true = weights[..., : keys.shape[0]].reshape(kv, -1, keys.shape[0])
    mixed = torch.bmm(true, values.transpose(0, 1)).view(kv, num_queries, heads // kv, dim).transpose(0, 1)
    for index, item in enumerate(own):
        share = weights[..., keys.shape[0] + index].transpose(0, 1).unsqueeze(-1)
        mixed = mixed + share * item.values.unsqueeze(2)
    return mixed.reshape(num_queries, heads, dim)
