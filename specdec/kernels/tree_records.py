"""The records that sampling, verification and growth on a device share; tensors only, nothing is launched.

Owns the layout: rows are tree nodes of all sequences one after the other, `node_start` says where each
sequence's begin, parents are counted inside a tree. A row that is no node (padding) has parent `NO_PARENT`
and stands behind the nodes of its sequence. Seeds are the 64 bits of an unsigned number in an int64. Does not
know laws or rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# parent of a row that is no node; -1 is the root's (as `specdec.verification.batch`)
NO_PARENT = -2


def seed_bits(seed: int) -> int:
    """The int64 with the bits of an unsigned 64-bit seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """Sampling parameters of each row, as `SamplingParams` names and limits them.

    Attributes:
        temperature: float64 `[rows]`; up to 1e-5 is greedy.
        top_k: int32 `[rows]`; 0 or -1 is off.
        top_p: float64 `[rows]`; 1 is off.
        min_p: float64 `[rows]`; 0 is off.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def at(self, sequence_of_row: Tensor) -> RowParams:
        """Spread the parameters of sequences over their rows; `sequence_of_row` is an integer `[rows]`."""
        return RowParams(
            temperature=self.temperature[sequence_of_row],
            top_k=self.top_k[sequence_of_row],
            top_p=self.top_p[sequence_of_row],
            min_p=self.min_p[sequence_of_row],
        )


@dataclass(frozen=True, kw_only=True)
class RowLaws:
    """Laws of rows of logits, not written out: with the logits they give p of any id.

    p(id) = exp((logit - peak) / temperature) / mass for the ids that are kept, else 0. Kept are ids whose
    `sort_key` is above `border_key`, or equal to it up to the id `border_id`, with a weight of at least
    `min_p`. A row with `sure_token` >= 0 gives that id everything: greedy rows, and bad ones (the law stands
    in there, as in `specdec.acceptance`, and what follows a bad row is cut off by the walks).

    Attributes:
        numbers: float64 `[rows, 4]`: `peak`, `temperature`, `min_p` and `mass`.
        places: int32 `[rows, 4]`: `border_key`, `border_id`, `sure_token` (-1 for laws), and 1 for bad rows.
    """

    numbers: Tensor
    places: Tensor

    @property
    def peak(self) -> Tensor:
        """Largest logit of each row."""
        return self.numbers[:, 0]

    @property
    def temperature(self) -> Tensor:
        return self.numbers[:, 1]

    @property
    def min_p(self) -> Tensor:
        return self.numbers[:, 2]

    @property
    def mass(self) -> Tensor:
        """Sum of the kept weights."""
        return self.numbers[:, 3]

    @property
    def border_key(self) -> Tensor:
        return self.places[:, 0]

    @property
    def border_id(self) -> Tensor:
        return self.places[:, 1]

    @property
    def sure_token(self) -> Tensor:
        return self.places[:, 2]

    @property
    def bad(self) -> Tensor:
        """Rows no token can be chosen from (a NaN, +inf, or nothing but -inf), bool."""
        return self.places[:, 3] != 0


@dataclass(frozen=True, kw_only=True)
class TreeRows:
    """Ragged trees.

    Attributes:
        node_start: int32 `[batch + 1]`, first row of each sequence, then the number of rows.
        parents: int32 `[rows]`, inside the tree; -1 for roots, `NO_PARENT` for padding, which is also what
            rows behind the last sequence's must have.
        token_ids: int64 `[rows]`.
        max_nodes: no sequence has more rows.
        max_depth: no tree is deeper; what paths are padded to.
    """

    node_start: Tensor
    parents: Tensor
    token_ids: Tensor
    max_nodes: int
    max_depth: int

    @property
    def batch(self) -> int:
        return self.node_start.shape[0] - 1

    def sequence_of_row(self) -> Tensor:
        """Sequence of each row, int64 `[rows]`."""
        rows = torch.arange(self.parents.shape[0], device=self.parents.device, dtype=self.node_start.dtype)
        return torch.searchsorted(self.node_start[1:].contiguous(), rows, right=True)


@dataclass(frozen=True, kw_only=True)
class WalkResult:
    """What one verify step commits in every sequence (`VerifyResult`, padded).

    A walk that accepts a node whose row is bad ends before it: the node's token is the next token and counts
    as recovered. A sequence whose root's row is bad has `failed` and next token -1; one without rows, -1
    alone.

    Attributes:
        accepted_nodes: int32 `[batch, max_depth]`, inside the tree, from shallow to deep, then -1.
        num_accepted: int32 `[batch]`.
        next_token_ids: int64 `[batch]`.
        is_bonus: bool `[batch]`; the others are recovered.
        failed: bool `[batch]`.
    """

    accepted_nodes: Tensor
    num_accepted: Tensor
    next_token_ids: Tensor
    is_bonus: Tensor
    failed: Tensor


@dataclass(frozen=True, kw_only=True)
class GrowingTrees:
    """Trees under construction, nodes in order of creation.

    `grow_level` writes to `token_ids`, `parents` and `scores`, and gives new `num_nodes` and `frontier`.

    Attributes:
        token_ids: int64 `[batch, capacity]`.
        parents: int32 `[batch, capacity]`; `NO_PARENT` where no node is yet.
        scores: float64 `[batch, capacity]`, log-probability of the path to the node.
        num_nodes: int32 `[batch]`, the root included.
        frontier: int32 `[batch, width]`, nodes whose children come next, ascending, then -1.
    """

    token_ids: Tensor
    parents: Tensor
    scores: Tensor
    num_nodes: Tensor
    frontier: Tensor


@dataclass(frozen=True, kw_only=True)
class GrowthLimits:
    """What each request allows, `DraftRequest`'s fields; int32 `[batch]` each."""

    top_k: Tensor
    max_depth: Tensor
    max_nodes: Tensor


@dataclass(frozen=True, kw_only=True)
class GrowthRaces:
    """What trees need that grow by the chance to win the target's race (mode "coupled").

    Attributes:
        laws: of the head's rows, `batch * rows` of them in order.
        seeds: int64 `[batch]`.
        roots: integers `[batch]`, absolute position of each root.
        is_coupled: bool `[batch]`; the other trees grow by probability (mode "deterministic").
    """

    laws: RowLaws
    seeds: Tensor
    roots: Tensor
    is_coupled: Tensor


@dataclass(frozen=True, kw_only=True)
class GrownTrees:
    """Finished trees, parents before children, padded to one number of rows.

    Attributes:
        token_ids: int64 `[batch, rows]`; 0 in padding.
        parents: int32 `[batch, rows]`; `NO_PARENT` in padding.
        log_probs: float64 `[batch, rows]`; -inf in padding.
        num_nodes: int32 `[batch]`, the root included.
        draft_probs: float64 `[batch, rows, vocab]`, the law that the child of a row was drawn from, in trees
            that are drawn; zeros elsewhere. None where no tree is.
    """

    token_ids: Tensor
    parents: Tensor
    log_probs: Tensor
    num_nodes: Tensor
    draft_probs: Tensor | None = None


def start_trees(root_token_ids: Tensor, *, capacity: int, width: int) -> GrowingTrees:
    """Trees of one root each, `root_token_ids` int64 `[batch]`.

    Args:
        root_token_ids: the last committed tokens.
        capacity: rows to keep for nodes, see `growth_capacity`.
        width: the largest `top_k`.
    """
    batch, device = root_token_ids.shape[0], root_token_ids.device
    token_ids = torch.zeros(batch, capacity, dtype=torch.int64, device=device)
    parents = torch.full((batch, capacity), NO_PARENT, dtype=torch.int32, device=device)
    frontier = torch.full((batch, width), -1, dtype=torch.int32, device=device)
    token_ids[:, 0] = root_token_ids
    parents[:, :1] = -1
    frontier[:, :1] = 0
    return GrowingTrees(
        token_ids=token_ids,
        parents=parents,
        scores=torch.zeros(batch, capacity, dtype=torch.float64, device=device),
        num_nodes=torch.ones(batch, dtype=torch.int32, device=device),
        frontier=frontier,
    )


def growth_capacity(width: int, max_depth: int) -> int:
    """Nodes that trees of `max_depth` levels can have before the best are kept, the root included."""
    return 1 + width + max(0, max_depth - 1) * width * width if max_depth > 0 else 1
