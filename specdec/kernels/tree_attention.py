"""Attention of ragged queries over a paged KV cache: prompt chunks, plain decoding and trees in one kernel.

Owns the launch: tile sizes, the number of splits, the choice of what is compiled. The Triton code is in
`tree_attention_kernel`, the meaning in `reference_tree_attention`, the description of the batch in
`device_batch`. Knows nothing of models or of how a tree came about.

Design. The online softmax over key tiles and the two loops (tiles that all rows see, tiles that need a test)
follow FlashAttention-2 (arXiv 2307.08691); splitting the keys of one query over several programs and reducing
their shares in a second launch follows Flash-Decoding (pytorch.org/blog/flash-decoding, 2023). On top of them:

- Query heads that share a KV head are rows of one tile, so keys are read once per group, and tensor cores
  have 16 rows to work on even in plain decoding with few queries.
- A sequence's first tile is found from its index and first row, without a table made per step: a captured
  graph serves any ragged mixture of as many rows. Every launch also covers the padding rows, as zeros.
- A key tile is BLOCK_N rows of one sequence whatever the block size; a lane finds its row through the block
  table, and the pipeliner fetches table entries two tiles ahead of the rows. Rows are read along head_dim,
  16 bytes a lane.
- Only tiles at the end of the context test visibility: two mask words per query cover a tile.
- Eight-bit keys are multiplied as codes; their scales multiply the scores, and those of values the weights.
- The reduction adds the shares of the splits in their order, without atomics: the same call gives the same bits.

Batch invariance. With `num_splits` or `split_keys` given, the tile height is fixed too, and a row's result is a
function of its own sequence alone. With `split_keys` (or one split) key tiles and splits start at
fixed rows of the sequence, so a row that sees keys 0..t gives the same bits in plain decoding and in a longer
chain: what it does not see weighs exactly 0. In a tree the keys of a path are not neighbours and their sum is
taken in another order; only the first path is bit-equal then.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.kernels import kernel_backend
from specdec.kernels.compiled import CompileCase
from specdec.kernels.device_batch import WORD_BITS, DeviceBatch
from specdec.kernels.tree_attention_kernel import (
    FP8,
    FP8_BYTES,
    INT8,
    PLAIN,
    attention_kernel,
    combine_kernel,
)

MAX_TILE_ROWS = 128
# tensor cores multiply 16 rows at least
MIN_TILE_ROWS = 16
# tile height of batch-invariant calls: the smallest that Hopper's widest matrix instruction fills
FIXED_TILE_ROWS = 64
# a share is written and read once in fp32, a key and its value read once: with 8 keys a row the shares add
# at most a quarter to the traffic
KEYS_PER_TILE_ROW = 8
MAX_SPLITS = 64
# pairs of row and head a program of the reduction adds: two a warp, two 16-byte loads in flight a lane and split
COMBINE_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Shape of one program: `rows` x `keys` scores, `warps` warps, `stages` key tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiling(rows: int, block_dim: int, item_bytes: int) -> Tiling:
    """Tile sizes that neither spill registers nor take more shared memory than an A100 has.

    Args:
        rows: tile height, a power of two from 16 to 128.
        block_dim: head_dim rounded up to a power of two.
        item_bytes: size of an element of the query.
    """
    if item_bytes == 4:
        # without tensor cores: an accumulator and two tiles in registers is all that fits
        keys = 32 if block_dim <= 128 else 16
        return Tiling(rows=min(rows, 64), keys=keys, warps=4 if rows <= 32 else 8, stages=2)
    if block_dim > 128:
        return Tiling(rows=min(rows, 64), keys=32, warps=4 if rows <= 32 else 8, stages=2)
    return Tiling(rows=rows, keys=64, warps=4 if rows <= 64 else 8, stages=3)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: DeviceBatch,
    *,
    window: int | None = None,
    num_splits: int | None = None,
    split_keys: int | None = None,
    tile_rows: int | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """Attention over block-table KV: query [T, h, d] -> [T, h * d] in the query's dtype.

    Scores are scaled by 1 / sqrt(d) and summed in fp32. A row that sees nothing gives 0, as padding rows do.
    Rows of the pool that no query of the batch needs are not read.

    Args:
        query: last dimension contiguous.
        key_cache: [kv_heads, slots, d], the query's dtype, or int8 or float8_e4m3fn codes.
        value_cache: as `key_cache`.
        batch: which rows see which keys.
        window: a query at position t sees positions t - window + 1 .. t only.
        num_splits: programs that share the keys of a query; None lets occupancy decide.
        split_keys: instead of `num_splits`, how many keys a program takes, a multiple of 64; None for off.
        tile_rows: tile height, a power of two from 16 to 128; None lets the number of queries decide.
        key_scales: fp32 [kv_heads, slots] of codes, from `kv_quant.quantise_rows`.
        value_scales: as `key_scales`.
    """
    rows, heads, dim = query.shape
    kv_heads = key_cache.shape[0]
    group = heads // kv_heads
    kind = _check(query, key_cache, value_cache, key_scales, value_scales)
    if group > MAX_TILE_ROWS:
        raise SpecdecError(
            f"query heads per KV head ({group}) must be at most {MAX_TILE_ROWS} in the Triton attention; "
            "set kernels to 'reference'"
        )
    fixed = num_splits is not None or split_keys is not None
    wanted = tile_rows or (FIXED_TILE_ROWS if fixed else (batch.max_queries or rows) * group)
    tile_height = max(MIN_TILE_ROWS, triton.next_power_of_2(group), triton.next_power_of_2(wanted))
    block_dim = max(16, triton.next_power_of_2(dim))
    tile = tiling(min(tile_height, MAX_TILE_ROWS), block_dim, query.element_size())
    assert tile.rows >= group, f"a tile of {tile.rows} rows does not hold the {group} heads of one query"
    queries = tile.rows // group
    split_tiles = 0
    if split_keys is not None:
        assert num_splits is None, "keys per split and number of splits exclude each other"
        assert split_keys > 0 and split_keys % WORD_BITS == 0, (
            f"split_keys ({split_keys}) is no multiple of 64"
        )
        split_tiles = split_keys // tile.keys
        splits = max(1, -(-batch.max_len // split_keys))
    elif num_splits is not None:
        splits = num_splits
    else:
        programs = max(-(-rows // queries), batch.num_sequences) * kv_heads
        splits = _choose_splits(programs, min(batch.max_len, window or batch.max_len), tile, query.device)
    output = torch.empty((rows, heads * dim), dtype=query.dtype, device=query.device)
    if rows == 0:
        return output
    part = part_max = part_sum = None
    if splits > 1:
        part = torch.empty((splits, rows, heads, dim), dtype=torch.float32, device=query.device)
        part_max = torch.empty((splits, rows, heads), dtype=torch.float32, device=query.device)
        part_sum = torch.empty_like(part_max)
    codes = torch.uint8 if kind == FP8_BYTES.value else key_cache.dtype
    new_positions = batch.new_positions if window is not None else None
    grid = (rows // queries + batch.num_sequences + 1, kv_heads, splits)
    attention_kernel[grid](
        query,
        key_cache.view(codes),
        value_cache.view(codes),
        key_scales,
        value_scales,
        output,
        part,
        part_max,
        part_sum,
        batch.query_start,
        batch.context_len,
        batch.new_len,
        None if batch.chain is None else batch.chain.view(torch.uint8),
        batch.block_tables,
        batch.mask_words,
        batch.positions,
        new_positions,
        rows,
        batch.num_sequences,
        batch.block_tables.stride(0),
        batch.mask_words.stride(0),
        0 if new_positions is None else new_positions.stride(0),
        splits,
        split_tiles,
        window or 0,
        dim**-0.5 * LOG2_E,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        0 if key_scales is None else key_scales.stride(0),
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=dim,
        BLOCK_D=block_dim,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_SEQS=triton.next_power_of_2(batch.num_sequences + 1),
        BLOCK_SIZE=batch.block_size,
        KIND=kind,
        HAS_NEW_LEN=batch.new_len is not None,
        HAS_CHAIN=batch.chain is not None,
        HAS_NEW_POSITIONS=new_positions is not None,
        WINDOWED=window is not None,
        SPLIT=splits > 1,
        ONE_LOOP=_one_loop(tile, window is not None),
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        places = rows * heads
        combine_kernel[(-(-places // COMBINE_PLACES),)](
            part,
            part_max,
            part_sum,
            output,
            places,
            splits,
            HEAD_DIM=dim,
            BLOCK_D=block_dim,
            BLOCK_PLACES=COMBINE_PLACES,
            num_warps=4,
        )
    return output


LOG2_E = 1.4426950408889634
# an A100 has 163 KiB for a program; the rest is left to the driver
MAX_SHARED_BYTES = 160 << 10


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> int:
    """How keys and values are stored, a `KIND` of the kernel."""
    if query.dtype == torch.bfloat16 and not query.is_cuda:
        kernel_backend(query.device, "triton", query.dtype)
    assert query.stride(2) == key_cache.stride(2) == value_cache.stride(2) == 1, "rows lie along head_dim"
    assert key_cache.dtype == value_cache.dtype, "keys and values are stored alike"
    if key_cache.dtype == query.dtype:
        assert key_scales is None and value_scales is None, "only codes have scales"
        return PLAIN.value
    assert key_scales is not None and value_scales is not None, "codes need their scales"
    assert key_scales.stride() == value_scales.stride(), "scales of keys and values lie alike"
    assert key_scales.stride(1) == 1, "the scales of a head lie side by side"
    if key_cache.dtype == torch.int8:
        return INT8.value
    assert key_cache.dtype == torch.float8_e4m3fn, f"a cache of {key_cache.dtype} is not known"
    return FP8.value if _has_fp8(query.device) else FP8_BYTES.value


def _one_loop(tile: Tiling, windowed: bool) -> bool:
    # testing every tile costs a small program nothing beside its reads, and a window needs the test anyway
    return windowed or tile.rows <= 32


@functools.cache
def _has_fp8(device: torch.device) -> bool:
    # Ada and Hopper convert e4m3 in one instruction
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _choose_splits(programs: int, max_len: int, tile: Tiling, device: torch.device) -> int:
    """Fewest splits that keep the card within a tenth of the best use of its multiprocessors.

    What counts is how full the last wave of programs is; longer shares cost less to add up.
    """
    # registers admit two programs of up to 64 rows on a multiprocessor, one of 128 with 8 warps
    slots = _num_processors(device) * (2 if tile.rows <= 64 else 1)
    most = min(MAX_SPLITS, max(1, max_len // max(4 * tile.keys, KEYS_PER_TILE_ROW * tile.rows)))
    used = [programs * n / slots / -(-programs * n // slots) for n in range(1, most + 1)]
    return next(n for n, share in enumerate(used, start=1) if share >= 0.9 * max(used))


def compile_cases() -> list[CompileCase]:
    """The dtypes, head widths and tile heights of models in use, for the harness in `compiled`."""
    return [
        _attention_case("decode/bf16/64", "bf16", 64, 16),
        _attention_case("decode/fp16/128", "fp16", 128, 16, split=True),
        _attention_case("tree/bf16/64", "bf16", 64, 128, new_len=True),
        _attention_case("tree/bf16/128", "bf16", 128, 128, chain=True, split=True),
        _attention_case("fixed/bf16/128", "bf16", 128, 64, chain=True, split=True),
        _attention_case("tree/fp16/80", "fp16", 80, 32, chain=True),
        _attention_case("tree/bf16/256", "bf16", 256, 64, chain=True, window=True),
        _attention_case("tree/bf16/128/window", "bf16", 128, 64, chain=True, window=True, split=True),
        _attention_case("tree/bf16/128/int8", "bf16", 128, 64, chain=True, kind=INT8.value, code="i8"),
        _attention_case("tree/fp16/128/fp8", "fp16", 128, 64, chain=True, kind=FP8_BYTES.value, code="u8"),
        _attention_case("tree/fp32/24", "fp32", 24, 16, chain=True),
        _attention_case("tree/fp32/128", "fp32", 128, 64, chain=True, split=True),
        _combine_case("combine/bf16/128", "bf16", 128),
    ]


def _attention_case(
    name: str,
    dtype: str,
    dim: int,
    height: int,
    *,
    kind: int = 0,
    code: str | None = None,
    chain: bool = False,
    new_len: bool = False,
    window: bool = False,
    split: bool = False,
) -> CompileCase:
    block_dim = max(16, triton.next_power_of_2(dim))
    tile = tiling(height, block_dim, 4 if dtype == "fp32" else 2)
    constants: dict[str, Any] = {
        "HEADS": 32,
        "GROUP": 4,
        "HEAD_DIM": dim,
        "BLOCK_D": block_dim,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_SEQS": 16,
        "BLOCK_SIZE": 16,
        "KIND": kind,
        "HAS_NEW_LEN": new_len,
        "HAS_CHAIN": chain,
        "HAS_NEW_POSITIONS": False,
        "WINDOWED": window,
        "SPLIT": split,
        "ONE_LOOP": _one_loop(tile, window),
        "STAGES": tile.stages,
    }
    stored = f"*{code or dtype}"
    pointers = {
        "query_ptr": f"*{dtype}",
        "key_ptr": stored,
        "value_ptr": stored,
        "key_scale_ptr": "*fp32" if kind else None,
        "value_scale_ptr": "*fp32" if kind else None,
        "output_ptr": f"*{dtype}",
        "part_ptr": "*fp32" if split else None,
        "part_max_ptr": "*fp32" if split else None,
        "part_sum_ptr": "*fp32" if split else None,
        "query_start_ptr": "*i32",
        "context_ptr": "*i32",
        "new_len_ptr": "*i32" if new_len else None,
        "chain_ptr": "*u8" if chain else None,
        "table_ptr": "*i32",
        "words_ptr": "*i64",
        "positions_ptr": "*i32",
        "new_positions_ptr": None,
    }
    strides = {
        arg: "i32"
        for arg in (
            "query_row_stride",
            "query_head_stride",
            "key_head_stride",
            "key_slot_stride",
            "value_head_stride",
            "value_slot_stride",
        )
    }
    sizes = (
        "num_rows",
        "num_seqs",
        "table_width",
        "num_words",
        "new_positions_stride",
        "num_splits",
        "split_tiles",
        "window",
        "scale_head_stride",
    )
    signature = {arg: kind_ for arg, kind_ in pointers.items() if kind_ is not None}
    return CompileCase(
        name=f"tree_attention/{name}/{tile.rows}",
        kernel=attention_kernel,
        signature={**signature, **strides, **dict.fromkeys(sizes, "i32"), "log2_scale": "fp32"},
        constants=constants | {arg: None for arg, kind_ in pointers.items() if kind_ is None},
        # fresh tensors start at multiples of 16, and so do rows of head_dim elements where that holds
        aligned=(*signature, *(strides if dim % 16 == 0 else ())),
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_shared_bytes=MAX_SHARED_BYTES,
    )


def _combine_case(name: str, dtype: str, dim: int) -> CompileCase:
    return CompileCase(
        name=f"tree_attention/{name}",
        kernel=combine_kernel,
        signature={
            "part_ptr": "*fp32",
            "part_max_ptr": "*fp32",
            "part_sum_ptr": "*fp32",
            "output_ptr": f"*{dtype}",
            "num_places": "i32",
            "num_splits": "i32",
        },
        constants={
            "HEAD_DIM": dim,
            "BLOCK_D": max(16, triton.next_power_of_2(dim)),
            "BLOCK_PLACES": COMBINE_PLACES,
        },
        aligned=("part_ptr", "part_max_ptr", "part_sum_ptr", "output_ptr"),
        num_warps=4,
    )
