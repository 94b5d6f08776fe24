"""Tile sizes and numbers of splits of `tree_attention`: what is compiled and how many programs run.

Owns the figures found by compiling for both cards, and what they depend on: shapes, dtypes, the card. Knows
nothing of the kernel beyond them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

MAX_TILE_ROWS = 128
# tensor cores multiply 16 rows at least
MIN_TILE_ROWS = 16
# tile height of batch-invariant calls: the smallest that Hopper's widest matrix instruction fills
FIXED_TILE_ROWS = 64
# a share is written and read once in fp32, a key and its value read once: with 8 keys a row the shares add
# at most a quarter to the traffic
KEYS_PER_TILE_ROW = 8
MAX_SPLITS = 64
# pairs of row and head a program of the reduction adds: two a warp, two 16-byte loads a lane and split
COMBINE_PLACES = 8


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Shape of one program: `rows` x `keys` scores, `warps` warps, `stages` key tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def padded_dim(dim: int) -> int:
    """Width of a row in registers: a power of two, and as deep as a matrix instruction."""
    return max(16, 1 << (dim - 1).bit_length())


def tiling(rows: int, dim: int, item_bytes: int, *, coded: bool = False, hopper: bool = False) -> Tiling:
    """Tile sizes that neither spill registers nor take more shared memory than an A100 has.

    Found by compiling for both cards (`tree_attention_cases`), wide tiles first; times on a card may move
    them.

    Args:
        rows: wished tile height, a power of two from 16 to 128.
        dim: head_dim.
        item_bytes: size of an element of the query.
        coded: whether keys and values are codes, which pass through registers to become numbers.
        hopper: whether the card multiplies straight from shared memory, which leaves more registers.
    """
    width = padded_dim(dim)
    if item_bytes == 4:
        # no tensor cores: both operands of a product sit in registers
        return Tiling(rows=min(rows, 32), keys=16, warps=8, stages=2)
    if coded and width > 128:
        return Tiling(rows=min(rows, 32), keys=32, warps=8, stages=3)
    if coded or width > 128:
        return Tiling(rows=min(rows, 64), keys=32, warps=4 if rows <= 32 else 8, stages=3)
    keys = 64
    if not hopper and width > 64:
        # columns past head_dim cost an Ampere card registers for their tests
        rows = rows if dim == width else min(rows, 64)
        keys = 32 if rows >= 64 else 64
    elif not hopper:
        keys = 32 if rows > 64 else 64
    # 32 KiB or more on their way per program, two programs a multiprocessor: enough for 4.8 TB/s
    stages = 3 if keys * width > 64 * 64 else 4
    return Tiling(rows=rows, keys=keys, warps=4 if rows <= 64 else 8, stages=stages)


def one_loop(tile: Tiling, *, windowed: bool, coded: bool) -> bool:
    """Whether every key tile is tested for visibility, or only those after the last that all rows see."""
    # testing every tile costs a small program nothing beside its reads, and a window needs the test anyway
    return windowed or coded or tile.rows <= 32


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a card, (0, 0) of anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_splits(programs: int, max_len: int, tile: Tiling, device: torch.device) -> int:
    """Fewest splits that keep the card within a tenth of the best use of its multiprocessors.

    What counts is how full the last wave of programs is; longer shares cost less to add up.
    """
    # registers admit two programs of up to 64 rows on a multiprocessor, one of 128 with 8 warps
    slots = _num_processors(device) * (2 if tile.rows <= 64 else 1)
    most = min(MAX_SPLITS, max(1, max_len // max(4 * tile.keys, KEYS_PER_TILE_ROW * tile.rows)))
    used = [programs * n / slots / -(-programs * n // slots) for n in range(1, most + 1)]
    return next(n for n, share in enumerate(used, start=1) if share >= 0.9 * max(used))
