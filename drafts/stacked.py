"""Two drafters in one tree: lookup where it has a match, the head beside and behind it.

The lookup's chain has priority in the node budget (a match is nearly free and, where it holds, holds
for many tokens); the head's tree fills the rest. Paths both propose are one path. Where only the head has
children they may be drawn ones, with their law; where both have, they count as deterministic
(`merge_trees`).
"""

from __future__ import annotations

from specdec.config import SpecConfig
from specdec.drafter import Drafter, DraftRequest
from specdec.drafts.ngram import NgramDrafter
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
