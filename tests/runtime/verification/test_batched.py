"""The batched rules decide as the rules on one tree with the same numbers, and never ask the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.random_streams import Purpose, RandomStream
from specdec.tree import DraftTree, tree_from_paths
from specdec.verification.batch import (
    BatchResult,
    StepNumbers,
    TreeBatch,
    draw_numbers,
    pad_probs,
    pad_trees,
)
from specdec.verification.batch_laws import draw
from specdec.verification.batched import (
    coupled_batch,
    deterministic_batch,
    greedy_batch,
    multi_round_batch,
    rejection_batch,
    target_only_batch,
)
from specdec.verification.batched_joint import block_batch, traversal_batch
from specdec.verification.batched_k_seq import k_seq_batch
from specdec.verification.draws import draw_children
from specdec.verification.registry import EXACT_RULES, RULES, rule_named
from specdec.verification.rules import DraftGuarantee
from specdec.verification.target_only import verify_target_only

# tree, p, q, exponentials of the races, numbers -> result
Run = Callable[[TreeBatch, Tensor, Tensor, Tensor, StepNumbers], BatchResult]
BATCHED: dict[str, Run] = {
    "greedy": lambda tree, p, q, races, numbers: greedy_batch(tree, p.argmax(-1)),
    "coupled": lambda tree, p, q, races, numbers: coupled_batch(tree, p, races),
    "deterministic": lambda tree, p, q, races, numbers: deterministic_batch(tree, p, numbers),
    "target-only": lambda tree, p, q, races, numbers: target_only_batch(tree, p, numbers),
    "rejection": lambda tree, p, q, races, numbers: rejection_batch(tree, p, q, numbers),
    "multi-round": lambda tree, p, q, races, numbers: multi_round_batch(tree, p, q, numbers),
    "k-seq": lambda tree, p, q, races, numbers: k_seq_batch(tree, p, q, numbers),
    "block": lambda tree, p, q, races, numbers: block_batch(tree, p, q, numbers),
    "traversal": lambda tree, p, q, races, numbers: traversal_batch(tree, p, q, numbers),
}


def random_law(rng: np.random.Generator, vocab: int) -> np.ndarray:
    law = rng.dirichlet(np.full(vocab, rng.choice([0.05, 0.5, 5.0])))
    if rng.random() < 0.3:
        law = np.ceil(law * 4) * (rng.random(vocab) < 0.7)
    return law / law.sum() if law.any() else np.full(vocab, 1.0 / vocab)


def random_tree(
    rng: np.random.Generator, vocab: int, guarantee: DraftGuarantee, dtype: torch.dtype
) -> tuple[DraftTree, Tensor]:
    """A tree of 1 to 9 rows with the laws its children were drawn from, and p after each row."""
    max_rows, stream = int(rng.integers(1, 10)), RandomStream(int(rng.integers(2**40)))
    token_ids, parents, q_rows, p_rows = [0], [-1], [], []
    node = 0
    while node < len(token_ids):
        q = torch.tensor(random_law(rng, vocab), dtype=dtype).double().numpy()
        count = min(1 if guarantee == "sampled" else int(rng.integers(0, 4)), max_rows - len(token_ids))
        # some nodes have deterministic children, whatever the rule
        fixed = rng.random() < 0.2
        drawn = draw_children(q, count, "deterministic" if fixed else guarantee, stream, 5, node)
        token_ids += drawn
        parents += [node] * len(drawn)
        q_rows.append(np.zeros(vocab) if fixed or not drawn else q)
        p_rows.append(q if rng.random() < 0.15 else random_law(rng, vocab))
        node += 1
    tree = DraftTree(
        token_ids=token_ids, parents=parents, draft_probs=torch.tensor(np.array(q_rows), dtype=dtype)
    )
    return tree, torch.tensor(np.array(p_rows), dtype=dtype)


class Batch:
    """A ragged batch, padded beyond its largest tree."""

    def __init__(self, trees: Sequence[DraftTree], targets: Sequence[Tensor], positions: list[int]) -> None:
        rows = max(tree.num_nodes for tree in trees) + 2
        depth = max(tree.max_depth for tree in trees) + 1
        self.trees, self.targets, self.positions = trees, targets, positions
        self.streams = [RandomStream(100 + index) for index in range(len(trees))]
        self.padded = pad_trees(trees, num_rows=rows, max_depth=depth)
        self.target_probs = pad_probs(targets, rows)
        self.draft_probs = pad_probs(
            [tree.draft_probs for tree in trees if tree.draft_probs is not None], rows
        )
        self.numbers = draw_numbers(self.streams, positions, rows)
        vocab = targets[0].shape[1]
        self.races = torch.tensor(
            np.array(
                [
                    [stream.exponentials(position + step, vocab) for step in range(depth + 1)]
                    for stream, position in zip(self.streams, positions, strict=True)
                ]
            )
        )

    def run(self, rule: str) -> BatchResult:
        return BATCHED[rule](self.padded, self.target_probs, self.draft_probs, self.races, self.numbers)


def random_batch(seed: int, guarantee: DraftGuarantee, dtype: torch.dtype) -> Batch:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([2, 5, 7, 33]))
    pairs = [random_tree(rng, vocab, guarantee, dtype) for _ in range(rng.integers(1, 14))]
    return Batch(
        [tree for tree, _ in pairs], [p for _, p in pairs], rng.integers(0, 1000, len(pairs)).tolist()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", BATCHED)
def test_batched_rules_equal_the_rules_on_one_tree(rule: str, dtype: torch.dtype) -> None:
    """Ragged, odd sizes, deterministic rows among drawn ones, zeros, ties, equal laws."""
    bound = rule_named(rule)
    lengths = set()
    for seed in range(14):
        batch = random_batch(seed, bound.rule.draft, dtype)
        results = batch.run(rule).to_results()
        for tree, p, stream, position, result in zip(
            batch.trees, batch.targets, batch.streams, batch.positions, results, strict=True
        ):
            assert result == bound.verify(tree, p, stream, position)
            lengths.add(len(result.accepted_nodes))
    assert {0, 1} < lengths, "the batches must exercise rejections and long paths"


def test_every_exact_rule_has_a_batched_twin() -> None:
    assert set(BATCHED) == {rule.name for rule in EXACT_RULES}


@pytest.mark.parametrize("thresholds", [(1.0, 0.6), (0.3, 1.0), (0.4, 0.7)])
def test_batched_thresholds_equal_those_on_one_tree(thresholds: tuple[float, float]) -> None:
    single, acc = thresholds
    for seed in range(8):
        batch = random_batch(seed, "any", torch.float64)
        results = target_only_batch(
            batch.padded, batch.target_probs, batch.numbers, threshold_single=single, threshold_acc=acc
        ).to_results()
        for tree, p, stream, position, result in zip(
            batch.trees, batch.targets, batch.streams, batch.positions, results, strict=True
        ):
            assert result == verify_target_only(
                tree, p, stream, position, threshold_single=single, threshold_acc=acc
            )


@pytest.mark.parametrize(
    "rule", ["deterministic", "target-only", "rejection", "traversal", "coupled", "greedy"]
)
def test_duplicate_siblings_are_treated_alike(rule: str) -> None:
    tree = DraftTree(
        token_ids=[0, 1, 1, 2, 0, 2],
        parents=[-1, 0, 0, 0, 2, 1],
        draft_probs=torch.tensor([[0.3, 0.4, 0.3], *[[0.0] * 3] * 5]),
    )
    rng = np.random.default_rng(1)
    targets = [torch.tensor(rng.dirichlet(np.ones(3), 6)) for _ in range(200)]
    batch = Batch([tree] * 200, targets, list(range(200)))
    results = batch.run(rule).to_results()
    expected = [
        RULES[rule].verify(tree, p, stream, position, {})
        for p, stream, position in zip(targets, batch.streams, batch.positions, strict=True)
    ]
    assert results == expected


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24, 1 - 2.0**-53])
def test_a_batched_draw_never_takes_an_empty_id(u: float) -> None:
    """B45, and a scan that rounds: the ends of the interval meet zeros at both ends of the row."""
    laws = torch.tensor([[0.0, 0.7, 0.0, 0.3, 0.0], [0.0, 0.0, 0.1, 0.0, 0.0]], dtype=torch.float64)
    drawn = draw(laws, torch.full((2,), u, dtype=torch.float64)).tolist()
    assert drawn == [1 if u == 0.0 else 3, 2]


def fake_batch(rule: str) -> tuple[Batch, tuple[Tensor, ...]]:
    batch = random_batch(3, rule_named(rule).rule.draft, torch.float32)
    numbers = batch.numbers
    return batch, (
        *(batch.padded.token_ids, batch.padded.parents, batch.padded.num_nodes, batch.padded.tour),
        *(batch.target_probs, batch.draft_probs, batch.races),
        *(numbers.accept, numbers.residual, numbers.bonus),
    )


def run_on(rule: str, batch: Batch, tensors: Sequence[Tensor]) -> BatchResult:
    token_ids, parents, num_nodes, tour, p, q, races, accept, residual, bonus = tensors
    tree = replace(batch.padded, token_ids=token_ids, parents=parents, num_nodes=num_nodes, tour=tour)
    return BATCHED[rule](tree, p, q, races, StepNumbers(accept=accept, residual=residual, bonus=bonus))


@pytest.mark.parametrize("rule", BATCHED)
def test_batched_rules_never_read_a_value_on_the_host(rule: str) -> None:
    """Tensors without values: an .item(), a bool() or a shape that depends on data raises."""
    batch, tensors = fake_batch(rule)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in tensors]
    with mode:
        result = run_on(rule, batch, fakes)
        with pytest.raises(DataDependentOutputException):
            result.num_accepted[0].item()
    assert result.accepted_nodes.shape == (len(batch.trees), batch.padded.max_depth)


class RecordOperations(TorchDispatchMode):
    """Which tensor operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", BATCHED)
def test_batched_rules_neither_loop_over_sequences_nor_send_numbers_to_the_card(rule: str) -> None:
    counts = set()
    tree = tree_from_paths(0, [[1, 0]])
    tree = replace(tree, draft_probs=torch.full((3, 2), 0.5))
    for size in (1, 2, 33):
        batch = Batch([tree] * size, [torch.full((3, 2), 0.5)] * size, list(range(size)))
        with RecordOperations() as operations:
            batch.run(rule)
        counts.add(len(operations.names))
        # numbers of the host that become tensors are copies that wait, and forbidden in a captured graph
        assert not {"aten::scalar_tensor", "aten::lift_fresh"} & set(operations.names)
    assert len(counts) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rule", BATCHED)
def test_batched_rules_run_inside_a_cuda_graph(rule: str) -> None:
    """Captured once, replayed on other values: equal to what the processor decides."""
    batch, tensors = fake_batch(rule)
    on_card = [tensor.cuda() for tensor in tensors]
    run_on(rule, batch, on_card)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run_on(rule, batch, on_card)
    for shift in range(3):
        for tensor, values in zip(on_card[-3:], tensors[-3:], strict=True):
            tensor.copy_(values.roll(shift, 0))
        graph.replay()
        expected = run_on(rule, batch, [*tensors[:-3], *(values.roll(shift, 0) for values in tensors[-3:])])
        assert result.to_results() == expected.to_results()


def test_numbers_of_a_batch_are_those_of_each_request() -> None:
    streams = [RandomStream(seed) for seed in (4, 9)]
    numbers = draw_numbers(streams, [3, 70], 5)
    for row, (stream, position) in enumerate(zip(streams, (3, 70), strict=True)):
        assert numbers.accept[row].tolist() == stream.uniform(position, Purpose.ACCEPT, count=5)
        assert numbers.residual[row].item() == stream.uniform(position, Purpose.RESIDUAL)[0]
        assert numbers.bonus[row].item() == stream.uniform(position, Purpose.BONUS)[0]
