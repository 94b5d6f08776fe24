"""Two drafters in one tree: lookup where it has a match, the head beside and behind it.

The lookup's chain has priority in the node budget (a match is nearly free and, where it holds, holds
for many tokens); the head's tree fills the rest. Paths both propose are one path. Where only the head has
children they may be drawn ones, with their law; where both have, they count as deterministic
(`merge_trees`).
"""

from __future__ import annotations

from specdec.config import SpecConfig
from specdec.drafter import Drafter, DraftRequest, TapDrafter
from specdec.drafts.ngram import NgramDrafter
from specdec.paged_kv import PagedKVCache
from specdec.sequence import Sequence
from specdec.tree import DraftTree, merge_trees


class StackedDrafter:
    """Merges an n-gram drafter's chain with another drafter's tree under one node budget."""

    def __init__(self, lookup: NgramDrafter, head: Drafter) -> None:
        self.lookup, self.head = lookup, head
        self.name = f"{lookup.name}+{head.name}"
        self.boundaries = head.boundaries
        self.can_sample = head.can_sample

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False  # the lookup's path beside the head's

    def relative_cost(self, spec: SpecConfig) -> float:
        return self.lookup.relative_cost(spec) + self.head.relative_cost(spec)

    def scratch_rows(self, spec: SpecConfig) -> int:
        return self.head.scratch_rows(spec)

    def release(self, seq_id: int) -> None:
        self.lookup.release(seq_id)
        self.head.release(seq_id)

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        return self.head.caches if isinstance(self.head, TapDrafter) else ()

    @property
    def fingerprint(self) -> str:
        return self.head.fingerprint if isinstance(self.head, TapDrafter) else ""

    def absorb(self, sequences: list[Sequence]) -> None:
        """Make the head's rows whose true states are pending."""
        if isinstance(self.head, TapDrafter):
            self.head.absorb(sequences)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        """Chain and tree merged; the head is not asked where the chain fills the budget."""
        trees = self.lookup.propose(requests)
        open_to_head = [
            index for index, tree in enumerate(trees) if tree.num_drafted < requests[index].max_nodes
        ]
        if open_to_head:
            grown = self.head.propose([requests[index] for index in open_to_head])
            for index, tree in zip(open_to_head, grown, strict=True):
                trees[index] = merge_trees(trees[index], tree, requests[index].max_nodes + 1)
        return trees
