"""Verification inside a step on the device: every sequence by its own rule, side by side.

Owns which walks a class runs and whose result counts: each walk goes over the whole batch, and runs only in
classes that have a sequence of its rule. Does not know how trees or logits came about.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from specdec.kernels import KernelBackend, kernel
from specdec.kernels.step_records import StepClass, StepInputs
from specdec.kernels.tree_records import NO_PARENT, TreeRows, WalkResult


class StepWalks:
    """The walks of one backend."""

    def __init__(self, backend: KernelBackend) -> None:
        self._greedy_choices = kernel("greedy_choices", backend)
        self._row_laws = kernel("row_laws", backend)
        self._race_winners = kernel("race_winners", backend)
        self._walk_choices = kernel("walk_choices", backend)
        self._walk_target_only = kernel("walk_target_only", backend)
        self._walk_block = kernel("walk_block", backend)

    def __call__(
        self,
        size: StepClass,
        inputs: StepInputs,
        trees: TreeRows,
        logits: Tensor,
        positions: Tensor,
        draft_probs: Tensor | None,
    ) -> WalkResult:
        """What every sequence commits.

        Args:
            size: of the step.
            inputs: of the step.
            trees: its trees, `size.nodes` rows each.
            logits: after every node `[rows, vocab]`.
            positions: of every node, int32 `[rows]`.
            draft_probs: laws that drawn children come from `[batch, nodes, vocab]`; None without any.
        """
        choices, bad = self._greedy_choices(logits)
        if not (size.coupled or size.block or size.target_only):
            return self._walk_choices(trees, choices, bad)
        of_row = torch.arange(size.sequences, device=logits.device).repeat_interleave(
            size.nodes, output_size=size.sequences * size.nodes
        )
        laws = self._row_laws(logits, inputs.params.at(of_row))
        if size.coupled:
            won = self._race_winners(logits, laws, trees, inputs.seeds, positions)
            choices = torch.where(inputs.is_coupled[of_row], won, choices)
        walk: WalkResult = self._walk_choices(trees, choices, bad)
        if size.target_only:
            found = self._walk_target_only(trees, logits, laws, inputs.seeds, positions)
            walk = _either(inputs.is_target_only, found, walk)
        if size.block:
            # trees of other rules need not be chains, and have no rows here
            chains = trees.parents.masked_fill(~inputs.is_block[of_row], NO_PARENT)
            if draft_probs is None:
                draft_probs = torch.zeros_like(logits)
            found = self._walk_block(
                replace(trees, parents=chains),
                logits,
                laws,
                draft_probs.view(logits.shape),
                inputs.seeds,
                positions,
            )
            walk = _either(inputs.is_block, found, walk)
        return walk


def _either(mine: Tensor, one: WalkResult, other: WalkResult) -> WalkResult:
    """Sequence by sequence the one result or the other."""
    chosen: dict[str, Tensor] = {}
    for each in fields(WalkResult):
        first, second = getattr(one, each.name), getattr(other, each.name)
        chosen[each.name] = torch.where(mine.view(-1, *[1] * (first.dim() - 1)), first, second)
    return WalkResult(**chosen)
