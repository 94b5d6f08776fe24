"""What Triton kernels do to one tile of logits: sort keys, kept weights, the lowest id of the largest value.

Owns the device twin of `reference_sampling_rows`' definitions, for the kernels of sampling, verification and
growth to call. Has no kernel of its own.

Letters: V vocabulary, TILE ids of one program, S tiles of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

# ids of one program: eight for each of 256 threads, so that a row of 152k ids fills 75 programs
TILE = 2048
WARPS = 8
MIN_KEY = tl.constexpr(-(2**31))
NO_ID = tl.constexpr(2**31 - 1)


def tile_of(vocab: int) -> int:
    """Ids of one program for a vocabulary; small ones, as in tests, take two tiles too."""
    return min(TILE, max(16, triton.next_power_of_2(vocab) // 2))


@triton.jit
def sort_key(logits):
    """Integers ordered as float32 logits are, zeros of both signs alike."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """The float32 logit of a sort key."""
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logit_ptr, row, stride, ids, V):
    """One tile of a row as float32; -inf beyond the vocabulary."""
    return tl.load(logit_ptr + row * stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)


@triton.jit
def weight_of(logits, peak, temperature):
    """exp((logit - peak) / temperature) in float64."""
    return tl.exp((logits.to(tl.float64) - peak) / temperature)


@triton.jit
def load_law(number_ptr, place_ptr, row):
    """One row of `RowLaws`, in order; the last entry says whether the row is bad."""
    numbers = number_ptr + row * 4
    places = place_ptr + row * 4
    return (
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 2),
        tl.load(numbers + 3),
        tl.load(places),
        tl.load(places + 1),
        tl.load(places + 2),
        tl.load(places + 3),
    )


@triton.jit
def kept_weights(logits, ids, law):
    """Kept weights of one tile, float64: p times the mass."""
    peak, temperature, min_p, _, border_key, border_id, sure, _ = law
    key = sort_key(logits)
    kept = (key > border_key) | ((key == border_key) & (ids <= border_id))
    weights = weight_of(logits, peak, temperature)
    weights = tl.where(kept & (weights >= min_p), weights, 0.0)
    return tl.where(sure >= 0, (ids == sure).to(tl.float64), weights)


@triton.jit
def first_best(values, ids):
    """Largest value of a tile and the lowest id that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, NO_ID), 0)
