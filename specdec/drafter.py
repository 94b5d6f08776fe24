"""The one protocol every drafter meets: context in, tree out.

A drafter that reads taps names the boundaries it wants; the engine keeps the tapped states of
committed rows with each sequence (`pending_states`) until the drafter takes them. Draft KV lives in
the same blocks as the target's: row k of a drafter's cache is row k of the sequence's block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.config import ModelConfig, SpecConfig
from specdec.sequence import Sequence
from specdec.tree import DraftTree


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that asks for a tree of at most `max_nodes` drafted nodes, `max_depth` deep."""

    seq: Sequence
    max_nodes: int
    max_depth: int
    top_k: int


@dataclass(frozen=True)
class TargetView:
    """What a drafter may read of the target it drafts for, and the geometry of the shared blocks."""

    config: ModelConfig
    embed_tokens: Tensor
    head_weight: Tensor
    fingerprint: str
    template_hash: str | None
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: torch.dtype
    device: str
    packed: bool


class Drafter(Protocol):
    """Proposes trees. `boundaries` are the taps it reads, ascending, () for none."""

    name: str
    boundaries: tuple[int, ...]

    def relative_cost(self, spec: SpecConfig) -> float:
        """Cost of one proposal in units of one plain decoding step (used by the adaptive policy)."""
        ...

    def scratch_rows(self, spec: SpecConfig) -> int:
        """Rows beyond the committed ones that a proposal writes into the sequence's blocks."""
        ...

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """A tree for each request; a tree of the root alone when there is nothing to propose."""
        ...

    def release(self, seq_id: int) -> None:
        """Forget a sequence (finished, or preempted)."""
        ...
