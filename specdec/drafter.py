"""The one protocol every drafter meets: context in, tree out.

A drafter that reads taps names the boundaries it wants; the engine keeps the tapped states of
committed rows with each sequence (`pending_states`) until the drafter takes them. Draft KV lives in
the same blocks as the target's: row k of a drafter's cache is row k of the sequence's block table.

A request also says how the children of a node come about, because a rule's law may depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.config import ModelConfig, SpecConfig
from specdec.kernels.operations import Operations
from specdec.kernels.step_records import StepClass, StepInputs
from specdec.kernels.tree_records import GrownTrees
from specdec.paged_kv import PagedKVCache
from specdec.sequence import Sequence
from specdec.tree import DraftTree

# how the children of a node come about, at most `top_k` of them:
#   deterministic: the most probable tokens;
#   without_replacement: drawn one by one, each without those before it, in draw order (one child: a draw);
#   iid: drawn one by one, independently, duplicates kept;
#   coupled: first arrivals of the race that the target's own draw will run, with the draft's law for rates.
# the middle two are laws: the tree carries q, and its shape never depends on the tokens that came out
DraftMode = Literal["deterministic", "without_replacement", "iid", "coupled"]


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that asks for a tree of at most `max_nodes` drafted nodes, `max_depth` deep.

    Random numbers and the temperature and filters of q are the sequence's own. A drafter that cannot sample
    takes every mode for "deterministic"; trees of such children are right under every exact rule.
    """

    seq: Sequence
    max_nodes: int
    max_depth: int
    top_k: int
    mode: DraftMode = "deterministic"


@dataclass(frozen=True)
class TargetView:
    """What a drafter may read of the target it drafts for, and the geometry of the shared blocks.

    `operations` are the kernels of the engine's device path, None on the processor's own.
    """

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
    draft_weights: str
    operations: Operations | None = None


class Drafter(Protocol):
    """Proposes trees.

    `boundaries` are the taps it reads, ascending, () for none. `can_sample` says whether it has a law to draw
    children from.
    """

    name: str
    boundaries: tuple[int, ...]
    can_sample: bool

    def makes_chains(self, spec: SpecConfig) -> bool:
        """Whether every tree it proposes under these settings is a chain."""
        ...

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


@runtime_checkable
class GrowingDrafter(Protocol):
    """A drafter that can make a step's trees on the device, without the host."""

    def can_grow(self, seq: Sequence, depth: int) -> bool:
        """Whether a sequence's next tree can be made so in a class of that depth."""
        ...

    def can_grow_to(self, length: int) -> bool:
        """Whether a tree can grow so that text and path have that length."""
        ...

    def grow(self, size: StepClass, inputs: StepInputs) -> GrownTrees:
        """Trees of every sequence of the class; reads no value on the host."""
        ...


@runtime_checkable
class TapDrafter(Drafter, Protocol):
    """A drafter whose rows lie in the target's blocks, so that cached prefixes hold them too.

    A sequence may come to it with `draft_computed` > 0 though it has never drafted: those rows are there.
    """

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        """The caches that share the target's block tables."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of what its rows depend on beside text and target."""
        ...

    def absorb(self, sequences: list[Sequence]) -> None:
        """Make the rows whose true states are pending, as far as it makes any; nothing is proposed."""
        ...
