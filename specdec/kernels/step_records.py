"""What a decoding step on a device is given, and the size class that its shapes come from. Tensors only.

Every sequence has the same number of rows in a class; what a sequence lacks is padding: rows past its tree,
and whole sequences past the last real one, store nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels.tree_records import GrownTrees, GrowthLimits, RowParams, WalkResult


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
        block: whether some sequence is verified by blocks, its children drawn where the device grows trees.
        target_only: whether some sequence is verified against the target's law alone.
    """

    sequences: int
    nodes: int
    depth: int
    width: int
    table_width: int
    coupled: bool
    block: bool = False
    target_only: bool = False


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """One step's numbers on the device; B, N and D are the class's, R = D + 1.

    Attributes:
        active: bool [B], false for padding.
        context_len: int32 [B], committed rows; the root's row comes next.
        block_tables: int32 [B, table_width], padded with block 0, which is then read and never used.
        seeds: int64 [B].
        params: of each sequence.
        is_coupled: bool [B]; of the rules coupled, block and target-only a sequence has one, or it is greedy.
        is_block: bool [B].
        is_target_only: bool [B].
        limits: what each tree may have.
        root_token_ids: int64 [B].
        remaining: int32 [B], tokens that the text may still get, the root being there.
        follows: bool [B], sequences whose step begins where the one before it ends: what that one committed
            is in `carry`, and comes on top of `context_len`, `root_token_ids`, `remaining` and the true rows.
        carry: int64 [B, 2 + R], see `carry_of`; means nothing where `follows` is false.
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
    is_block: Tensor
    is_target_only: Tensor
    limits: GrowthLimits
    root_token_ids: Tensor
    remaining: Tensor
    follows: Tensor
    carry: Tensor
    draft_context: Tensor
    draft_new: Tensor
    draft_token_ids: Tensor
    states: Tensor | None
    given: GrownTrees | None


def carry_of(trees: GrownTrees, walk: WalkResult) -> Tensor:
    """What the next step of every sequence must know of this one, int64 [B, 2 + R].

    Number of committed tokens, the last of them, and all of them, which end with copies of the last.
    """
    last = walk.next_token_ids.clamp(min=0).unsqueeze(1)
    path = walk.accepted_nodes.long()
    tokens = torch.where(path >= 0, trees.token_ids.gather(1, path.clamp(min=0)), last)
    return torch.cat((walk.num_accepted.long().unsqueeze(1) + 1, last, tokens, last), dim=1)


def after_carry(inputs: StepInputs) -> StepInputs:
    """The inputs with what the step before committed taken in."""
    follows, carry = inputs.follows, inputs.carry
    gained = carry[:, 0].masked_fill(~follows, 0).int()
    limits, given = inputs.limits, inputs.given
    root = torch.where(follows, carry[:, 1], inputs.root_token_ids)
    if given is not None:
        given = replace(given, token_ids=torch.cat((root.unsqueeze(1), given.token_ids[:, 1:]), dim=1))
    left = (inputs.remaining - gained - 1).clamp(min=0)
    return replace(
        inputs,
        context_len=inputs.context_len + gained,
        root_token_ids=root,
        remaining=inputs.remaining - gained,
        # whoever drafts after a step has that step's rows to make
        draft_new=torch.where(follows & (limits.max_depth > 0), gained, inputs.draft_new),
        draft_token_ids=torch.where(follows.unsqueeze(1), carry[:, 2:], inputs.draft_token_ids),
        limits=replace(limits, max_depth=torch.minimum(limits.max_depth, left)),
        given=given,
    )


def slots_of(block_tables: Tensor, rows: Tensor, valid: Tensor, block_size: int) -> Tensor:
    """Slots of rows [B, n] of each sequence, -1 where they are not valid; int64 [B, n]."""
    place = (rows // block_size).clamp(max=block_tables.shape[1] - 1).long()
    return (block_tables.gather(1, place).long() * block_size + rows % block_size).masked_fill(~valid, -1)


def row_starts(sequences: int, rows: int, device: torch.device) -> Tensor:
    """First row of each sequence of `rows` rows, and the end: int32 [sequences + 1]."""
    return torch.arange(0, (sequences + 1) * rows, rows, dtype=torch.int32, device=device)
