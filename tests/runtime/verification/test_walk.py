"""Verification with the real generator, at the ends of the unit interval, and the greedy walk.

The exact laws are in `test_verify.py`; here is what enumeration cannot show: the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specdec.random_streams import Purpose, RandomStream
from specdec.sampling import draw_without_replacement, process_logits, sample
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree, chain_tree, path_to, tree_from_paths
from specdec.verification.coupled import verify_coupled
from specdec.verification.deterministic import verify_deterministic
from specdec.verification.greedy import verify_greedy
from specdec.verification.rejection import verify_rejection
from specdec.verification.result import VerifyResult

POSITION = 11
LARGEST_COIN = 1 - 2.0**-24

Law = np.ndarray

# Toy4: exact rejection accepts with rate 0.6 and its residual is all on id 0; resampling from p instead
# of the residual is 0.2 off in total variation
TOY_P = np.array([0.5, 0.3, 0.15, 0.05])
TOY_Q = np.array([0.1, 0.6, 0.2, 0.1])


def total_variation(counts: Law, law: Law) -> float:
    return float(np.abs(counts / counts.sum() - law).sum() / 2)


# the published size is slow; the small one keeps its bound and its teeth (the law itself is enumerated)
num_draws_param = pytest.mark.parametrize(
    "num_draws", [40_000, pytest.param(200_000, marks=pytest.mark.slow)]
)


@num_draws_param
def test_toy4_by_drawing(num_draws: int) -> None:
    """B41, real generator: within 0.005 of p, acceptance 0.600, residual all on id 0."""
    stream = RandomStream(1)
    p, q = torch.tensor(TOY_P)[None].repeat(2, 1), torch.tensor(TOY_Q)[None].repeat(2, 1)
    trees = [chain_tree(0, [token], draft_probs=q) for token in range(4)]
    counts, num_accepted, recovered = np.zeros(4), 0, set()
    for position in range(num_draws):
        (token,) = draw_without_replacement(TOY_Q, 1, stream, position, 0)
        result = verify_rejection(trees[token], p, stream, position)
        if result.accepted_nodes:
            num_accepted += 1
            counts[token] += 1
        else:
            recovered.add(result.next_token_id)
            counts[result.next_token_id] += 1
    assert total_variation(counts, TOY_P) < 0.005
    assert abs(num_accepted / num_draws - 0.6) < 0.005
    assert recovered == {0}


@num_draws_param
def test_toytree_by_drawing(num_draws: int) -> None:
    """B46: deterministic children [1, 0], acceptance 0.800, output still p."""
    stream = RandomStream(2)
    tree = tree_from_paths(0, [[1], [0]])
    p = torch.tensor(TOY_P)[None].repeat(3, 1)
    counts, num_accepted = np.zeros(4), 0
    for position in range(num_draws):
        result = verify_deterministic(tree, p, stream, position)
        tokens = [*tree.tokens_of(result.accepted_nodes), result.next_token_id]
        num_accepted += len(result.accepted_nodes)
        counts[tokens[0]] += 1
    assert total_variation(counts, TOY_P) < 0.005
    assert abs(num_accepted / num_draws - 0.8) < 0.005


class ForcedCoin:
    """The same given number for every decision."""

    def __init__(self, value: float) -> None:
        self._value = value

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> list[float]:
        return [self._value] * count


@pytest.mark.parametrize("u", [0.0, LARGEST_COIN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", [verify_deterministic, verify_rejection])
def test_zero_probability_is_never_accepted_and_equal_laws_always_are(
    rule: Callable[..., VerifyResult], dtype: torch.dtype, u: float
) -> None:
    """B45: strict and non-strict comparisons differ exactly at the ends of the interval."""
    p = torch.tensor([[0.0, 0.7, 0.3], [0.2, 0.5, 0.3]], dtype=dtype)
    q = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.5, 0.3]], dtype=dtype)
    result = rule(chain_tree(0, [0], draft_probs=q), p, ForcedCoin(u), POSITION)
    assert result.accepted_nodes == []
    assert result.next_kind == "recovered"
    assert result.next_token_id != 0
    # rows that do not sum to 1 in their dtype, and the two sides alike
    same = torch.tensor([[0.0, 0.0, 0.1], [1.0, 0.0, 0.0]], dtype=dtype)
    if rule is verify_rejection:
        same = torch.softmax(torch.arange(6, dtype=dtype).view(2, 3) * 0.37, dim=-1)
    result = rule(chain_tree(0, [2], draft_probs=same), same, ForcedCoin(u), POSITION)
    assert result.accepted_nodes == [1]
    assert result.next_kind == "bonus"


def test_zero_probability_drafts_are_never_accepted_in_many_tries() -> None:
    """B42: a draft with q > 0 where p = 0."""
    stream = RandomStream(3)
    p = torch.tensor([[0.0, 0.6, 0.4]]).repeat(2, 1)
    tree = chain_tree(0, [0], draft_probs=torch.tensor([[0.9, 0.05, 0.05]]).repeat(2, 1))
    for position in range(20_000):
        result = verify_rejection(tree, p, stream, position)
        assert not result.accepted_nodes
        assert result.next_token_id != 0


def test_a_token_its_draft_law_excludes_is_a_bug() -> None:
    law = torch.tensor([[0.0, 0.5, 0.5]]).repeat(2, 1)
    with pytest.raises(AssertionError, match="no probability"):
        verify_rejection(chain_tree(0, [0], draft_probs=law), law, RandomStream(0), POSITION)


def naive_greedy(tree: DraftTree, choices: list[int]) -> tuple[list[int], int]:
    """Longest root path whose every token is the target's choice, by looking at all nodes."""
    best: list[int] = []
    for node in range(1, tree.num_nodes):
        path: list[int] = []
        walker = node
        while walker > 0:
            path.insert(0, walker)
            walker = tree.parents[walker]
        if len(path) > len(best) and all(tree.token_ids[n] == choices[tree.parents[n]] for n in path):
            best = path
    return best, choices[best[-1] if best else 0]


def test_greedy_walk_equals_a_naive_search_on_random_trees() -> None:
    """B47: 200 trees, distinct siblings, choices likely to be among them."""
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(200):
        paths = [rng.integers(0, 3, rng.integers(1, 7)).tolist() for _ in range(rng.integers(1, 12))]
        tree = tree_from_paths(0, paths)
        choices = rng.integers(0, 3, tree.num_nodes).tolist()
        result = verify_greedy(tree, choices)
        assert (result.accepted_nodes, result.next_token_id) == naive_greedy(tree, choices)
        last = result.accepted_nodes[-1] if result.accepted_nodes else 0
        assert result.next_kind == ("recovered" if tree.children[last] else "bonus")
        lengths.add(len(result.accepted_nodes))
    assert {0, 1, 2, 3} <= lengths, "the trees must exercise rejections and long paths"


def test_greedy_walk_takes_the_best_child_wherever_it_stands() -> None:
    """B47: children [2nd best, best, 3rd best]; a walk that takes the first plausible child fails."""
    row = torch.tensor([0.0, 5.0, 9.0, 1.0])
    logits = row.repeat(4, 1)
    tree = tree_from_paths(0, [[1], [2], [3]])
    result = verify_greedy(tree, logits.argmax(-1).tolist())
    assert result.accepted_nodes == [2]
    assert result.next_kind == "bonus"


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 1e-3])
def test_tiny_temperatures_walk_like_greedy(temperature: float) -> None:
    """B43: no division by zero, no NaN, and up to 1e-5 the greedy path itself."""
    logits = torch.tensor([[10.0, 9.99, 0.0, -5.0]]).repeat(3, 1)
    probs = process_logits(logits, SamplingParams(temperature=temperature))
    assert torch.isfinite(probs).all()
    for position in range(50):
        result = verify_deterministic(chain_tree(0, [0, 0]), probs, RandomStream(5), position)
        assert 0 <= len(result.accepted_nodes) <= 2
        if temperature <= 1e-5:
            assert result == verify_greedy(chain_tree(0, [0, 0]), [0, 0, 0])


def test_a_tree_without_drafts_draws_what_plain_sampling_draws() -> None:
    """Plain decoding is a tree of one node: same number, same token."""
    p = torch.tensor(TOY_P)[None]
    stream = RandomStream(9)
    for position in range(100):
        result = verify_rejection(DraftTree(token_ids=[0], parents=[-1]), p, stream, position)
        assert result.next_token_id == sample(p[0], stream.uniform(position, Purpose.BONUS)[0])
        assert result.next_kind == "bonus"


def test_coupled_text_depends_on_the_seed_and_the_target_alone() -> None:
    """Whatever is drafted, the tokens are those of plain decoding with the same seed."""

    def target(context: list[int]) -> Law:
        return np.random.default_rng(context[-3:]).dirichlet(np.full(5, 0.5))

    def decode(seed: int, num_tokens: int, drafts: np.random.Generator | None) -> tuple[list[int], int]:
        tokens, num_accepted, stream = [0, 0, 0], 0, RandomStream(seed)
        while len(tokens) < num_tokens:
            paths = [] if drafts is None else drafts.integers(0, 5, (drafts.integers(1, 6), 3)).tolist()
            tree = tree_from_paths(tokens[-1], paths)
            rows = torch.tensor(
                np.array(
                    [
                        target(tokens + tree.tokens_of(path_to(tree.parents, n)[1:]))
                        for n in range(tree.num_nodes)
                    ]
                )
            )
            result = verify_coupled(tree, rows, stream, len(tokens) - 1)
            num_accepted += len(result.accepted_nodes)
            tokens += [*tree.tokens_of(result.accepted_nodes), result.next_token_id]
        return tokens[:num_tokens], num_accepted

    plain, _ = decode(seed=4, num_tokens=80, drafts=None)
    for draft_seed in range(5):
        text, num_accepted = decode(seed=4, num_tokens=80, drafts=np.random.default_rng(draft_seed))
        assert text == plain
        assert num_accepted > 10, "the drafts must matter"
    assert decode(seed=5, num_tokens=80, drafts=None)[0] != plain
