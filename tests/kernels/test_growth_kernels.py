"""Whole batches of trees grow as the host's do, node by node, and show the host's masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.drafter import DraftRequest
from specdec.drafts.growth import BestFirstGrowth, start_growth
from specdec.drafts.vocab import DraftVocab
from specdec.kernels import growth, growth_end, reference_growth, reference_sampling_rows
from specdec.kernels.device_batch import unpack_bits
from specdec.kernels.tree_records import (
    NO_PARENT,
    GrowingTrees,
    GrownTrees,
    GrowthLimits,
    GrowthRaces,
    RowParams,
    growth_capacity,
    seed_bits,
    start_trees,
)
from specdec.random_streams import RandomStream
from specdec.sampling_params import SamplingParams
from specdec.tree import DraftTree, ancestor_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Modules = tuple[ModuleType, ModuleType]
TRITON: Modules = (growth, growth_end)
PLAIN: Modules = (reference_growth, reference_growth)
BOTH = pytest.mark.parametrize("modules", [TRITON, PLAIN], ids=["triton", "plain"])
# the host's log-probabilities are float32: some last bits of numbers around 10, summed over a few levels
SCORE_TOLERANCE = 1e-5


@dataclass
class Wish:
    """One request for a tree."""

    top_k: int
    max_depth: int
    max_nodes: int
    coupled: bool
    params: SamplingParams
    seed: int
    root: int


def host_growth(wish: Wish, vocab: DraftVocab) -> BestFirstGrowth:
    seq: Any = SimpleNamespace(
        token_ids=[0] * wish.root + [5], params=wish.params, stream=RandomStream(wish.seed), processor=None
    )
    asked = DraftRequest(
        seq=seq,
        max_nodes=wish.max_nodes,
        max_depth=wish.max_depth,
        top_k=wish.top_k,
        mode="coupled" if wish.coupled else "deterministic",
    )
    grown = start_growth(asked, vocab, vocab.ids.tolist())
    assert isinstance(grown, BestFirstGrowth)
    return grown


def integers(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def limits_of(wishes: Sequence[Wish]) -> GrowthLimits:
    return GrowthLimits(
        top_k=integers([wish.top_k for wish in wishes]),
        max_depth=integers([wish.max_depth for wish in wishes]),
        max_nodes=integers([wish.max_nodes for wish in wishes]),
    )


def races_of(wishes: Sequence[Wish], logits: Tensor) -> GrowthRaces:
    rows = logits.shape[1]

    def doubles(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=DEVICE).repeat_interleave(rows)

    params = RowParams(
        temperature=doubles([wish.params.temperature for wish in wishes]),
        top_k=integers([wish.params.top_k for wish in wishes]).repeat_interleave(rows),
        top_p=doubles([wish.params.top_p for wish in wishes]),
        min_p=doubles([wish.params.min_p for wish in wishes]),
    )
    return GrowthRaces(
        laws=reference_sampling_rows.row_laws(logits.flatten(0, 1), params),
        seeds=integers([seed_bits(wish.seed) for wish in wishes], torch.int64),
        roots=integers([wish.root for wish in wishes]),
        is_coupled=torch.tensor([wish.coupled for wish in wishes], device=DEVICE),
    )


def grow(
    modules: Modules, wishes: Sequence[Wish], vocab: DraftVocab, level_logits: Sequence[Tensor]
) -> tuple[GrowingTrees, GrownTrees, list[Tensor]]:
    """Grow on the device; `level_logits` `[batch, rows, draft vocab]` of each level."""
    limits, width = limits_of(wishes), max(wish.top_k for wish in wishes)
    trees = start_trees(
        integers([5] * len(wishes), torch.int64),
        capacity=growth_capacity(width, len(level_logits)) + 3,
        width=width,
    )
    parent_rows = []
    for depth, logits in enumerate(level_logits):
        trees, rows = modules[0].grow_level(
            trees,
            logits.to(DEVICE),
            limits,
            depth=depth,
            vocab_ids=vocab.ids.to(DEVICE),
            vocab=vocab.vocab_size,
            races=races_of(wishes, logits.to(DEVICE)) if any(wish.coupled for wish in wishes) else None,
        )
        parent_rows.append(rows)
    rows = max(wish.max_nodes for wish in wishes) + 2
    return trees, modules[1].prune_trees(trees, limits, rows=rows), parent_rows


def random_wishes(rng: np.random.Generator, batch: int) -> list[Wish]:
    return [
        Wish(
            top_k=int(rng.integers(1, 5)),
            max_depth=int(rng.integers(1, 4)),
            max_nodes=int(rng.integers(1, 20)),
            coupled=bool(rng.random() < 0.5),
            params=SamplingParams(temperature=float(rng.choice([0.7, 1.0])), top_k=int(rng.choice([0, 6]))),
            seed=int(rng.integers(0, 2**63)),
            root=int(rng.integers(1, 3000)),
        )
        for _ in range(batch)
    ]


def is_close_call(scores: Sequence[float]) -> bool:
    """Whether two paths lie so near that float32 scores may order them otherwise."""
    ordered = np.sort(np.asarray(scores[1:]))
    return bool(len(ordered) > 1 and np.diff(ordered).min() < SCORE_TOLERANCE)


def check_case(modules: Modules, seed: int, *, batch: int = 3, dtype: torch.dtype = torch.float32) -> int:
    """Compare with the host, every node of every tree; returns how many trees were compared."""
    rng = np.random.default_rng(seed)
    wishes = random_wishes(rng, batch)
    draft_vocab, target_vocab = int(rng.choice([3, 19, 70])), 101
    ids = torch.from_numpy(np.sort(rng.choice(target_vocab, draft_vocab, replace=False)))
    vocab = DraftVocab(ids, target_vocab)
    width = max(wish.top_k for wish in wishes)
    levels = []
    for depth in range(3):
        shape = (batch, 1 if depth == 0 else width, draft_vocab)
        # distinct in float16 too: a tie at the border of top_k is torch's choice on the host
        steps = np.stack([rng.permutation(draft_vocab) for _ in range(shape[0] * shape[1])]).reshape(shape)
        logits = torch.from_numpy(steps * 0.11 + rng.normal(size=shape) * 0.01).to(dtype)
        if rng.random() < 0.3:
            logits[..., rng.integers(0, draft_vocab)] = -torch.inf
        if depth > 0 and rng.random() < 0.3:
            logits[:, 0] = rng.choice([np.nan, np.inf, -np.inf])
        levels.append(logits)
    trees, grown, parent_rows = grow(modules, wishes, vocab, levels)
    depths, words = modules[1].tree_masks(grown.parents, max_depth=3)
    compared = 0
    for index, wish in enumerate(wishes):
        host = host_growth(wish, vocab)
        same_rows = []
        for depth in range(wish.max_depth):
            count = len(host.frontier)
            if count == 0:
                break
            rows = host.expand(levels[depth][index, :count].float())
            same_rows.append(parent_rows[depth][index].tolist() == rows + [0] * (width - len(rows)))
        if is_close_call(host.scores):
            continue
        compared += 1
        assert all(same_rows)
        count = len(host.tokens)
        assert trees.num_nodes[index].item() == count
        assert trees.token_ids[index, :count].tolist() == host.tokens
        assert trees.parents[index, :count].tolist() == host.parents
        np.testing.assert_allclose(
            trees.scores[index, :count].tolist(), host.scores, rtol=0, atol=SCORE_TOLERANCE
        )
        assert (trees.frontier[index] == -1).all()
        check_finished(grown, index, host.tree(), depths[index], words[index])
    return compared


def check_finished(grown: GrownTrees, index: int, tree: DraftTree, depths: Tensor, words: Tensor) -> None:
    count, rows = tree.num_nodes, grown.parents.shape[1]
    assert grown.num_nodes[index].item() == count
    assert grown.token_ids[index].tolist() == tree.token_ids + [0] * (rows - count)
    assert grown.parents[index].tolist() == tree.parents + [NO_PARENT] * (rows - count)
    assert (grown.log_probs[index, count:] == -torch.inf).all()
    assert tree.log_probs is not None
    np.testing.assert_allclose(
        grown.log_probs[index, :count].tolist(), tree.log_probs, rtol=0, atol=SCORE_TOLERANCE
    )
    assert depths[:count].tolist() == tree.depths
    seen = torch.eye(rows, dtype=torch.bool)
    seen[:count, :count] = ancestor_mask(tree.parents)
    assert torch.equal(unpack_bits(words, rows).cpu(), seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@BOTH
def test_trees_grow_as_on_the_host(modules: Modules, dtype: torch.dtype) -> None:
    """Mixed modes and limits in one batch, -inf, rows of NaN, draft vocabularies with holes."""
    compared = sum(check_case(modules, seed, dtype=dtype) for seed in range(2 if modules is TRITON else 40))
    assert compared >= 4


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_any_tree_grows_as_on_the_host(seed: int) -> None:
    check_case(PLAIN, seed)


@BOTH
def test_equal_paths_stand_by_node_and_id(modules: Modules) -> None:
    """The project's tie order, where every child is as likely as every other, border of top_k included."""
    vocab = DraftVocab(torch.tensor([2, 3, 5, 7, 11]), 13)
    params = SamplingParams(temperature=0.0)
    wish = Wish(top_k=2, max_depth=3, max_nodes=5, coupled=False, params=params, seed=0, root=1)
    levels = [torch.zeros(1, 1, 5), torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)]
    trees, grown, _ = grow(modules, [wish], vocab, levels)
    assert trees.token_ids[0, :11].tolist() == [5, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3]
    assert trees.parents[0, :11].tolist() == [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert grown.parents[0, :6].tolist() == [-1, 0, 0, 1, 1, 2]


@BOTH
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 130])
def test_masks_are_the_hosts(modules: Modules, rows: int) -> None:
    """Words and sign bits: node 63 and beyond."""
    rng = np.random.default_rng(rows)
    parents = [
        [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, rows))] for _ in range(2)
    ]
    trees = [DraftTree(token_ids=[0] * rows, parents=one) for one in parents]
    depths, words = modules[1].tree_masks(
        torch.tensor(parents, dtype=torch.int32, device=DEVICE),
        max_depth=max(tree.max_depth for tree in trees),
    )
    for index, (tree, one) in enumerate(zip(trees, parents, strict=True)):
        assert depths[index].tolist() == tree.depths
        assert torch.equal(unpack_bits(words[index], rows).cpu(), ancestor_mask(one))


@pytest.mark.gpu
def test_trees_grow_as_on_the_host_in_bf16() -> None:
    assert sum(check_case(TRITON, seed, dtype=torch.bfloat16) for seed in range(30)) > 10
