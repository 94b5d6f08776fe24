"""From logits to choices in plain torch, many rows with their own parameters at once; no host round trip.

Owns the meaning of `RowLaws` and of the operations on it; the kernels of `sampling_rows` must equal these.
The rules are `specdec.sampling`'s: temperature, top-k, top-p, min-p in this order, each filter seeing what
the one before it left, the lowest id first among equals. Filters by rank are decided on the logits themselves
(as float32), masses are float64. `specdec.sampling` compares weights instead, which is the same order except
where two logits differ by less than the last bit of the difference to the peak: both are then almost the same
law. Typical-p is not here: rows that ask for it are `specdec.sampling`'s.

Two sums of one law differ in the last bits with their order, so a border of top-p, or the winner of a race,
can differ between the host, this file and the kernels where two values agree to about 1e-14 of themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.reference_streams import exponentials
from specdec.kernels.tree_records import RowLaws, RowParams, TreeRows
from specdec.sampling_params import GREEDY_TEMPERATURE

MAX_KEY = 2**31 - 1
MIN_KEY = -(2**31)


def sort_key(logits: Tensor) -> Tensor:
    """Integers that are ordered as float32 logits are, zeros of both signs alike; int32."""
    bits = logits.float().masked_fill(logits == 0.0, 0.0).view(torch.int32)
    return torch.where(bits >= 0, bits, bits ^ MAX_KEY)


def greedy_choices(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest logit of each row, the lowest id among equals.

    Args:
        logits: `[rows, vocab]`.

    Returns:
        Token ids int64 `[rows]`, and whether each row is bad, bool `[rows]`; the id of a bad row means
        nothing but is one of the vocabulary.
    """
    peak = logits.amax(dim=-1)
    return logits.argmax(dim=-1), peak.isfinite().logical_not()


def row_laws(logits: Tensor, params: RowParams) -> RowLaws:
    """Laws of rows of logits.

    Args:
        logits: `[rows, vocab]`, float32, float16 or bfloat16.
        params: of each row.
    """
    vocab = logits.shape[1]
    best, bad = greedy_choices(logits)
    peak = logits.amax(dim=-1).double().masked_fill(bad, 0.0)
    greedy = params.temperature <= GREEDY_TEMPERATURE
    temperature = params.temperature.masked_fill(greedy, 1.0)
    scaled = (logits.double() - peak.unsqueeze(1)) / temperature.unsqueeze(1)
    weights = scaled.exp().masked_fill((bad | greedy).unsqueeze(1), 0.0)
    key = sort_key(logits)
    # a stable order: the lowest id first among equal logits
    order = key.sort(dim=-1, descending=True, stable=True).indices
    in_order = weights.gather(1, order)
    rank = torch.arange(vocab, device=logits.device)
    top_k = torch.where(params.top_k > 0, params.top_k, vocab).unsqueeze(1)
    in_order = in_order.masked_fill(rank >= top_k, 0.0)
    before = torch.nn.functional.pad(in_order.cumsum(-1)[:, :-1], (1, 0))
    wanted = in_order.sum(-1, keepdim=True) * params.top_p.unsqueeze(1)
    kept = (rank < top_k) & ((before < wanted) | (params.top_p >= 1.0).unsqueeze(1))
    num_kept = kept.sum(-1, keepdim=True)
    last = order.gather(1, (num_kept - 1).clamp(min=0))
    unfiltered = (num_kept == vocab).squeeze(1)
    border_key = key.gather(1, last).squeeze(1).masked_fill(unfiltered, MIN_KEY)
    border_id = last.squeeze(1).int().masked_fill(unfiltered, vocab)
    mass = (in_order * (kept & (in_order >= params.min_p.unsqueeze(1)))).sum(-1)
    sure = bad | greedy
    sure_token = best.int().masked_fill(bad, 0).masked_fill(~sure, -1)
    return RowLaws(
        numbers=torch.stack((peak, temperature, params.min_p, mass.masked_fill(sure, 1.0)), dim=1),
        places=torch.stack((border_key, border_id, sure_token, bad.int()), dim=1),
    )


def _weights(logits: Tensor, laws: RowLaws) -> Tensor:
    """Kept weights of all ids, float64 `[rows, vocab]`; p times the mass."""
    key = sort_key(logits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    border = laws.border_key.unsqueeze(1)
    kept = (key > border) | ((key == border) & (ids <= laws.border_id.unsqueeze(1)))
    weights = ((logits.double() - laws.peak.unsqueeze(1)) / laws.temperature.unsqueeze(1)).exp()
    weights = weights.masked_fill(~kept | (weights < laws.min_p.unsqueeze(1)), 0.0)
    sure = laws.sure_token.unsqueeze(1)
    return torch.where(sure >= 0, (ids == sure).double(), weights)


def row_probs(logits: Tensor, laws: RowLaws) -> Tensor:
    """Write laws out, float64 `[rows, vocab]`, for the rules of p and q (`specdec.verification.batched`)."""
    return _weights(logits, laws) / laws.mass.unsqueeze(1)


def race_winners(logits: Tensor, laws: RowLaws, tree: TreeRows, seeds: Tensor, positions: Tensor) -> Tensor:
    """First id of the race after each node: argmax p / E, E the noise of the node's position (rule 2.11).

    Args:
        logits: `[rows, vocab]`.
        laws: of the rows.
        tree: which rows are a sequence's; a node's depth, up to `tree.max_depth`, is its position less that
            of its sequence's first row.
        seeds: int64 `[batch]`.
        positions: integers `[rows]`, absolute position of each node; those of padding mean nothing.

    Returns:
        int64 `[rows]`; the lowest id among equals; 0 in padding.
    """
    real = tree.parents >= -1
    of_row = tree.sequence_of_row().clamp(max=tree.batch - 1)
    noise = exponentials(seeds[of_row], positions, count=logits.shape[1])
    # padding may hold anything
    speeds = (_weights(logits, laws) / noise).masked_fill(~real.unsqueeze(1), 0.0)
    return speeds.argmax(-1)
