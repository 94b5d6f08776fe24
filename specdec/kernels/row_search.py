"""The search for the border of top-k and top-p in one row of logits, for Triton kernels to call.

Owns the search: an interval of sort keys is cut in parts until one id or one key is left in it. Each round
reads the row once, without the tiles whose peak lies below the interval, so the first rounds are the dear
ones. Equal logits at the border are told apart by id, the lowest first. The result does not depend on tile
sizes except through the last bits of sums. Has no kernel of its own.

Letters: V vocabulary, S tiles of a row (TILE ids each, peaks at `peak_ptr`), STEP ids read at a time, WAYS
    parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.row_weights import load_logits, logit_of, sort_key, weight_of


@triton.jit
def find_border(
    logit_ptr,
    peak_ptr,
    row,
    stride,
    V,
    S,
    wanted,
    peak,
    temperature,
    outer_key,
    outer_id,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Border of the smallest set of largest logits whose count or mass reaches `wanted`.

    Only ids inside an outer border count. Returns key and id of the last one kept; the outer border when all
    of them do not reach it.
    """
    # [low, high): above high is less than wanted, above low is enough
    low = outer_key.to(tl.int64)
    high = sort_key(peak).to(tl.int64) + 1
    above = wanted * 0
    room_id = outer_id
    searching = 1
    found = 0
    while searching > 0:
        part = tl.arange(0, WAYS).to(tl.int64)
        cuts = low + (high - low) * part // WAYS
        counts = tl.zeros([STEP, WAYS], tl.int32)
        masses = tl.zeros([STEP, WAYS], tl.float64)
        for start in range(0, V, STEP):
            if sort_key(tl.load(peak_ptr + row * S + start // TILE)).to(tl.int64) >= low:
                ids = start + tl.arange(0, STEP)
                logits = load_logits(logit_ptr, row, stride, ids, V)
                key = sort_key(logits)
                inside = (key > outer_key) | ((key == outer_key) & (ids <= outer_id))
                # what lies beyond the interval is in `above` already
                inside = inside & (key < high) & (ids < V)
                passes = inside[:, None] & (key.to(tl.int64)[:, None] >= cuts[None, :])
                counts += passes.to(tl.int32)
                if BY_MASS:
                    masses += tl.where(
                        passes, weight_of(logits, peak.to(tl.float64), temperature)[:, None], 0.0
                    )
        count = tl.sum(counts, 0)
        reached = above + (tl.sum(masses, 0) if BY_MASS else count.to(tl.float64))
        chosen = tl.max(tl.where(reached >= wanted, tl.arange(0, WAYS), -1), 0)
        if chosen < 0:
            # even all of them are not enough
            searching = 0
        else:
            is_next = tl.arange(0, WAYS) == chosen + 1
            is_last = chosen == WAYS - 1
            at_low = tl.sum(tl.where(tl.arange(0, WAYS) == chosen, count, 0), 0)
            at_high = tl.where(is_last, 0, tl.sum(tl.where(is_next, count, 0), 0))
            above = tl.where(is_last, above, tl.sum(tl.where(is_next, reached, 0.0), 0))
            high = tl.where(is_last, high, tl.sum(tl.where(is_next, cuts, 0), 0))
            low = tl.sum(tl.where(tl.arange(0, WAYS) == chosen, cuts, 0), 0)
            undecided = at_low - at_high
            if undecided == 1:
                room_id = room_id * 0 + V
                found = 1
                searching = 0
            elif high - low == 1:
                # equal logits: as many as are still wanted, the lowest ids
                each = (
                    weight_of(logit_of(low.to(tl.int32)), peak.to(tl.float64), temperature)
                    if BY_MASS
                    else 1.0
                )
                missing = tl.ceil((wanted - above) / each)
                room = tl.minimum(tl.maximum(missing, 1.0), undecided.to(tl.float64)).to(tl.int32)
                room_id = _nth_equal(
                    logit_ptr, peak_ptr, row, stride, V, S, low.to(tl.int32), room, TILE, STEP
                )
                found = 1
                searching = 0
    key = tl.where(found > 0, low, outer_key.to(tl.int64)).to(tl.int32)
    return key, tl.where((found > 0) & (key == outer_key), tl.minimum(room_id, outer_id), room_id)


@triton.jit
def _nth_equal(
    logit_ptr, peak_ptr, row, stride, V, S, wanted_key, nth, TILE: tl.constexpr, STEP: tl.constexpr
):
    """The nth lowest id, from 1, among those with one key."""
    passed = nth * 0
    found = nth * 0
    for start in range(0, V, STEP):
        if (passed < nth) & (sort_key(tl.load(peak_ptr + row * S + start // TILE)) >= wanted_key):
            ids = start + tl.arange(0, STEP)
            equal = (sort_key(load_logits(logit_ptr, row, stride, ids, V)) == wanted_key) & (ids < V)
            order = passed + tl.cumsum(equal.to(tl.int32), 0)
            found += tl.sum(tl.where(equal & (order == nth), ids, 0), 0)
            passed += tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def kept_mass(
    logit_ptr,
    peak_ptr,
    row,
    stride,
    V,
    S,
    peak,
    temperature,
    min_p,
    key_border,
    id_border,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sum of the kept weights of a row."""
    total = tl.zeros([STEP], tl.float64)
    for start in range(0, V, STEP):
        if sort_key(tl.load(peak_ptr + row * S + start // TILE)) >= key_border:
            ids = start + tl.arange(0, STEP)
            logits = load_logits(logit_ptr, row, stride, ids, V)
            key = sort_key(logits)
            weights = weight_of(logits, peak.to(tl.float64), temperature)
            kept = (key > key_border) | ((key == key_border) & (ids <= id_border))
            total += tl.where(kept & (weights >= min_p), weights, 0.0)
    return tl.sum(total, 0)
