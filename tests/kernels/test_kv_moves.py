"""The commit in one launch: accepted rows come to the front bit for bit, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels import kv_moves, reference_kv_moves
from specdec.kernels.compiled import run_uninterpreted
from specdec.paged_kv import PagedKVCache

LAYERS, KV_HEADS, BLOCKS, BLOCK_SIZE = 2, 3, 12, 4
BOTH = pytest.mark.parametrize("module", [kv_moves, reference_kv_moves], ids=["triton", "reference"])


def _pool(dim: int, dtype: torch.dtype, device: str) -> PagedKVCache:
    """Every number of the pool is different in its bits, NaN patterns among them."""
    cache = PagedKVCache(
        num_layers=LAYERS,
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=dim,
        dtype=dtype,
        device=device,
    )
    bits = torch.randint(
        -128, 128, (*cache.data.shape[:-1], dim * cache.data.element_size()), dtype=torch.int8
    )
    cache.data = bits.view(dtype).to(device)
    return cache


def _batch(device: str, paths: list[list[int]], contexts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, context lengths and block tables; blocks dealt at random, sequences without any have -1."""
    depth = max(map(len, paths), default=0)
    nodes = torch.full((len(paths), depth + 1), -1)
    tables = torch.full((len(paths), 4), -1, dtype=torch.int32)
    deck = torch.randperm(BLOCKS).tolist()
    for index, path in enumerate(paths):
        nodes[index, : len(path)] = torch.tensor(path, dtype=torch.int64)
        if path:
            tables[index] = torch.tensor([deck.pop() for _ in range(4)])
    return nodes.to(device), torch.tensor(contexts, dtype=torch.int32).to(device), tables.to(device)


def _bits(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.uint8).clone()


def _check(module, cache: PagedKVCache, paths: list[list[int]], contexts: list[int], device: str) -> None:
    """Against the pool's own commit, slot by slot, as the engine on the host does it."""
    nodes, context_len, tables = _batch(device, paths, contexts)
    expected = _pool(1, torch.float32, device)
    expected.data = cache.data.clone()
    source, target = [], []
    for path, context, table in zip(paths, contexts, tables.tolist(), strict=True):
        for offset, node in enumerate(path, start=1):
            source += expected.slots(table, context + node, context + node + 1)
            target += expected.slots(table, context + offset, context + offset + 1)
    expected.commit(source, target)
    module.commit_path(cache.data, nodes, context_len, tables, block_size=BLOCK_SIZE)
    assert torch.equal(_bits(cache.data), _bits(expected.data))


# a path that overlaps itself across blocks, one that stays, none at all, and a padding sequence
PATHS = [[2, 3, 5, 8], [1, 2, 3], [], []]
CONTEXTS = [5, 2, 7, 0]


@BOTH
@pytest.mark.parametrize("dim", [24, 16, 1])
def test_accepted_rows_move_to_the_front_in_all_layers(module, dim: int, dtype, device: str) -> None:
    _check(module, _pool(dim, dtype, device), PATHS, CONTEXTS, device)


@BOTH
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64], ids=str)
def test_a_move_copies_bits_whatever_the_dtype(module, dtype: torch.dtype, device: str) -> None:
    """Eight-bit pools too; the scales of one are rows of a single number."""
    cache = _pool(24, torch.float32, device)
    cache.data = _bits(cache.data).view(dtype)
    data = cache.data.clone()
    nodes, context_len, tables = _batch(device, PATHS, CONTEXTS)
    module.commit_path(cache.data, nodes, context_len, tables, block_size=BLOCK_SIZE)
    whole = data.contiguous().view(torch.uint8)
    reference_kv_moves.commit_path(whole, nodes, context_len, tables, block_size=BLOCK_SIZE)
    assert torch.equal(_bits(cache.data), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_bfloat16_rows_move_on_a_card(dim: int) -> None:
    """Many times over: a race between threads would show in some."""
    for _ in range(50):
        _check(kv_moves, _pool(dim, torch.bfloat16, "cuda"), PATHS, CONTEXTS, "cuda")


@BOTH
def test_a_cycle_of_moves_loses_no_row(module, device: str) -> None:
    """Sources are read before targets are written, whatever the order: nodes 1 and 2 change places."""
    _check(module, _pool(8, torch.float32, device), [[2, 1, 3]], [3], device)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_path_of_any_tree_moves_as_on_the_host(data) -> None:
    """Random ascending paths of trees of ten nodes, any place in a block, three sequences padded to four."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    paths, contexts = [], []
    for _ in range(3):
        path = data.draw(st.sets(st.integers(1, 9), max_size=6))
        paths.append(sorted(path))
        contexts.append(data.draw(st.integers(0, 6)))
    _check(kv_moves, _pool(5, torch.float32, device), [*paths, []], [*contexts, 0], device)


def test_nothing_accepted_is_no_launch(device: str) -> None:
    cache = _pool(8, torch.float32, device)
    before = _bits(cache.data)
    nodes, context_len, tables = _batch(device, [[], []], [3, 0])
    kv_moves.commit_path(cache.data, nodes, context_len, tables, block_size=BLOCK_SIZE)
    kv_moves.commit_path(cache.data, nodes[:, :0], context_len, tables, block_size=BLOCK_SIZE)
    assert torch.equal(_bits(cache.data), before)


def test_machine_code_waits_between_the_last_read_and_the_first_write() -> None:
    """The interpreter cannot show a race between threads: the order is read off the code."""
    script = (
        "from specdec.kernels.compiled import compiled_stages\n"
        "from specdec.kernels.kv_moves import compile_cases\n"
        "for case in compile_cases():\n"
        "    for line in compiled_stages(case, 90).asm['ptx'].splitlines():\n"
        "        for what in ('ld.global', 'bar.sync', 'st.global'):\n"
        "            if what in line: print(what)\n"
        "    print('end')\n"
    )
    kernels = run_uninterpreted(["-c", script]).split("end")[:-1]
    assert kernels
    for told in kernels:
        order = [word for word in told.split() if word in ("ld.global", "bar.sync", "st.global")]
        last_read = len(order) - 1 - order[::-1].index("ld.global")
        first_write = order.index("st.global")
        assert "bar.sync" in order[last_read:first_write], order
