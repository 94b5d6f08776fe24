"""Attention over paged KV: every kind of row against a dense float64 answer, over a pool of NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.kernels import kernel, paged_attention, reference_tree_attention
from specdec.kernels import tree_attention as tree_attention_module
from specdec.kernels.tree_attention import tree_attention

# fault row B69 asks for this in fp32; values here are of order one
FP32_BOUND = 1e-5
# the tree of fault row B47
TREE = (-1, 0, 0, 1, 1, 2, 5)
MIXTURE = [(3, 20), (17, 1), (31, TREE), (0, 5), (16, (-1, 0, 0))]
Make = Callable[..., Any]
Dense = Callable[..., Tensor]


def attend(case: Any, **options: Any) -> Tensor:
    """The kernel over a case, whose pool it must leave as it was."""
    keys, values = case.keys.clone(), case.values.clone()
    output = tree_attention(case.query, case.keys, case.values, case.batch, **options)
    assert torch.equal(keys.view(torch.uint8), case.keys.view(torch.uint8))
    assert torch.equal(values.view(torch.uint8), case.values.view(torch.uint8))
    return output.cpu()


def plain(case: Any, window: int | None = None) -> Tensor:
    """What the runtime computes without Triton, in the case's dtype on the processor."""
    return paged_attention(case.query.cpu(), case.keys.cpu(), case.values.cpu(), case.host, window=window)


@pytest.mark.parametrize(
    ("length", "dim", "group", "block_size"),
    [
        (1, 24, 1, 16),
        (15, 64, 2, 16),
        (16, 80, 4, 16),
        (17, 24, 3, 16),
        (31, 80, 1, 32),
        (31, 16, 4, 16),
        (16, 24, 2, 64),
        (17, 96, 3, 32),
        (15, 128, 1, 64),
        (1, 256, 2, 32),
    ],
)
def test_odd_sizes_are_as_accurate_as_plain_torch(
    make_case: Make,
    dense_attention: Dense,
    assert_as_accurate: Callable[..., None],
    device: str,
    dtype: torch.dtype,
    length: int,
    dim: int,
    group: int,
    block_size: int,
) -> None:
    """A prompt, one decoded token, a tree; catches edges of tiles, of blocks and of head_dim."""
    case = make_case(
        [(0, length), (length, 1), (length, TREE)],
        dim=dim,
        group=group,
        block_size=block_size,
        dtype=dtype,
        device=device,
        padding_rows=3,
    )
    output, exact = attend(case), dense_attention(case)
    assert_as_accurate(output, plain(case), exact)
    assert not output[-3:].any(), "padding rows must give 0"
    if dtype == torch.float32:
        assert (output - exact).abs().max() < FP32_BOUND


@pytest.mark.parametrize("options", [{"num_splits": n} for n in (1, 2, 3, 8)] + [{"split_keys": 64}])
def test_splits_agree_on_a_ragged_mixture(
    make_case: Make, dense_attention: Dense, device: str, options: dict[str, int]
) -> None:
    """Chunk, decode and trees in one call, more splits than tiles; an unwritten share would show as NaN."""
    case = make_case([*MIXTURE, (140, TREE)], kv_heads=1, device=device, padding_rows=2)
    exact = dense_attention(case)
    assert (attend(case, **options) - exact).abs().max() < FP32_BOUND


@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_window_is_by_position_not_by_row(
    make_case: Make, dense_attention: Dense, device: str, window: int, num_splits: int
) -> None:
    """Nodes of a tree share positions; a window shorter than the tree's depth hides its root."""
    case = make_case([*MIXTURE, (70, TREE)], kv_heads=1, device=device)
    output = attend(case, window=window, num_splits=num_splits)
    assert (output - dense_attention(case, window)).abs().max() < FP32_BOUND


@pytest.mark.parametrize("window", [None, 3])
def test_queries_may_be_the_last_of_more_new_rows(
    make_case: Make, dense_attention: Dense, device: str, window: int | None
) -> None:
    """A drafter's frontier: earlier levels of its tree are stored, but are neither committed nor asked."""
    case = make_case([(9, TREE), (16, 6), (5, (-1, 0, 0))], queries=[2, 3, 1], kv_heads=1, device=device)
    assert case.batch.new_len is not None
    assert (attend(case, window=window) - dense_attention(case, window)).abs().max() < FP32_BOUND


@given(nodes=st.integers(1, 64), context=st.integers(0, 80), seed=st.integers(0, 2**31))
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
def test_random_trees(
    make_case: Make,
    dense_attention: Dense,
    random_parents: Callable[[int, int], tuple[int, ...]],
    device: str,
    nodes: int,
    context: int,
    seed: int,
) -> None:
    """Any tree up to one mask word, at any place in its tiles."""
    case = make_case([(context, random_parents(nodes, seed))], kv_heads=1, dim=16, device=device, seed=seed)
    assert (attend(case) - dense_attention(case)).abs().max() < FP32_BOUND


def test_a_tree_of_more_than_one_mask_word(
    make_case: Make,
    dense_attention: Dense,
    random_parents: Callable[[int, int], tuple[int, ...]],
    device: str,
) -> None:
    """Bits of two and three words in one tile, at a tile edge that is no word edge."""
    case = make_case([(37, random_parents(150, 1)), (64, TREE)], kv_heads=1, group=1, dim=16, device=device)
    assert case.batch.mask_words.shape[1] == 3
    assert (attend(case) - dense_attention(case)).abs().max() < FP32_BOUND


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17])
def test_a_sibling_is_never_seen(make_case: Make, device: str, context: int) -> None:
    """Fault row B47: what hangs on another branch changes no bit."""
    case = make_case([(context, TREE)], kv_heads=1, device=device)
    before = attend(case)
    slot = torch.arange(case.keys.shape[1])[case.host[0].slots][context + 3]
    case.keys[:, slot] += 1
    case.values[:, slot] -= 1
    after = attend(case)
    assert not torch.equal(before[3], after[3])
    others = [node for node in range(len(TREE)) if node != 3]
    assert torch.equal(before[others], after[others])


@pytest.mark.usefixtures("even_products")
@pytest.mark.parametrize("options", [{"num_splits": 2}, {"split_keys": 64}])
def test_a_row_does_not_depend_on_other_sequences(
    make_case: Make, device: str, dtype: torch.dtype, options: dict[str, int]
) -> None:
    """With splits fixed, a batch of one and a batch of five give the same bits."""
    case = make_case([*MIXTURE, (100, TREE)], kv_heads=1, dtype=dtype, device=device)
    together = attend(case, **options)
    for seq in case.host:
        rows = slice(seq.query_start, seq.query_start + seq.num_queries)
        table = case.batch.block_tables[case.host.index(seq)]
        alone = type(case.batch)(
            query_start=torch.tensor([0, seq.num_queries], dtype=torch.int32, device=device),
            context_len=torch.tensor([seq.context_len], dtype=torch.int32, device=device),
            block_tables=table[None],
            mask_words=case.batch.mask_words[rows],
            positions=case.batch.positions[rows],
            slots=case.batch.slots[rows],
            block_size=case.batch.block_size,
            chain=case.batch.chain[case.host.index(seq), None],
        )
        output = tree_attention(case.query[rows], case.keys, case.values, alone, **options)
        assert torch.equal(output.cpu(), together[rows])


@pytest.mark.usefixtures("even_products")
def test_a_chain_gives_the_bits_of_plain_decoding(make_case: Make, device: str, dtype: torch.dtype) -> None:
    """With fixed splits: node k of a verified chain equals the token decoded behind k committed ones."""
    case = make_case([(61, 6)], kv_heads=1, dtype=dtype, device=device)
    verified = attend(case, split_keys=64)
    for node in range(6):
        decode = type(case.batch)(
            query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
            context_len=torch.tensor([61 + node], dtype=torch.int32, device=device),
            block_tables=case.batch.block_tables,
            mask_words=torch.ones(1, 1, dtype=torch.int64, device=device),
            positions=case.batch.positions[node : node + 1],
            slots=case.batch.slots[node : node + 1],
            block_size=case.batch.block_size,
        )
        row = case.query[node : node + 1]
        output = tree_attention(row, case.keys, case.values, decode, split_keys=64)
        assert torch.equal(output.cpu(), verified[node : node + 1])


def test_a_row_that_sees_nothing_gives_zero(make_case: Make, device: str) -> None:
    """Not NaN and not a mean: minus infinity may not be subtracted from itself."""
    case = make_case([(0, (-1, 0, 0)), (4, TREE)], kv_heads=1, device=device)
    case.batch.mask_words[1] = 0
    for splits in (1, 2):
        output = attend(case, num_splits=splits)
        assert not output[1].any()
        assert output[0].any()
        assert not output.isnan().any()


def test_large_scores_stay_finite(
    make_case: Make, dense_attention: Dense, device: str, dtype: torch.dtype
) -> None:
    """Scores of plus and minus 1e4, whose exponentials overflow unless the maximum goes first."""
    case = make_case([(20, TREE)], kv_heads=1, dim=16, dtype=dtype, device=device)
    case.query.sign_().mul_(100)
    case.keys.sign_().mul_(100)
    scores = case.query.double().cpu()[:, 0] @ case.keys[0][case.host[0].slots].double().cpu().T / 4
    assert scores.max() > 1e4
    assert scores.min() < -1e4
    output = attend(case)
    assert output.isfinite().all()
    assert (output - dense_attention(case)).abs().max() < 4 * torch.finfo(dtype).eps * 4


def test_padding_sequences_and_rows_are_left_alone(make_case: Make, device: str) -> None:
    """A batch of two padded to a class of four sequences: block -1 is not read, rows past the end are 0."""
    case = make_case([(17, TREE), (3, 1)], kv_heads=1, device=device, padding_rows=5)
    expected = attend(case, num_splits=2)
    batch = case.batch
    none = torch.zeros(2, dtype=torch.int32, device=device)
    padded = type(batch)(
        query_start=torch.cat((batch.query_start, batch.query_start[-1:].expand(2))),
        context_len=torch.cat((batch.context_len, none)),
        block_tables=torch.cat((batch.block_tables, torch.full_like(batch.block_tables, -1))),
        mask_words=batch.mask_words,
        positions=batch.positions,
        slots=batch.slots,
        block_size=batch.block_size,
        chain=torch.cat((batch.chain, none.bool())),
    )
    output = tree_attention(case.query, case.keys, case.values, padded, num_splits=2).cpu()
    assert torch.equal(output, expected)
    assert not output[-5:].any()


def test_rows_may_be_views_of_wider_tensors(make_case: Make, device: str) -> None:
    """Queries cut from a fused projection, keys and values from the pool of all layers."""
    case = make_case(MIXTURE, device=device)
    wide = torch.full((case.query.shape[0], 12, 24), float("nan"), device=device)
    wide[:, :4] = case.query
    pool = torch.full((2, 2, *case.keys.shape), float("nan"), device=device)
    pool[1, 0], pool[1, 1] = case.keys, case.values
    output = tree_attention(wide[:, :4], pool[1, 0], pool[1, 1], case.batch)
    assert torch.equal(output.cpu(), attend(case))


def test_the_reference_means_the_same(make_case: Make, dense_attention: Dense) -> None:
    """`reference_tree_attention` reads the packed description as the kernel does."""
    case = make_case(MIXTURE, padding_rows=2)
    for window in (None, 4):
        output = reference_tree_attention.tree_attention(
            case.query, case.keys, case.values, case.batch, window=window
        )
        assert (output - dense_attention(case, window)).abs().max() < FP32_BOUND
    late = make_case([(9, TREE), (16, 6)], queries=[2, 3])
    output = reference_tree_attention.tree_attention(late.query, late.keys, late.values, late.batch, window=3)
    assert (output - dense_attention(late, 3)).abs().max() < FP32_BOUND


def test_the_kernel_is_what_runs(make_case: Make, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch by name gives the Triton launch, and that launches both kernels when keys are split."""
    launched: list[str] = []

    class Counted:
        def __init__(self, name: str) -> None:
            self.name, self.real = name, getattr(tree_attention_module, name)

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self.name)
            return self.real[grid]

    for name in ("attention_kernel", "combine_kernel"):
        monkeypatch.setattr(tree_attention_module, name, Counted(name))
    case = make_case([(20, 1)], device=device)
    kernel("tree_attention", "triton")(case.query, case.keys, case.values, case.batch, num_splits=2)
    assert launched == ["attention_kernel", "combine_kernel"]
    assert kernel("tree_attention", "reference") is reference_tree_attention.tree_attention


def test_bfloat16_is_refused_by_the_interpreter(make_case: Make) -> None:
    """Triton's interpreter computes bf16 wrongly and silently."""
    if torch.cuda.is_available():
        pytest.skip("compiled on this machine")
    case = make_case([(4, 1)], dtype=torch.bfloat16)
    with pytest.raises(SpecdecError, match="bfloat16"):
        attend(case)
