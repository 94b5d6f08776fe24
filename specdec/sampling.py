"""From logits to the law a token is drawn from, and drawing from it.

Owns temperature, top-k, top-p, min-p, typical-p (in this order, Hugging Face's), the greedy choice, and
inverse-CDF draws with and without replacement. Penalties and masks have done their work before
(`specdec.processors`). Does not know trees or acceptance. Laws are float64: verification subtracts and
divides them. Ties at a border or at the maximum go to the lowest id, on every path, so that two paths with
equal logits choose equally. Typical-p: Meister et al., arXiv 2202.00666.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import BadLogitsError
from specdec.random_streams import Coin, Purpose, UniformSource
from specdec.sampling_params import GREEDY_TEMPERATURE, SamplingParams

# top-p needs the largest values only; most laws reach their mass within the first few hundred
_FIRST_PREFIX = 256
_PREFIX_GROWTH = 16

TARGET_FAULT = "the target produced NaN or infinite logits for this request"


def greedy_tokens(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Choose the largest logit of each row, the lowest id among equals, in one pass.

    Args:
        logits: `[rows, vocab]`.

    Returns:
        Token ids, and for each row whether it is bad (see `bad_rows`); the id of a bad row means nothing.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # numpy's is ten times as fast, with the same meaning
        rows = logits.numpy()
        chosen: list[int] = rows.argmax(axis=-1).tolist()
        return chosen, [not isfinite(rows[row, token]) for row, token in enumerate(chosen)]
    # torch promises the first of equal maxima, and lets NaN win; so does numpy
    best = logits.argmax(dim=-1, keepdim=True)
    finite = logits.gather(-1, best).isfinite()
    return best.squeeze(-1).tolist(), finite.logical_not().squeeze(-1).tolist()


def bad_rows(logits: Tensor) -> Tensor:
    """Find the rows no token can be chosen from: a NaN or +inf in them, or nothing but -inf.

    Args:
        logits: `[rows, vocab]`.

    Returns:
        bool `[rows]`.
    """
    return logits.amax(dim=-1).isfinite().logical_not()


def process_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Turn logits into the law to draw from: temperature, top-k, top-p, min-p, typical-p.

    Each filter sees what the one before it left, renormalised. Temperatures up to 1e-5 give all the mass to
    the greedy choice. Rows that `bad_rows` reports come out as NaN.

    Args:
        logits: `[rows, vocab]`, float32 as a rule.
        params: temperature, top_k (0 or -1: off), top_p, min_p, typical_p.

    Returns:
        float64 `[rows, vocab]`; rows sum to 1 and filtered ids have exactly 0.
    """
    peak = logits.amax(dim=-1, keepdim=True).double()
    if params.temperature <= GREEDY_TEMPERATURE:
        best = logits.argmax(dim=-1, keepdim=True)
        probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device).scatter_(-1, best, 1.0)
        return probs.masked_fill_(~peak.isfinite(), torch.nan)
    # the peak is subtracted first: a tiny temperature must not overflow
    weights = (logits.double() - peak).div_(params.temperature).exp_()
    vocab = weights.shape[-1]
    if 0 < params.top_k < vocab:
        count = torch.full_like(peak, params.top_k, dtype=torch.int64)
        border = torch.topk(weights, params.top_k, dim=-1).values[:, -1:]
        weights = _keep_largest(weights, border, count)
    if params.top_p < 1.0:
        weights = _keep_largest(
            weights, *_top_p_border(weights, params.top_p, _num_candidates(params, vocab))
        )
    if params.min_p > 0.0:
        # the largest weight is exactly 1
        weights = weights.masked_fill(weights < params.min_p, 0.0)
    weights = weights.div_(weights.sum(dim=-1, keepdim=True))
    return _keep_typical(weights, params.typical_p) if params.typical_p < 1.0 else weights


def _keep_typical(probs: Tensor, mass: float) -> Tensor:
    """Keep the ids whose surprise is nearest to the entropy, as few as reach the mass; renormalise.

    Args:
        probs: laws `[rows, vocab]`.
        mass: at least this much stays, the id that crosses it included.
    """
    surprise = -probs.log()
    entropy = torch.where(probs > 0, probs * surprise, 0.0).sum(dim=-1, keepdim=True)
    # a stable order: the lowest id first among equally typical ones
    order = (surprise - entropy).abs().sort(dim=-1, stable=True).indices
    before = probs.gather(-1, order).cumsum(dim=-1)[:, :-1]
    dropped = torch.nn.functional.pad(before >= mass, (1, 0), value=False)
    kept = probs.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _num_candidates(params: SamplingParams, vocab: int) -> int:
    return min(params.top_k, vocab) if params.top_k > 0 else vocab


def _top_p_border(weights: Tensor, top_p: float, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Find the smallest number of largest weights that reaches the mass, and the last weight among them.

    Returns:
        The border weight and the count, each `[rows, 1]`.
    """
    wanted = weights.sum(dim=-1, keepdim=True) * top_p
    length = min(_FIRST_PREFIX, num_candidates)
    while True:
        largest = torch.topk(weights, length, dim=-1).values
        mass = largest.cumsum(dim=-1)
        if length == num_candidates or bool((mass[:, -1:] >= wanted).all()):
            break
        length = min(length * _PREFIX_GROWTH, num_candidates)
    # an id is kept when the ids before it do not reach the mass yet
    count = 1 + (mass[:, :-1] < wanted).sum(dim=-1, keepdim=True)
    return largest.gather(-1, count - 1), count


def _keep_largest(weights: Tensor, border: Tensor, count: Tensor) -> Tensor:
    """Zero all but the `count` largest weights of each row; among those equal to the border, lowest ids stay.

    Args:
        weights: `[rows, vocab]`.
        border: the count-th largest weight, `[rows, 1]`.
        count: how many stay, `[rows, 1]`.
    """
    above = weights > border
    equal = weights == border
    room = count - above.sum(dim=-1, keepdim=True)
    keep = above | (equal & (equal.cumsum(dim=-1) <= room))
    return torch.where(keep, weights, torch.zeros_like(weights))


class LogitRows(Protocol):
    """Logits of a tree's nodes: a Tensor `[nodes, vocab]`, or rows made on demand (`NodeLogits`)."""

    def __getitem__(self, node: int, /) -> Tensor: ...


class LazyProbs:
    """Laws of some rows of logits, each made when it is asked for.

    A walk down a tree reads one row per level; the other rows need not be made.

    Args:
        logits: rows `[vocab]` by node.
        params: as for `process_logits`.
    """

    def __init__(self, logits: LogitRows, params: SamplingParams) -> None:
        self._logits = logits
        self._params = params

    def __getitem__(self, node: int) -> Tensor:
        """Law after `node`, float64 `[vocab]`.

        Raises:
            BadLogitsError: NaN or +inf in the row, or nothing but -inf.
        """
        row = self._logits[node][None]
        if bool(bad_rows(row)):
            raise BadLogitsError(TARGET_FAULT)
        return process_logits(row, self._params)[0]


class LazyChoices(Sequence[int]):
    """Greedy tokens of some rows of logits, each chosen when it is asked for.

    Args:
        logits: rows `[vocab]` by node.
        num_nodes: how many rows there are.
    """

    def __init__(self, logits: LogitRows, num_nodes: int) -> None:
        self._logits = logits
        self._num_nodes = num_nodes

    def __len__(self) -> int:
        return self._num_nodes

    @overload
    def __getitem__(self, node: int) -> int: ...

    @overload
    def __getitem__(self, node: slice) -> list[int]: ...

    def __getitem__(self, node: int | slice) -> int | list[int]:
        """Token after `node`.

        Raises:
            BadLogitsError: NaN or +inf in the row, or nothing but -inf.
        """
        if isinstance(node, slice):
            return [self[index] for index in range(*node.indices(len(self)))]
        tokens, bad = greedy_tokens(self._logits[node][None])
        if bad[0]:
            raise BadLogitsError(TARGET_FAULT)
        return tokens[0]

    def __iter__(self) -> Iterator[int]:
        return (self[node] for node in range(len(self)))


def as_law(row: Tensor | NDArray[np.float64]) -> NDArray[np.float64]:
    """View or copy one row `[vocab]` as host float64; not to be written to."""
    if isinstance(row, Tensor):
        return row.detach().to(device="cpu", dtype=torch.float64).numpy()
    return row


def sample(probs_row: Tensor | NDArray[np.float64], u: Coin) -> int:
    """Draw an id by the inverse CDF; an id of probability 0 cannot come out, whatever the number.

    Args:
        probs_row: `[vocab]`, non-negative, not necessarily normalised.
        u: number in [0, 1).
    """
    return _draw(as_law(probs_row), u)


def _draw(weights: NDArray[np.float64], u: Coin) -> int:
    cdf = np.cumsum(weights)
    total = cdf[-1]
    assert 0.0 < total < np.inf, f"no token can be drawn from a row of mass {total}"
    # the last entry becomes exactly 1 > u, so the search ends at an id whose own step is not empty
    cdf /= total
    low, high = 0, len(cdf) - 1
    while low < high:
        middle = (low + high) // 2
        if u < cdf[middle]:
            high = middle
        else:
            low = middle + 1
    return low


def draw_without_replacement(
    q: Tensor | NDArray[np.float64], k: int, stream: UniformSource, position: int, node: int
) -> list[int]:
    """Draw up to `k` different children of a node, in draw order.

    One after the other from q with the drawn ones removed: the law of Gumbel-top-k, for k numbers instead
    of one per vocabulary entry. Keep the order and the whole of q in the tree: verification needs both.

    Args:
        q: law of one child `[vocab]`.
        k: how many; fewer come back when q has fewer ids of positive probability.
        stream: the request's random numbers.
        position: absolute position of the step's root.
        node: the parent node, so that no two nodes share numbers.
    """
    coins = stream.uniform(position, Purpose.DRAFT, count=k, node=node)
    left = as_law(q).copy()
    drawn: list[int] = []
    for coin in coins:
        if drawn and not left.any():
            break
        token = _draw(left, coin)
        drawn.append(token)
        left[token] = 0.0
    return drawn
