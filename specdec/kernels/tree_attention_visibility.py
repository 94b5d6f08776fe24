"""Which keys a row of `tree_attention` sees, as one word of bits per row and key tile.

Owns the Triton functions that turn a `DeviceBatch`'s masks into visibility; a tile has at most 64 keys, so
one word holds it. Knows nothing of scores or values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.device_batch import WORD_BITS

_WORD_BITS = tl.constexpr(WORD_BITS)


@triton.jit
def _low_bits(count):
    """Word with the lowest `count` bits set, 0 below 0 and all above 64."""
    count = tl.minimum(tl.maximum(count, 0), 64).to(tl.uint64)
    # a shift by the whole word is undefined, two by half of it are not
    half = count // 2
    return ((count * 0 + 1) << half << (count - half)) - 1


@triton.jit
def seen_bits(
    first_key,
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
    HAS_CHAIN: tl.constexpr,
    ONE_WORD: tl.constexpr,
):
    """Per row a word, bit n: the row sees key first_key + n of its sequence, windows apart."""
    new = tl.maximum(first_key - context, 0)
    lead = tl.minimum(tl.maximum(context - first_key, 0), 64).to(tl.uint64)
    word, shift = new // _WORD_BITS, (new % _WORD_BITS).to(tl.uint64)
    if ONE_WORD:
        lower = tl.where(word == 0, first_words, 0)
        upper = lower * 0
    else:
        words = words_ptr + row.to(tl.int64) * num_words + word
        # rows whose word exists; a chain has none (the interpreter cannot mask by a scalar condition)
        low_end = tl.where(is_chain | (word >= num_words), 0, end)
        high_end = tl.where(is_chain | (word + 1 >= num_words), 0, end)
        lower = tl.load(words, mask=valid & (row < low_end), other=0).to(tl.uint64, bitcast=True)
        upper = tl.load(words + 1, mask=valid & (row < high_end), other=0).to(tl.uint64, bitcast=True)
    # no shift reaches 64: that would be undefined
    bits = (lower >> shift) | (upper << 1 << (63 - shift))
    bits = (bits << (lead // 2) << (lead - lead // 2)) | _low_bits(context - first_key)
    if HAS_CHAIN:
        bits = tl.where(is_chain, _low_bits(own + context - first_key + 1), bits)
    return bits & _low_bits(high - first_key)


@triton.jit
def spread(bits, BLOCK_N: tl.constexpr):
    """Bits of each row's word as a mask [BLOCK_M, BLOCK_N]."""
    lanes = tl.arange(0, BLOCK_N)
    half = bits.to(tl.uint32)[:, None]
    if BLOCK_N > 32:
        half = tl.where((lanes < 32)[None, :], half, (bits >> 32).to(tl.uint32)[:, None])
    return ((half >> (lanes % 32).to(tl.uint32)[None, :]) & 1) != 0


@triton.jit
def key_positions(
    keys,
    needed,
    start,
    seq,
    context,
    positions_ptr,
    new_positions_ptr,
    new_positions_stride,
    HAS_NEW_POSITIONS: tl.constexpr,
):
    """Positions of a tile's keys: committed rows stand at their index."""
    new = keys - context
    is_new = needed & (new >= 0)
    if HAS_NEW_POSITIONS:
        places = new_positions_ptr + seq.to(tl.int64) * new_positions_stride + new
    else:
        places = positions_ptr + start + new
    return tl.where(new < 0, keys, tl.load(places, mask=is_new, other=0))
