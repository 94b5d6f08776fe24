"""The Triton code of `tree_attention`: one pass over the keys of a tile of queries, and the split reduction.

Owns the two kernels and nothing of their launch. A program holds BLOCK_M rows, a row being one query head of
one query; all of them read the keys of one KV head of one sequence. It first runs over the key tiles that all
its rows see in full, without any test, and then over the tiles where a mask, a window or an end cuts in.

Letters: T rows of the batch, S splits, B sequences, G query heads per KV head, D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.tree_attention_visibility import key_positions, seen_bits, spread

# how keys and values are stored: in the query's dtype, or as codes (fp8 as bytes where a card has no fp8)
PLAIN, INT8, FP8, FP8_BYTES = (tl.constexpr(kind) for kind in range(4))


@triton.jit
def _load_rows(base, slots, stride, needed, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows `slots` of one head [BLOCK_N, BLOCK_D]; what lies past D or is not needed is 0, and not read."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base + slots[:, None] * stride + dims[None, :]
    if MASKED:
        return tl.load(pointers, mask=needed[:, None] & (dims < D)[None, :], other=0)
    if D != BLOCK_D:
        return tl.load(pointers, mask=(dims < D)[None, :], other=0)
    return tl.load(pointers)


@triton.jit
def _decoded(codes, KIND: tl.constexpr, dtype: tl.constexpr):
    """Codes in the query's dtype, exact; FP8_BYTES come out 256 times too small, which the scale undoes."""
    if KIND == FP8_BYTES:
        # e4m3's exponent and mantissa moved into a float16, whose exponent bias is 8 larger
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True).to(dtype)
    if KIND == FP8:
        return codes.to(tl.float16).to(dtype)
    return codes.to(dtype)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_seqs",
        "table_width",
        "num_words",
        "new_positions_stride",
        "num_splits",
        "split_tiles",
        "window",
    ]
)
def attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    output_ptr,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    query_start_ptr,
    context_ptr,
    new_len_ptr,
    chain_ptr,
    table_ptr,
    words_ptr,
    positions_ptr,
    new_positions_ptr,
    num_rows,
    num_seqs,
    table_width,
    num_words,
    new_positions_stride,
    num_splits,
    split_tiles,
    window,
    log2_scale,
    query_row_stride,
    query_head_stride,
    key_head_stride,
    key_slot_stride,
    value_head_stride,
    value_slot_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_NEW_LEN: tl.constexpr,
    HAS_CHAIN: tl.constexpr,
    HAS_NEW_POSITIONS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_WORD: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of queries, one KV head, one split; grid (T // queries + B + 1, kv_heads, S).

    Writes the output [T, HEADS * D], or with SPLIT the unnormalised share part [S, T, HEADS, D] with its
    running maximum and sum [S, T, HEADS].
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    # the last tiles of a long prompt have most to do, so they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # sequence b owns the tiles from start // QUERIES + b, at least as many as it fills; the rows past the
    # last sequence act as one more, which has no keys and therefore writes zeros
    seqs = tl.arange(0, BLOCK_SEQS)
    starts = tl.load(query_start_ptr + seqs, mask=seqs <= num_seqs, other=0)
    begun = (seqs <= num_seqs) & (starts // QUERIES + seqs <= tile)
    seq = tl.sum(begun.to(tl.int32), 0) - 1
    is_real = seq < num_seqs
    start = tl.load(query_start_ptr + seq)
    end = tl.load(query_start_ptr + seq + 1, mask=is_real, other=num_rows)
    first_row = start + (tile - start // QUERIES - seq) * QUERIES
    if first_row >= end:
        return

    rows_m = tl.arange(0, BLOCK_M)
    row = first_row + rows_m // GROUP
    head = kv_head * GROUP + rows_m % GROUP
    valid = (row < end) & (rows_m < QUERIES * GROUP)
    dims = tl.arange(0, BLOCK_D)
    in_row = valid[:, None] & (dims < HEAD_DIM)[None, :]

    context = tl.load(context_ptr + seq, mask=is_real, other=0)
    num_new = tl.where(is_real, end - start, 0)
    # index of the first query among the new rows: the queries are the last of them
    skipped = 0
    if HAS_NEW_LEN:
        num_new = tl.load(new_len_ptr + seq, mask=is_real, other=0)
        skipped = tl.where(is_real, num_new - (end - start), 0)
    own = skipped + row - start
    first_own = skipped + first_row - start
    is_chain = seq < 0
    if HAS_CHAIN:
        is_chain = tl.load(chain_ptr + seq, mask=is_real, other=0) != 0
    last_own = tl.minimum(first_own + QUERIES, num_new)
    # keys from `low` to `high` are seen by some row, keys below `full` by all
    high = context + tl.where(is_chain, last_own, num_new)
    full = context + tl.where(is_chain, first_own + 1, 0)
    low = 0
    position = row
    if WINDOWED:
        position = tl.load(positions_ptr + row, mask=valid, other=0)
        lowest = tl.min(tl.where(valid, position, 2147483647), 0)
        low = tl.minimum(tl.maximum(lowest - window + 1, 0), context)
        full = 0
    first_tile = low // BLOCK_N
    end_tile = tl.cdiv(high, BLOCK_N)
    if SPLIT:
        if split_tiles > 0:
            end_tile = tl.minimum(end_tile, (split + 1) * split_tiles)
            first_tile = tl.maximum(first_tile, split * split_tiles)
        else:
            share = tl.cdiv(end_tile - first_tile, num_splits)
            end_tile = tl.minimum(end_tile, first_tile + (split + 1) * share)
            first_tile += split * share
    # the padding rows of a pass must not walk anything
    end_tile = tl.where(is_real, end_tile, 0)
    full_tile = tl.minimum(end_tile, full // BLOCK_N)

    query = tl.load(
        query_ptr
        + row.to(tl.int64)[:, None] * query_row_stride
        + head.to(tl.int64)[:, None] * query_head_stride
        + dims[None, :],
        mask=in_row,
        other=0.0,
    )
    key_base = key_ptr + kv_head.to(tl.int64) * key_head_stride
    value_base = value_ptr + kv_head.to(tl.int64) * value_head_stride
    key_scale_base = key_scale_ptr
    value_scale_base = value_scale_ptr
    if KIND != PLAIN:
        key_scale_base += kv_head.to(tl.int64) * scale_head_stride
        value_scale_base += kv_head.to(tl.int64) * scale_head_stride
    table = table_ptr + seq.to(tl.int64) * table_width

    first_words = tl.zeros([BLOCK_M], tl.uint64)
    if ONE_WORD:
        first_words = tl.load(words_ptr + row, mask=valid, other=0).to(tl.uint64, bitcast=True)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    lanes = tl.arange(0, BLOCK_N)
    for MASKED in tl.static_range(1 if ONE_LOOP else 0, 2):
        if ONE_LOOP:
            loop_start, loop_end = first_tile, end_tile
        elif MASKED:
            loop_start, loop_end = tl.maximum(first_tile, full_tile), end_tile
        else:
            loop_start, loop_end = first_tile, full_tile
        keys = loop_start * BLOCK_N + lanes
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=(keys >= low) & (keys < high), other=0)
        # the tail of a long walk is a tile or two, not worth a pipeline of its own
        for index in tl.range(loop_start, loop_end, num_stages=1 if MASKED and not ONE_LOOP else STAGES):
            keys = index * BLOCK_N + lanes
            # rows outside are neither looked up in the block table nor read from the pool
            needed = (keys >= low) & (keys < high)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            # looked up one tile ahead, so that no row waits for its address
            keys_ahead = keys + BLOCK_N
            blocks = tl.load(table + keys_ahead // BLOCK_SIZE, mask=keys_ahead < high, other=0)
            key = _load_rows(key_base, slots, key_slot_stride, needed, HEAD_DIM, BLOCK_D, MASKED)
            if KIND != PLAIN:
                key = _decoded(key, KIND, query.dtype)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee")
            if KIND != PLAIN:
                key_scale = tl.load(key_scale_base + slots, mask=needed, other=0.0)
                scores *= (key_scale * 256.0 if KIND == FP8_BYTES else key_scale)[None, :]
            if MASKED:
                bits = seen_bits(
                    index * BLOCK_N,
                    first_words,
                    row,
                    valid,
                    own,
                    end,
                    context,
                    high,
                    is_chain,
                    words_ptr,
                    num_words,
                    HAS_CHAIN,
                    ONE_WORD,
                )
                seen = spread(bits, BLOCK_N)
                if WINDOWED:
                    key_position = key_positions(
                        keys,
                        needed,
                        start,
                        seq,
                        context,
                        positions_ptr,
                        new_positions_ptr,
                        new_positions_stride,
                        HAS_NEW_POSITIONS,
                    )
                    seen = seen & (position[:, None] - key_position[None, :] < window)
                scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * log2_scale)
            # a row that has seen nothing yet keeps -inf, from which nothing may be subtracted
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores * log2_scale - base[:, None])
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(weights, 1)
            mixed = mixed * fade[:, None]
            value = _load_rows(value_base, slots, value_slot_stride, needed, HEAD_DIM, BLOCK_D, MASKED)
            if KIND != PLAIN:
                value = _decoded(value, KIND, query.dtype)
                value_scale = tl.load(value_scale_base + slots, mask=needed, other=0.0)
                # float16 weights would fade to zero under small scales: the largest is multiplied later
                largest = tl.max(value_scale, 0)
                weights *= (value_scale / tl.where(largest > 0, largest, 1.0))[None, :]
                unit = largest * 256.0 if KIND == FP8_BYTES else largest
                mixed += tl.dot(weights.to(value.dtype), value, input_precision="ieee") * unit
            else:
                mixed = tl.dot(weights.to(value.dtype), value, mixed, input_precision="ieee")
            top = new_top

    place = row.to(tl.int64) * HEADS + head
    if SPLIT:
        place += split.to(tl.int64) * num_rows * HEADS
        tl.store(part_max_ptr + place, top, mask=valid)
        tl.store(part_sum_ptr + place, total, mask=valid)
        if first_tile < end_tile:
            tl.store(part_ptr + place[:, None] * HEAD_DIM + dims[None, :], mixed, mask=in_row)
    else:
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            output_ptr + place[:, None] * HEAD_DIM + dims[None, :],
            mixed.to(output_ptr.dtype.element_ty),
            mask=in_row,
        )


@triton.jit(do_not_specialize=["num_places", "num_splits"])
def combine_kernel(
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    output_ptr,
    num_places,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
):
    """Add the shares of BLOCK_PLACES pairs of row and head in the order of the splits.

    A split without a visible key counts nothing, so empty splits at the end do not change a bit.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES)
    inside = places < num_places
    top = tl.full([BLOCK_PLACES], float("-inf"), tl.float32)
    share = places
    for _ in range(num_splits):
        top = tl.maximum(top, tl.load(part_max_ptr + share, mask=inside, other=float("-inf")))
        share += num_places
    base = tl.where(top == float("-inf"), 0.0, top)
    dims = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_PLACES], tl.float32)
    mixed = tl.zeros([BLOCK_PLACES, BLOCK_D], tl.float32)
    share = places
    for _ in range(num_splits):
        part_sum = tl.load(part_sum_ptr + share, mask=inside, other=0.0)
        weight = tl.exp2(tl.load(part_max_ptr + share, mask=inside, other=0.0) - base)
        # a split that saw nothing has written no share
        filled = (part_sum > 0)[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(part_ptr + share[:, None] * HEAD_DIM + dims[None, :], mask=filled, other=0.0)
        total += weight * part_sum
        mixed += weight[:, None] * part
        share += num_places
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        output_ptr + places[:, None] * HEAD_DIM + dims[None, :],
        mixed.to(output_ptr.dtype.element_ty),
        mask=inside[:, None] & (dims < HEAD_DIM)[None, :],
    )
