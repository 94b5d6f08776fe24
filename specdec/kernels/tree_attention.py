"""Attention of ragged queries over a paged KV cache: prompt chunks, plain decoding and trees in one kernel.

Owns the launch: tile sizes, the number of splits, the choice of what is compiled. The Triton code is in
`tree_attention_kernel`, the meaning in `reference_tree_attention`, the description of the batch in
`device_batch`. Knows nothing of models or of how a tree came about.

Design. The online softmax over key tiles and the two loops (tiles that all rows see, tiles that need a
test) follow FlashAttention-2 (arXiv 2307.08691); splitting the keys of one query over several programs and
reducing their shares in a second launch follows Flash-Decoding (pytorch.org/blog/flash-decoding, 2023).
On top of them:

- Query heads that share a KV head are rows of one tile, so keys are read once per group, and tensor cores
  have 16 rows to work on even in plain decoding with few queries.
- A sequence's first tile is found from its index and first row, without a table made per step: a captured
  graph serves any ragged mixture of as many rows. Every launch also covers the padding rows, as zeros.
- A key tile is BLOCK_N rows of one sequence whatever the block size. A lane looks its row up in the block
  table one tile ahead, so the reads of rows depend on registers alone and stay pipelined (without that the
  compiler waits for every read in every round). Rows are read along head_dim, 16 bytes a lane.
- Visibility is one 64-bit word per row and tile: context, chain or tree, and the end become bits of it, so a
  score costs a shift and a test. Large tiles do even that only at the end of the context.
- Eight-bit keys are multiplied as codes; their scales multiply the scores, and those of values the weights.
- The reduction adds the shares of the splits in their order, without atomics: equal calls give equal bits.

Limits. A key and value of head_dim d in a half type are 4 d bytes and cost 4 d operations per row that
sees them, rows being nodes times heads per KV head: reads bound the time up to as many rows as the card makes
operations per byte (165 on an H200 by 790 TFLOP/s and the data sheet's 4.8 TB/s); 64 nodes times 4 heads
lie above.

Batch invariance. With `num_splits` or `split_keys` given, the tile height is fixed too, and a row's result
is a function of its own sequence alone. With `split_keys` (or one split) key tiles and splits start at
fixed rows of the sequence, so a row that sees keys 0..t gives the same bits in plain decoding and in a longer
chain: what it does not see weighs exactly 0. In a tree the keys of a path are not neighbours and their sum is
taken in another order; only the first path is bit-equal then.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.kernels import kernel_backend
from specdec.kernels.device_batch import WORD_BITS, DeviceBatch
from specdec.kernels.tree_attention_kernel import (
    FP8,
    FP8_BYTES,
    INT8,
    PLAIN,
    attention_kernel,
    combine_kernel,
)
from specdec.kernels.tree_attention_tiles import (
    COMBINE_PLACES,
    FIXED_TILE_ROWS,
    MAX_TILE_ROWS,
    MIN_TILE_ROWS,
    capability,
    choose_splits,
    one_loop,
    padded_dim,
    tiling,
)

# scores are kept as powers of two
LOG2_E = 1.4426950408889634


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
    fixed = num_splits is not None or split_keys is not None
    wanted = tile_rows or (FIXED_TILE_ROWS if fixed else (batch.max_queries or rows) * group)
    tile_height = max(MIN_TILE_ROWS, triton.next_power_of_2(group), triton.next_power_of_2(wanted))
    tile = tiling(
        min(tile_height, MAX_TILE_ROWS),
        dim,
        query.element_size(),
        coded=kind != PLAIN.value,
        hopper=capability(query.device) >= (9, 0),
    )
    if group > tile.rows:
        raise SpecdecError(
            f"query heads per KV head ({group}) must be at most {tile.rows} in the Triton attention with "
            f"head_dim {dim} and {query.dtype}; set kernels to 'reference'"
        )
    queries = tile.rows // group
    split_tiles = 0
    if split_keys is not None:
        assert num_splits is None, "keys per split and number of splits exclude each other"
        assert split_keys > 0, "a split has keys"
        assert split_keys % WORD_BITS == 0, f"split_keys ({split_keys}) is no multiple of 64"
        split_tiles = split_keys // tile.keys
        splits = max(1, -(-batch.max_len // split_keys))
    elif num_splits is not None:
        splits = num_splits
    else:
        programs = max(-(-rows // queries), batch.num_sequences) * kv_heads
        splits = choose_splits(programs, min(batch.max_len, window or batch.max_len), tile, query.device)
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
        BLOCK_D=padded_dim(dim),
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
        ONE_WORD=batch.mask_words.shape[1] == 1,
        ONE_LOOP=one_loop(tile, windowed=window is not None, coded=kind != PLAIN.value),
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
            BLOCK_D=padded_dim(dim),
            BLOCK_PLACES=COMBINE_PLACES,
            num_warps=4,
        )
    return output


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
        assert key_scales is None, "only codes have scales"
        assert value_scales is None, "only codes have scales"
        return PLAIN.value
    assert key_scales is not None, "codes need their scales"
    assert value_scales is not None, "codes need their scales"
    assert key_scales.stride() == value_scales.stride(), "scales of keys and values lie alike"
    assert key_scales.stride(1) == 1, "the scales of a head lie side by side"
    if key_cache.dtype == torch.int8:
        return INT8.value
    assert key_cache.dtype == torch.float8_e4m3fn, f"a cache of {key_cache.dtype} is not known"
    # Ada and Hopper convert e4m3 in one instruction
    return FP8.value if capability(query.device) >= (8, 9) else FP8_BYTES.value
