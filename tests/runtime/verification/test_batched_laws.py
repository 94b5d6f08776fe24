"""Draws of the batched rules on float32 laws against the law of every position.

16 ids, laws that depend on the context. Chains of two: tokens 1, 2 and 3 of the text (short steps continued
by the target), the recovered tokens and the bonus tokens, each alone. Ragged trees of one to four rows:
tokens 1, 2 and 3. Pearson's chi-square on cells pooled to an expectation of at least 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.audit.goodness import fit
from specdec.random_streams import UniformSource
from specdec.tree import DraftTree, chain_tree
from specdec.verification.batch import BatchResult, StepNumbers, TreeBatch, pad_trees
from specdec.verification.batch_laws import draw
from specdec.verification.batched import (
    coupled_batch,
    deterministic_batch,
    multi_round_batch,
    rejection_batch,
    target_only_batch,
)
from specdec.verification.batched_joint import block_batch, traversal_batch
from specdec.verification.batched_k_seq import k_seq_batch
from specdec.verification.enumeration import Model, draw_tree, step_law, toy_models
from specdec.verification.laws import Law
from specdec.verification.registry import rule_named

VOCAB = 16
MILLION = 1_000_000
CHUNK = 25_000
FEW = 150_000
# of all tests of this file together; each comparison gets its share (Bonferroni)
FAMILY_ALPHA = 0.01

Run = Callable[[TreeBatch, Tensor, Tensor, Tensor, StepNumbers], BatchResult]
RULES_DRAWN: dict[str, Run] = {
    "coupled": lambda tree, p, q, races, numbers: coupled_batch(tree, p, races),
    "deterministic": lambda tree, p, q, races, numbers: deterministic_batch(tree, p, numbers),
    "target-only": lambda tree, p, q, races, numbers: target_only_batch(tree, p, numbers),
    "rejection": lambda tree, p, q, races, numbers: rejection_batch(tree, p, q, numbers),
    "multi-round": lambda tree, p, q, races, numbers: multi_round_batch(tree, p, q, numbers),
    "k-seq": lambda tree, p, q, races, numbers: k_seq_batch(tree, p, q, numbers),
    "block": lambda tree, p, q, races, numbers: block_batch(tree, p, q, numbers),
    "traversal": lambda tree, p, q, races, numbers: traversal_batch(tree, p, q, numbers),
}
CHAIN_COMPARED = ("token 1", "token 2", "token 3", "recovered", "bonus")
RAGGED_COMPARED = CHAIN_COMPARED[:3]
RAGGED_RULES = ("target-only", "rejection", "multi-round", "traversal")
ALPHA = FAMILY_ALPHA / (len(RULES_DRAWN) * len(CHAIN_COMPARED) + len(RAGGED_RULES) * len(RAGGED_COMPARED))

RAGGED_TREES = [DraftTree(token_ids=[0] * size, parents=[-1, 0, 0, 1][:size]) for size in (1, 2, 3, 4)]


@dataclass(frozen=True)
class Tables:
    """Laws after 0, 1 and 2 tokens, float32 `[16]`, `[16, 16]`, `[16, 16, 16]`."""

    after: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, model: Model) -> Tables:
        ids = range(VOCAB)
        first = model(())
        second = [model((a,)) for a in ids]
        third = [[model((a, b)) for b in ids] for a in ids]
        return cls(
            tuple(torch.tensor(np.array(table), dtype=torch.float32) for table in (first, second, third))
        )

    def law(self, context: tuple[int, ...]) -> Law:
        """Law in float64 of what float32 holds."""
        row = self.after[len(context)][context].double().numpy()
        return row / row.sum()


@dataclass(frozen=True)
class Drawn:
    """Verify steps: texts they emit, `[steps, 3]` padded with 0, and how long they are."""

    texts: Tensor
    lengths: Tensor


def uniform_numbers(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, dtype=torch.float64, generator=generator)


def numbers_for(batch: int, rows: int, generator: torch.Generator) -> StepNumbers:
    return StepNumbers(
        accept=uniform_numbers(batch * rows, generator).view(batch, rows),
        residual=uniform_numbers(batch, generator),
        bonus=uniform_numbers(batch, generator),
    )


def draw_chains(run: Run, target: Tables, draft: Tables, generator: torch.Generator) -> Drawn:
    """Two sampled tokens and what verification makes of them."""
    first = draw(draft.after[0].double().expand(CHUNK, -1), uniform_numbers(CHUNK, generator))
    second = draw(draft.after[1][first].double(), uniform_numbers(CHUNK, generator))
    shape = pad_trees([chain_tree(0, [0, 0])])
    tree = TreeBatch(
        token_ids=torch.stack([torch.zeros_like(first), first, second], 1),
        parents=shape.parents.expand(CHUNK, -1),
        num_nodes=shape.num_nodes.expand(CHUNK),
        tour=shape.tour.expand(CHUNK, -1),
        max_depth=2,
    )
    p_rows = [target.after[0].expand(CHUNK, -1), target.after[1][first], target.after[2][first, second]]
    q_rows = [draft.after[0].expand(CHUNK, -1), draft.after[1][first], torch.zeros(CHUNK, VOCAB)]
    races = torch.empty(CHUNK, 3, VOCAB, dtype=torch.float64).exponential_(generator=generator)
    numbers = numbers_for(CHUNK, 3, generator)
    return emitted(tree, run(tree, torch.stack(p_rows, 1), torch.stack(q_rows, 1), races, numbers))


def draw_ragged(
    run: Run, independent: bool, target: Tables, draft: Tables, generator: torch.Generator
) -> Drawn:
    """Trees of one to four rows, up to two siblings below the root and one token below the first."""
    first_law = draft.after[0].double().expand(CHUNK, -1)
    first = draw(first_law, uniform_numbers(CHUNK, generator))
    undrawn = first_law if independent else first_law.scatter(1, first.unsqueeze(1), 0.0)
    sibling = draw(undrawn, uniform_numbers(CHUNK, generator))
    below = draw(draft.after[1][first].double(), uniform_numbers(CHUNK, generator))
    shapes = pad_trees(RAGGED_TREES)
    which = torch.randint(len(RAGGED_TREES), (CHUNK,), generator=generator)
    tree = TreeBatch(
        token_ids=torch.stack([torch.zeros_like(first), first, sibling, below], 1),
        parents=shapes.parents[which],
        num_nodes=shapes.num_nodes[which],
        tour=shapes.tour[which],
        max_depth=shapes.max_depth,
    )
    p_rows = [
        target.after[0].expand(CHUNK, -1),
        target.after[1][first],
        target.after[1][sibling],
        target.after[2][first, below],
    ]
    q_rows = [draft.after[0].expand(CHUNK, -1), draft.after[1][first], *[torch.zeros(CHUNK, VOCAB)] * 2]
    numbers = numbers_for(CHUNK, 4, generator)
    no_races = torch.empty(0)
    return emitted(tree, run(tree, torch.stack(p_rows, 1), torch.stack(q_rows, 1), no_races, numbers))


def emitted(tree: TreeBatch, result: BatchResult) -> Drawn:
    nodes = result.accepted_nodes
    texts = torch.where(nodes >= 0, tree.token_ids.gather(1, nodes.clamp(min=0)), 0)
    texts = torch.cat([texts, torch.zeros_like(texts[:, :1])], 1)
    ends = result.num_accepted.unsqueeze(1)
    return Drawn(
        texts=texts.scatter(1, ends, result.next_token_ids.unsqueeze(1)), lengths=result.num_accepted + 1
    )


def count_texts(
    draw_steps: Callable[[torch.Generator], Drawn], num_draws: int, target: Tables, seed: int
) -> list[np.ndarray]:
    """Steps by length, `[16]`, `[16, 16]`, `[16, 16, 16]`, then texts continued to three tokens."""
    generator = torch.Generator().manual_seed(seed)
    counts = [torch.zeros(VOCAB**length, dtype=torch.int64) for length in (1, 2, 3, 3)]
    for _ in range(num_draws // CHUNK):
        drawn = draw_steps(generator)
        for length in (1, 2, 3):
            counts[length - 1] += histogram(drawn.texts[drawn.lengths == length][:, :length])
        counts[3] += histogram(continued(drawn, target, generator))
    return [count.view((VOCAB,) * length).numpy() for count, length in zip(counts, (1, 2, 3, 3), strict=True)]


def histogram(texts: Tensor) -> Tensor:
    index = torch.zeros_like(texts[:, 0])
    for column in texts.unbind(1):
        index = index * VOCAB + column
    return torch.bincount(index, minlength=VOCAB ** texts.shape[1])


def continued(drawn: Drawn, target: Tables, generator: torch.Generator) -> Tensor:
    """Let the target write on what is shorter than three tokens."""
    texts = drawn.texts.clone()
    for place in (1, 2):
        laws = target.after[place][tuple(texts[:, :place].T)].double()
        more = draw(laws, uniform_numbers(len(texts), generator))
        texts[:, place] = torch.where(drawn.lengths <= place, more, texts[:, place])
    return texts


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's test of a table of counts against one of expectations, of whatever sum."""
    law = expected.ravel() / expected.sum()
    return fit(
        {(cell,): int(counts.ravel()[cell]) for cell in np.flatnonzero(counts).tolist()},
        {(cell,): float(law[cell]) for cell in np.flatnonzero(law).tolist()},
    ).p_value


def laws(seed: int) -> tuple[Tables, Tables]:
    target, draft = toy_models("plain", VOCAB, seed)
    return Tables.of(target), Tables.of(draft)


def compare_positions(texts: np.ndarray, target: Tables) -> dict[str, float]:
    first, second, third = (table.double() for table in target.after)
    joint = (first[:, None, None] * second[:, :, None] * third).numpy()
    return {
        "token 1": p_value(texts.sum((1, 2)), joint.sum((1, 2))),
        "token 2": p_value(texts.sum(2), joint.sum(2)),
        "token 3": p_value(texts, joint),
    }


def compare_chains(rule: str, run: Run, num_draws: int, seed: int) -> dict[str, float]:
    target, draft = laws(seed)

    def chain(stream: UniformSource) -> DraftTree:
        return draw_tree(stream, draft.law, [1, 1], "sampled")

    exact = [np.zeros((VOCAB,) * length) for length in (1, 2, 3)]
    for tokens, probability in step_law(chain, rule_named(rule), target.law).items():
        exact[len(tokens) - 1][tokens] += probability
    *steps, texts = count_texts(
        lambda generator: draw_chains(run, target, draft, generator), num_draws, target, seed
    )
    return compare_positions(texts, target) | {
        "recovered": p_value(*(np.concatenate([x[0].ravel(), x[1].ravel()]) for x in (steps, exact))),
        "bonus": p_value(steps[2], exact[2]),
    }


@pytest.mark.parametrize(
    ("rule", "num_draws"),
    [
        # the joint rule, the local one and the engine's default; the others have the same parts
        *((rule, MILLION) for rule in ("rejection", "block", "coupled")),
        *((rule, FEW) for rule in ("deterministic", "target-only", "traversal", "multi-round", "k-seq")),
        *(
            pytest.param(rule, MILLION, marks=pytest.mark.slow)
            for rule in ("deterministic", "target-only", "traversal", "multi-round", "k-seq")
        ),
    ],
)
def test_draws_on_chains_have_the_law_of_every_position(rule: str, num_draws: int) -> None:
    found = compare_chains(rule, RULES_DRAWN[rule], num_draws, seed=1)
    assert tuple(found) == CHAIN_COMPARED
    assert min(found.values()) > ALPHA, found


@pytest.mark.parametrize(
    "num_draws", [FEW, pytest.param(MILLION, marks=pytest.mark.slow)], ids=["fast", "million"]
)
@pytest.mark.parametrize("rule", RAGGED_RULES)
def test_draws_on_ragged_trees_have_the_law_of_every_position(rule: str, num_draws: int) -> None:
    target, draft = laws(2)
    independent = rule_named(rule).rule.draft == "iid"
    *_, texts = count_texts(
        lambda generator: draw_ragged(RULES_DRAWN[rule], independent, target, draft, generator),
        num_draws,
        target,
        seed=2,
    )
    found = compare_positions(texts, target)
    assert tuple(found) == RAGGED_COMPARED
    assert min(found.values()) > ALPHA, found


def test_the_comparison_catches_a_number_used_twice() -> None:
    """Planted: the recovered token is drawn with the number that rejected the first one."""

    def reuse(tree: TreeBatch, p: Tensor, q: Tensor, races: Tensor, numbers: StepNumbers) -> BatchResult:
        return rejection_batch(tree, p, q, replace(numbers, residual=numbers.accept[:, 1]))

    found = compare_chains("rejection", reuse, FEW, seed=1)
    assert found["token 1"] < ALPHA
    assert found["recovered"] < ALPHA
    assert found["bonus"] > ALPHA, "what the mistake does not touch must still fit"
