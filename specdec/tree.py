"""The draft tree of one sequence: what a drafter proposes and a verifier walks.

Owns the shape (parents array) and what follows from it: depths, children, paths, the self-or-ancestor mask,
and the union of two trees. Node 0 is the last committed token; parent < child; siblings stand in draw
order. A tree drawn by sampling carries the full conditional q of every node it drew children from. Does not
know models, KV rows or acceptance. Trees are small (at most a few dozen nodes), so the shape is host lists
and no operation here costs a tensor call per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """Proposed continuations of one sequence.

    Attributes:
        token_ids: token of each node; node 0 is the last committed token, not a proposal.
        parents: parent of each node, -1 for the root; always smaller than the node.
        log_probs: draft log-probability of each node, for reports and pruning; verification ignores it.
        draft_probs: `[nodes, vocab]`; row i is the whole law the children of node i were drawn from, without
            replacement and in node order. A row of zeros: the children of that node are deterministic.
            None: all children are.
    """

    token_ids: list[int]
    parents: list[int]
    log_probs: list[float] | None = None
    draft_probs: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        assert count == len(self.parents), f"{count} tokens but {len(self.parents)} parents"
        assert self.parents[:1] == [-1], "node 0 must be the root, parent -1"
        assert all(0 <= self.parents[i] < i for i in range(1, count)), "a parent must stand before its child"
        assert self.log_probs is None or len(self.log_probs) == count, "one log_prob per node"
        assert self.draft_probs is None or self.draft_probs.shape[0] == count, "one draft_probs row per node"

    @property
    def num_nodes(self) -> int:
        """Rows of the target pass, the root included."""
        return len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        """Proposed tokens, the root not counted."""
        return len(self.token_ids) - 1

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node; the root has 0. A node's position is the root's position plus this."""
        depths = [0] * len(self.parents)
        for node in range(1, len(depths)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 without drafts."""
        return max(self.depths)

    @cached_property
    def drafted_per_depth(self) -> list[int]:
        """Proposed nodes at depth 1, 2, ... (what `SpecStats.record_step` takes)."""
        counts = [0] * max(self.depths)
        for depth in self.depths[1:]:
            counts[depth - 1] += 1
        return counts

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of each node, in draw order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node in range(1, len(self.parents)):
            children[self.parents[node]].append(node)
        return children

    @property
    def is_chain(self) -> bool:
        """Whether every node continues the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def paths(self) -> list[list[int]]:
        """Nodes from the root to each leaf, both included, leaves in node order."""
        return [path_to(self.parents, node) for node, below in enumerate(self.children) if not below]

    def tokens_of(self, nodes: Iterable[int]) -> list[int]:
        """Tokens of some nodes, in the order given."""
        return [self.token_ids[node] for node in nodes]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    path.reverse()
    return path


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Which nodes each node may attend to: itself and its ancestors.

    Returns:
        bool `[nodes, nodes]`, rows are queries. Committed tokens are not in it: every node sees them all.
    """
    count = len(parents)
    mask = np.zeros((count, count), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return torch.from_numpy(mask)


def chain_tree(
    root: int,
    tokens: Sequence[int],
    *,
    log_probs: Sequence[float] | None = None,
    draft_probs: Tensor | None = None,
) -> DraftTree:
    """Make a tree of one path; `log_probs` and `draft_probs` count the root as their first row."""
    return DraftTree(
        token_ids=[root, *tokens],
        parents=list(range(-1, len(tokens))),
        log_probs=None if log_probs is None else list(log_probs),
        draft_probs=draft_probs,
    )


def tree_from_paths(root: int, token_paths: Iterable[Sequence[int]]) -> DraftTree:
    """Make the trie of some token paths (root token not in them); nodes in order of first appearance."""
    token_ids, parents = [root], [-1]
    node_of: dict[tuple[int, int], int] = {}
    for tokens in token_paths:
        node = 0
        for token in tokens:
            key = (node, token)
            if key not in node_of:
                node_of[key] = len(token_ids)
                token_ids.append(token)
                parents.append(node)
            node = node_of[key]
    return DraftTree(token_ids=token_ids, parents=parents)


def merge_trees(first: DraftTree, second: DraftTree, max_nodes: int) -> DraftTree:
    """Unite two trees over the same root under one node budget.

    Paths that both propose are kept once. `first` has priority: its nodes come first and in its order, then
    those of `second` that are new, each tree cut at the budget, so a kept node's ancestors are always kept.
    Equal siblings of one tree (independent draws) stay apart, except that one of them alone can be a node of
    the other tree.

    The draft law of a node survives where only one of the trees, before any cut, has children at that path.
    Where both have, the children verify as deterministic ones, which is exact however they were drawn. The
    choice depends on the path alone, never on which children came out, so the rules of sampled trees stay
    exact.

    Args:
        first: the tree that may use the whole budget.
        second: the tree that fills what is left.
        max_nodes: rows of the united tree, root included.
    """
    assert max_nodes >= 1, f"a tree has at least its root, max_nodes is {max_nodes}"
    assert first.token_ids[0] == second.token_ids[0], "the two trees continue different tokens"
    count = min(first.num_nodes, max_nodes)
    token_ids, parents = first.token_ids[:count], first.parents[:count]
    # merged index -> node of `first`, of `second`
    sources: list[list[int]] = [[node, -1] for node in range(count)]
    sources[0][1] = 0
    first_node: dict[tuple[int, int], int] = {}
    for node in range(1, count):
        first_node.setdefault((parents[node], token_ids[node]), node)
    merged_of = {0: 0}
    for node in range(1, second.num_nodes):
        parent = merged_of.get(second.parents[node])
        if parent is None:
            continue
        merged = first_node.get((parent, second.token_ids[node]))
        if merged is None:
            if len(token_ids) >= max_nodes:
                continue
            merged = len(token_ids)
            token_ids.append(second.token_ids[node])
            parents.append(parent)
            sources.append([-1, node])
        elif sources[merged][1] >= 0:
            # a second copy of a draw whose first copy is the other tree's node already
            continue
        else:
            sources[merged][1] = node
        merged_of[node] = merged
    return DraftTree(
        token_ids=token_ids,
        parents=parents,
        log_probs=_merge_log_probs(first, second, sources),
        draft_probs=_merge_draft_probs(first, second, sources),
    )


def _merge_log_probs(first: DraftTree, second: DraftTree, sources: list[list[int]]) -> list[float] | None:
    """Take each node's value from `first` where it has the node; None unless both trees carry values."""
    if first.log_probs is None or second.log_probs is None:
        return None
    return [first.log_probs[one] if one >= 0 else second.log_probs[two] for one, two in sources]


def _merge_draft_probs(first: DraftTree, second: DraftTree, sources: list[list[int]]) -> Tensor | None:
    """Rows of the draft law, zero where the children are to be verified as deterministic ones."""
    laws = [tree.draft_probs for tree in (first, second) if tree.draft_probs is not None]
    if not laws:
        return None
    # untouched rows of numpy's zeros take no memory
    merged = torch.from_numpy(np.zeros((len(sources), laws[0].shape[1]))).to(laws[0])
    for row, (one, two) in enumerate(sources):
        first_has = one >= 0 and bool(first.children[one])
        second_has = two >= 0 and bool(second.children[two])
        if first_has != second_has:
            tree, node = (first, one) if first_has else (second, two)
            if tree.draft_probs is not None:
                merged[row] = tree.draft_probs[node]
    return merged
