"""The draft tree's shape: ancestors, paths, union under a budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.tree import DraftTree, ancestor_mask, chain_tree, merge_trees, path_to, tree_from_paths

# a chain beside branches at two depths (fault B47)
B47_PARENTS = [-1, 0, 0, 1, 1, 2, 5]


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    count = draw(st.integers(1, 20))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]


token_paths = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8)


def context_of(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(tree.tokens_of(path_to(tree.parents, node)[1:]))


def all_contexts(tree: DraftTree) -> list[tuple[int, ...]]:
    return [context_of(tree, node) for node in range(tree.num_nodes)]


def test_mask_and_depths_of_the_published_example() -> None:
    """B47: siblings must not see each other; node 6 sees {0, 2, 5, 6}, node 4 sees {0, 1, 4}."""
    mask = ancestor_mask(B47_PARENTS)
    assert mask.dtype == torch.bool
    assert mask[6].nonzero().flatten().tolist() == [0, 2, 5, 6]
    assert mask[4].nonzero().flatten().tolist() == [0, 1, 4]
    assert DraftTree(token_ids=[0] * 7, parents=B47_PARENTS).depths == [0, 1, 1, 2, 2, 2, 3]


def test_a_node_outside_the_ancestors_cannot_change_an_output() -> None:
    """B47: attention under the mask; perturbing node 3 leaves nodes 4 and 6 bit for bit."""
    mask = ancestor_mask(B47_PARENTS)
    query, key, value = torch.randn(3, 7, 8)

    def attend() -> torch.Tensor:
        scores = (query @ key.T).masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, -1) @ value

    before = attend()
    key[3] += 1.0
    value[3] -= 5.0
    after = attend()
    assert [node for node in range(7) if not torch.equal(before[node], after[node])] == [3]


@given(parents=parent_lists())
@settings(deadline=None)
def test_mask_is_self_or_ancestor(parents: list[int]) -> None:
    mask = ancestor_mask(parents)
    for node in range(len(parents)):
        assert mask[node].nonzero().flatten().tolist() == path_to(parents, node)


@given(parents=parent_lists())
@settings(deadline=None)
def test_shape_properties_agree(parents: list[int]) -> None:
    tree = DraftTree(token_ids=list(range(len(parents))), parents=parents)
    assert [len(path_to(parents, node)) - 1 for node in range(tree.num_nodes)] == tree.depths
    assert sorted(child for below in tree.children for child in below) == list(range(1, tree.num_nodes))
    assert all(below == sorted(below) for below in tree.children)
    assert sum(tree.drafted_per_depth) == tree.num_drafted
    assert len(tree.drafted_per_depth) == tree.max_depth
    assert {node for path in tree.paths for node in path} == set(range(tree.num_nodes))
    assert tree.is_chain == (len(tree.paths) == 1)


@given(paths=token_paths)
@settings(deadline=None)
def test_paths_round_trip(paths: list[list[int]]) -> None:
    """Tree -> token paths -> tree is the identity, and every path given is a path of the tree."""
    tree = tree_from_paths(9, paths)
    back = tree_from_paths(9, [tree.tokens_of(path[1:]) for path in tree.paths])
    assert set(all_contexts(back)) == set(all_contexts(tree))
    assert {tuple(path) for path in paths} <= set(all_contexts(tree))
    assert len(set(all_contexts(tree))) == tree.num_nodes, "siblings must be distinct"


@given(first=token_paths, second=token_paths, max_nodes=st.integers(1, 40))
@settings(deadline=None, max_examples=300)
def test_merge_keeps_both_within_the_budget_and_the_first_before_the_second(
    first: list[list[int]], second: list[list[int]], max_nodes: int
) -> None:
    one, two = tree_from_paths(9, first), tree_from_paths(9, second)
    merged = merge_trees(one, two, max_nodes)
    kept = all_contexts(merged)
    wanted = list(dict.fromkeys(all_contexts(one) + all_contexts(two)))
    assert len(kept) == len(set(kept)), "a path both propose is kept once"
    assert set(kept) <= set(wanted)
    assert merged.num_nodes == min(len(wanted), max_nodes)
    assert kept[: one.num_nodes] == all_contexts(one)[:max_nodes]


def test_merge_with_an_empty_tree_keeps_the_other() -> None:
    root = DraftTree(token_ids=[4], parents=[-1])
    tree = chain_tree(4, [1, 2, 3], log_probs=[0.0, -1.0, -2.0, -3.0])
    for merged in (merge_trees(root, tree, 8), merge_trees(tree, root, 8)):
        assert (merged.token_ids, merged.parents) == (tree.token_ids, tree.parents)
        assert merged.log_probs is None, "values of one side only would be read as the other's too"


def test_merge_takes_log_probs_of_the_first_where_both_have_the_node() -> None:
    one = chain_tree(0, [1], log_probs=[0.0, -0.1])
    two = chain_tree(0, [1, 2], log_probs=[0.0, -0.7, -0.9])
    assert merge_trees(one, two, 8).log_probs == [0.0, -0.1, -0.9]


def test_merge_keeps_a_draft_law_only_where_one_tree_has_children() -> None:
    """A node with drawn and with looked-up children must not be verified by the drawn ones' law."""
    lookup = chain_tree(0, [1, 2])
    head = DraftTree(
        token_ids=[0, 3, 1, 4],
        parents=[-1, 0, 0, 1],
        draft_probs=torch.arange(1.0, 21.0).view(4, 5),
    )
    for first, second in ((lookup, head), (head, lookup)):
        merged = merge_trees(first, second, 8)
        assert merged.draft_probs is not None
        rows = {context_of(merged, node): merged.draft_probs[node] for node in range(merged.num_nodes)}
        assert not rows[()].any(), "the root has children of both"
        assert not rows[1,].any(), "only the lookup continues here"
        assert head.draft_probs is not None
        assert torch.equal(rows[3,], head.draft_probs[1])


def test_merge_decides_on_the_uncut_trees() -> None:
    """A rule that depended on what the budget left would depend on which children were drawn."""
    lookup = chain_tree(0, [1])
    head = DraftTree(token_ids=[0, 3], parents=[-1, 0], draft_probs=torch.ones(2, 5))
    merged = merge_trees(head, lookup, 2)
    assert merged.token_ids == [0, 3]
    assert merged.draft_probs is not None
    assert not merged.draft_probs[0].any()


def test_chain_tree_counts_the_root_first() -> None:
    tree = chain_tree(5, [7, 8])
    assert (tree.token_ids, tree.parents, tree.depths) == ([5, 7, 8], [-1, 0, 1], [0, 1, 2])
    assert tree.is_chain
    assert (tree.num_nodes, tree.num_drafted) == (3, 2)
    assert chain_tree(5, []).drafted_per_depth == []


@pytest.mark.parametrize(
    ("token_ids", "parents"),
    [([1, 2], [-1]), ([1], [0]), ([], []), ([1, 2], [-1, 1]), ([1, 2], [-1, -1]), ([1, 2, 3], [-1, 2, 0])],
)
def test_malformed_trees_are_bugs(token_ids: list[int], parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        DraftTree(token_ids=token_ids, parents=parents)
