"""The records of batched verification: padded trees, their random numbers, what comes back.

For the reference of the kernels that walk trees on a device. Owns the way from and to the host's lists. All
shapes are static: the number of rows, the depth and the tour come from the padded sizes, so that the rules in
`batched.py` and `batched_joint.py` run under CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.random_streams import Purpose, UniformSource
from specdec.tree import DraftTree
from specdec.verification.result import VerifyResult

# parent of a row that is no node; -1 is the root's
NO_PARENT = -2


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    """Trees of a batch, padded to one number of rows.

    Attributes:
        token_ids: int64 `[batch, nodes]`, 0 in rows that are no node.
        parents: int64 `[batch, nodes]`, `NO_PARENT` in rows that are no node.
        num_nodes: int64 `[batch]`.
        tour: int64 `[batch, 2 * nodes]`; node n stands as n where its subtree is entered and as -1 - n where
            it is left, siblings in order, the root's exit last; rows that are no node follow it.
        max_depth: depth that paths are padded to.
    """

    token_ids: Tensor
    parents: Tensor
    num_nodes: Tensor
    tour: Tensor
    max_depth: int


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """Uniform numbers of one step of every sequence, as the rules on one tree take them.

    Attributes:
        accept: float64 `[batch, nodes]`, number i belongs to node i.
        residual: float64 `[batch]`, draws the recovered token.
        bonus: float64 `[batch]`, draws the bonus token.
    """

    accept: Tensor
    residual: Tensor
    bonus: Tensor


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What one verify step commits in every sequence (`VerifyResult`, padded).

    Attributes:
        accepted_nodes: int64 `[batch, max_depth]`, from shallow to deep, then -1.
        num_accepted: int64 `[batch]`.
        next_token_ids: int64 `[batch]`.
        is_bonus: bool `[batch]`; the others are recovered.
    """

    accepted_nodes: Tensor
    num_accepted: Tensor
    next_token_ids: Tensor
    is_bonus: Tensor

    def to_results(self) -> list[VerifyResult]:
        """Copy to the host."""
        rows = zip(
            self.accepted_nodes.tolist(),
            self.num_accepted.tolist(),
            self.next_token_ids.tolist(),
            self.is_bonus.tolist(),
            strict=True,
        )
        return [
            VerifyResult(
                accepted_nodes=path[:count],
                next_token_id=token,
                next_kind="bonus" if is_bonus else "recovered",
            )
            for path, count, token, is_bonus in rows
        ]


def pad_trees(
    trees: Sequence[DraftTree],
    *,
    num_rows: int | None = None,
    max_depth: int | None = None,
    device: torch.device | str = "cpu",
) -> TreeBatch:
    """Pad trees to one size.

    Args:
        trees: one per sequence.
        num_rows: rows to pad to; the largest tree's when not given.
        max_depth: depth to pad to; the deepest tree's when not given.
        device: where the tensors go.
    """
    rows = max(tree.num_nodes for tree in trees) if num_rows is None else num_rows
    depth = max(tree.max_depth for tree in trees) if max_depth is None else max_depth
    missing = [rows - tree.num_nodes for tree in trees]
    assert min(missing) >= 0, f"a tree has more than {rows} rows"
    assert all(tree.max_depth <= depth for tree in trees), f"a tree is deeper than {depth}"

    def to_device(values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return TreeBatch(
        token_ids=to_device([tree.token_ids + [0] * gap for tree, gap in zip(trees, missing, strict=True)]),
        parents=to_device(
            [tree.parents + [NO_PARENT] * gap for tree, gap in zip(trees, missing, strict=True)]
        ),
        num_nodes=torch.tensor([tree.num_nodes for tree in trees], dtype=torch.int64, device=device),
        tour=to_device([_tour(tree, rows) for tree in trees]),
        max_depth=depth,
    )


def _tour(tree: DraftTree, num_rows: int) -> list[int]:
    """Enter and leave every node depth first, then every row that is no node."""
    tour: list[int] = []
    open_steps = [0]
    while open_steps:
        step = open_steps.pop()
        tour.append(step)
        if step >= 0:
            open_steps.append(-1 - step)
            open_steps.extend(reversed(tree.children[step]))
    for row in range(tree.num_nodes, num_rows):
        tour += [row, -1 - row]
    return tour


def pad_probs(rows: Sequence[Tensor], num_rows: int) -> Tensor:
    """Stack laws `[nodes, vocab]` of every tree to `[batch, nodes, vocab]`; zero in rows that are no node."""
    return torch.stack([torch.nn.functional.pad(one, (0, 0, 0, num_rows - one.shape[0])) for one in rows])


def draw_numbers(
    streams: Sequence[UniformSource],
    positions: Sequence[int],
    num_rows: int,
    device: torch.device | str = "cpu",
) -> StepNumbers:
    """Draw the numbers that the rules on one tree draw, for every sequence.

    Args:
        streams: random numbers of each request.
        positions: absolute position of each root.
        num_rows: rows the trees are padded to.
        device: where the tensors go.
    """

    def numbers(purpose: Purpose, count: int) -> Tensor:
        drawn = [
            stream.uniform(position, purpose, count=count)
            for stream, position in zip(streams, positions, strict=True)
        ]
        return torch.tensor(drawn, dtype=torch.float64, device=device)

    return StepNumbers(
        accept=numbers(Purpose.ACCEPT, num_rows),
        residual=numbers(Purpose.RESIDUAL, 1).squeeze(1),
        bonus=numbers(Purpose.BONUS, 1).squeeze(1),
    )
