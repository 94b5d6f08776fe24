"""The compiled attention on a card: both half types, trees of 64 nodes, 8 k of context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.kv_quant import dequantise_rows, quantise_rows
from specdec.kernels.reference_tree_attention import tree_attention as reference
from specdec.kernels.tree_attention import tree_attention

pytestmark = pytest.mark.gpu
HALF_TYPES = (torch.bfloat16, torch.float16)


def answers(case: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Plain torch in the case's dtype and in float64, both on the card."""
    plain = reference(case.query, case.keys, case.values, case.batch, **options)
    exact = reference(case.query.double(), case.keys.double(), case.values.double(), case.batch, **options)
    return plain, exact


@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
@pytest.mark.parametrize(("dim", "group"), [(24, 3), (64, 3), (80, 1), (96, 2), (128, 4), (256, 8)])
@pytest.mark.parametrize("context", [0, 17, 8192])
def test_trees_of_64_nodes(
    make_case: Callable[..., Any],
    random_parents: Callable[[int, int], tuple[int, ...]],
    assert_as_accurate: Callable[..., None],
    half: torch.dtype,
    dim: int,
    group: int,
    context: int,
) -> None:
    case = make_case(
        [(context, random_parents(64, seed)) for seed in range(3)],
        dim=dim,
        group=group,
        dtype=half,
        device="cuda",
        padding_rows=5,
    )
    plain, exact = answers(case)
    for options in ({}, {"num_splits": 3}, {"split_keys": 2048}, {"tile_rows": 128}):
        output = tree_attention(case.query, case.keys, case.values, case.batch, **options)
        assert_as_accurate(output, plain, exact)


@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_a_ragged_mixture(
    make_case: Callable[..., Any],
    random_parents: Callable[[int, int], tuple[int, ...]],
    assert_as_accurate: Callable[..., None],
    half: torch.dtype,
    window: int | None,
) -> None:
    """A prompt chunk of 700 rows among decoded tokens and trees, each length at an edge."""
    trees = [(length, random_parents(33, length)) for length in (1, 15, 16, 17, 31, 1000)]
    case = make_case(
        [(300, 700), *trees, (8191, 1), (0, 1)], dim=128, group=4, block_size=32, dtype=half, device="cuda"
    )
    plain, exact = answers(case, window=window)
    output = tree_attention(case.query, case.keys, case.values, case.batch, window=window)
    assert_as_accurate(output, plain, exact)


@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
def test_a_chain_gives_the_bits_of_plain_decoding(make_case: Callable[..., Any], half: torch.dtype) -> None:
    """Matrix instructions too: fixed splits make verification and decoding one numeric path."""
    context, nodes = 4090, 8
    case = make_case([(context, nodes)], dim=128, group=4, dtype=half, device="cuda")
    verified = tree_attention(case.query, case.keys, case.values, case.batch, split_keys=2048)
    for node in range(nodes):
        decode = type(case.batch)(
            query_start=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            context_len=torch.tensor([context + node], dtype=torch.int32, device="cuda"),
            block_tables=case.batch.block_tables,
            mask_words=torch.ones(1, 1, dtype=torch.int64, device="cuda"),
            positions=case.batch.positions[node : node + 1],
            slots=case.batch.slots[node : node + 1],
            block_size=case.batch.block_size,
        )
        row = case.query[node : node + 1]
        output = tree_attention(row, case.keys, case.values, decode, split_keys=2048)
        assert torch.equal(output, verified[node : node + 1])


@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_codes(
    make_case: Callable[..., Any],
    random_parents: Callable[[int, int], tuple[int, ...]],
    assert_as_accurate: Callable[..., None],
    half: torch.dtype,
    kind: str,
) -> None:
    case = make_case([(8192, random_parents(64, 1)), (17, 1)], dim=128, group=4, dtype=half, device="cuda")
    keys, key_scales = quantise_rows(case.keys, kind)
    values, value_scales = quantise_rows(case.values, kind)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    plain = reference(case.query, keys, values, case.batch, **scales)
    exact = reference(
        case.query.double(),
        dequantise_rows(keys, key_scales).double(),
        dequantise_rows(values, value_scales).double(),
        case.batch,
    )
    output = tree_attention(case.query, keys, values, case.batch, **scales)
    assert_as_accurate(output, plain, exact)


def test_it_can_be_captured_in_a_graph(make_case: Callable[..., Any]) -> None:
    """Nothing in a launch asks the device: a capture forbids that."""
    case = make_case([(500, 4), (33, 1)], dim=64, dtype=torch.bfloat16, device="cuda")
    arguments = (case.query, case.keys, case.values, case.batch)
    expected = tree_attention(*arguments, num_splits=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = tree_attention(*arguments, num_splits=2)
    graph.replay()
    assert torch.equal(output, expected)
