"""Logits made on demand: the same walks as with all rows at hand, and fewer rows."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from specdec.sampling import greedy_tokens
from specdec.step_logits import FREE_ROWS, StepLogits, TreeLogits, likely_path
from specdec.tree import DraftTree
from specdec.verification.greedy import verify_greedy

VOCAB = 7


def random_tree(chance: random.Random) -> DraftTree:
    count = chance.randrange(1, 17)
    parents = [-1, *(chance.randrange(node) for node in range(1, count))]
    return DraftTree(token_ids=[chance.randrange(VOCAB) for _ in range(count)], parents=parents)


class Head:
    """Hands out rows of a tensor and remembers what was asked for."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.asked: list[list[int]] = []

    def __call__(self, rows: list[int]) -> Tensor:
        self.asked.append(rows)
        return self.logits[rows]


@pytest.mark.parametrize("seed", range(25))
def test_greedy_walks_over_rows_on_demand_commit_what_all_rows_do(seed: int) -> None:
    chance = random.Random(seed)
    trees = [random_tree(chance) for _ in range(chance.randrange(1, 6))]
    starts = [sum(tree.num_nodes for tree in trees[:index]) for index in range(len(trees))]
    logits = torch.randn(sum(tree.num_nodes for tree in trees), VOCAB)
    head = Head(logits)
    step = StepLogits(head, *logits.shape)
    step.walk_greedily(list(zip(starts, trees, strict=True)))
    waves = len(head.asked)
    everywhere, _ = greedy_tokens(logits)
    for start, tree in zip(starts, trees, strict=True):
        rows = TreeLogits(step, start, tree)
        expected = verify_greedy(tree, everywhere[start : start + tree.num_nodes])
        assert verify_greedy(tree, rows.choices) == expected
    assert len(head.asked) == waves, "the walk had made every row it reads"
    rows_made = [row for wave in head.asked for row in wave]
    assert len(rows_made) == len(set(rows_made))


def test_a_wave_is_filled_up_to_what_costs_nothing() -> None:
    tree = DraftTree(token_ids=[1, 2, 3, 4, 5, 6], parents=[-1, 0, 1, 2, 3, 0])
    head = Head(torch.zeros(6, VOCAB))
    StepLogits(head, 6, VOCAB).walk_greedily([(0, tree)])
    assert head.asked == [[0, 1, 2, 3, 4]]
    assert likely_path(tree, 1, 9) == [2, 3, 4]
    wide = Head(torch.zeros(18, VOCAB))
    StepLogits(wide, 18, VOCAB).walk_greedily([(0, tree), (6, tree), (12, tree)])
    assert wide.asked == [[0, 6, 12, 1, 2]]
    assert FREE_ROWS == 5
    padded = Head(torch.zeros(6, VOCAB))
    StepLogits(padded, 6, VOCAB, row_multiple=4).walk_greedily([(0, tree)])
    assert padded.asked == [[0, 1, 2, 3]], "a fifth row would be padded to eight"


def test_rows_can_be_read_in_every_way_and_replaced() -> None:
    logits = torch.randn(5, VOCAB)
    step = StepLogits(Head(logits), *logits.shape)
    assert torch.equal(step[3], logits[3])
    assert torch.equal(step[1:4], logits[1:4])
    assert torch.equal(step[[4, 0]], logits[[4, 0]])
    step[1:3] *= -1.0
    assert torch.equal(step[1:4], torch.cat((-logits[1:3], logits[3:4])))
    assert step.choice(2) == int(logits[2].argmin())


def test_rows_of_a_tensor_exist_already() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 2] = torch.nan
    step = StepLogits.of(logits)
    assert StepLogits.of(step) is step
    assert [step.is_bad(row) for row in range(3)] == [False, True, False]
    assert step.choice(0) == int(logits[0].argmax())


def test_greedy_choices_on_the_processor_are_torchs() -> None:
    """Numpy finds them: first of equals, NaN wins, a row of nothing but -inf is bad."""
    inf = float("inf")
    rows = torch.tensor(
        [[1.0, 3.0, 3.0], [-inf, -inf, -inf], [torch.nan, 5.0, torch.nan], [1.0, inf, 0.0], [-0.0, 0.0, -1.0]]
    )
    tokens, bad = greedy_tokens(rows)
    assert tokens == rows.argmax(dim=-1).tolist()
    assert bad == [False, True, True, True, False]
    assert greedy_tokens(rows[:1].double()) == ([1], [False])
    assert greedy_tokens(torch.empty(0, 3)) == ([], [])
