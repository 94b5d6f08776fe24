"""What a decoding step on a device is given, and the size class that its shapes come from. Tensors only.

Every sequence has the same number of rows in a class; what a sequence lacks is padding: rows past its tree,
and whole sequences past the last real one, store nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.tree_records import GrownTrees, GrowthLimits, RowParams


@dataclass(frozen=True, kw_only=True)
class StepClass:
    """Static shapes of a step.

    Attributes:
        sequences: B.
        nodes: N, rows of a tree, the root included.
        depth: D, of the deepest tree.
        width: largest `top_k` of trees grown on the device; 0 where the host gives the trees.
        table_width: blocks of a block table.
        coupled: whether some sequence draws by races.
    """

    sequences: int
    nodes: int
    depth: int
    width: int
    table_width: int
    coupled: bool


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One step's numbers on the device; B, N and D are the class's, R = D + 1.

    Attributes:
        active: bool [B], false for padding.
        context_len: int32 [B], committed rows; the root's row comes next.
        block_tables: int32 [B, table_width], padded with block 0, which is then read and never used.
        seeds: int64 [B].
        params: of each sequence.
        is_coupled: bool [B].
        limits: what each tree may have.
        root_token_ids: int64 [B].
        draft_context: int32 [B], rows that the draft's cache holds.
        draft_new: int32 [B], true rows to be made before the tree grows, at most R.
        draft_token_ids: int64 [B, R], the tokens after those rows.
        states: taps of those rows [B, R, taps, hidden]; None where the host gives the trees.
        given: the host's trees; None where the device grows them.
    """

    active: Tensor
    context_len: Tensor
    block_tables: Tensor
    seeds: Tensor
    params: RowParams
    is_coupled: Tensor
    limits: GrowthLimits
    root_token_ids: Tensor
    draft_context: Tensor
    draft_new: Tensor
    draft_token_ids: Tensor
    states: Tensor | None
    given: GrownTrees | None


def slots_of(block_tables: Tensor, rows: Tensor, valid: Tensor, block_size: int) -> Tensor:
    """Slots of rows [B, n] of each sequence, -1 where they are not valid; int64 [B, n]."""
    place = (rows // block_size).clamp(max=block_tables.shape[1] - 1).long()
    return (block_tables.gather(1, place).long() * block_size + rows % block_size).masked_fill(~valid, -1)


def row_starts(sequences: int, rows: int, device: torch.device) -> Tensor:
    """First row of each sequence of `rows` rows, and the end: int32 [sequences + 1]."""
    return torch.arange(0, (sequences + 1) * rows, rows, dtype=torch.int32, device=device)
