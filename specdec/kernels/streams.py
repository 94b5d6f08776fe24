"""The counter-based random numbers of `specdec.random_streams` in Triton, for kernels to draw in place.

Owns Philox4x64-10 on a device and the two ways numbers are read from it; signatures and meaning of the public
functions are those of `reference_streams`. Uniform numbers are numpy's bit for bit; race noise is so up to
the last bits of the logarithm. The high half of a product is one `umulhi`, which the interpreter has too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels import reference_streams as plain
from specdec.kernels.compiled import CompileCase
from specdec.random_streams import Purpose

_MULTIPLIER_A = tl.constexpr(plain.MULTIPLIERS[0])
_MULTIPLIER_C = tl.constexpr(plain.MULTIPLIERS[1])
_KEY_STEP_A = tl.constexpr(plain.KEY_STEPS[0])
_KEY_STEP_B = tl.constexpr(plain.KEY_STEPS[1])
_ROUNDS = tl.constexpr(plain.ROUNDS)
_TO_UNIT = tl.constexpr(plain.TO_UNIT)
_TO_UNIT_OF_RACES = tl.constexpr(plain.TO_UNIT_OF_RACES)
RACE = tl.constexpr(int(Purpose.RACE))
# numbers of one program: two blocks of four for each of 128 threads
TILE = 1024


@triton.jit
def _philox(block, node, purpose, position, seed):
    """Four words of every counter value; all arguments uint64, `block` a tile."""
    a, b, c, d = (
        block,
        node + tl.zeros_like(block),
        purpose + tl.zeros_like(block),
        position + tl.zeros_like(block),
    )
    first = seed
    second = seed * 0
    multiplier_a = tl.zeros_like(block) + tl.full([], _MULTIPLIER_A, tl.uint64)
    multiplier_c = tl.zeros_like(block) + tl.full([], _MULTIPLIER_C, tl.uint64)
    for _ in tl.static_range(_ROUNDS):
        high_a = tl.umulhi(a, multiplier_a)
        high_c = tl.umulhi(c, multiplier_c)
        low_a = a * multiplier_a
        low_c = c * multiplier_c
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first = first + tl.full([], _KEY_STEP_A, tl.uint64)
        second = second + tl.full([], _KEY_STEP_B, tl.uint64)
    return a, b, c, d


@triton.jit
def words_of_run(first_block, node, purpose, position, seed, BLOCKS: tl.constexpr):
    """Words of BLOCKS counter blocks in order, uint64 [4 * BLOCKS]; number i of a place: block 1 + i // 4."""
    blocks = (first_block + 1 + tl.arange(0, BLOCKS)).to(tl.uint64)
    a, b, c, d = _philox(blocks, node.to(tl.uint64), purpose.to(tl.uint64), position.to(tl.uint64), seed)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * BLOCKS])


@triton.jit
def words_at(index, node, purpose, position, seed):
    """Word `index` (a tile) of each place; computes four to use one."""
    blocks = (index // 4 + 1).to(tl.uint64)
    a, b, c, d = _philox(blocks, node.to(tl.uint64), purpose.to(tl.uint64), position.to(tl.uint64), seed)
    lane = index % 4
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))


@triton.jit
def as_uniform(words):
    """53 bits as a float64 in [0, 1)."""
    return (words >> 11).to(tl.float64) * _TO_UNIT


@triton.jit
def as_exponential(words):
    """52 bits as a standard exponential number, positive and finite."""
    return -tl.log(((words >> 12).to(tl.float64) + 0.5) * _TO_UNIT_OF_RACES)


@triton.jit
def as_seed(bits):
    """An int64 seed's bits as the unsigned key."""
    return bits.to(tl.uint64, bitcast=True)


@triton.jit
def _numbers_kernel(
    seed_ptr,
    position_ptr,
    node_ptr,
    out_ptr,
    count,
    purpose,
    EXPONENTIAL: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE
    index = start + tl.arange(0, TILE)
    seed = as_seed(tl.load(seed_ptr + row))
    position = tl.load(position_ptr + row).to(tl.int64)
    if EXPONENTIAL:
        node = position * 0
    else:
        node = tl.load(node_ptr + row).to(tl.int64)
    words = words_of_run(start // 4, node, purpose, position, seed, TILE // 4)
    numbers = as_exponential(words) if EXPONENTIAL else as_uniform(words)
    tl.store(out_ptr + row * count + index, numbers, mask=index < count)


def uniforms(seeds: Tensor, positions: Tensor, nodes: Tensor, *, purpose: int, count: int) -> Tensor:
    """See `reference_streams.uniforms`."""
    out = torch.empty((seeds.shape[0], count), dtype=torch.float64, device=seeds.device)
    tile = min(TILE, max(4, triton.next_power_of_2(count)))
    if out.numel():
        grid = (seeds.shape[0], triton.cdiv(count, tile))
        _numbers_kernel[grid](seeds, positions, nodes, out, count, int(purpose), EXPONENTIAL=False, TILE=tile)
    return out


def exponentials(seeds: Tensor, positions: Tensor, *, count: int) -> Tensor:
    """See `reference_streams.exponentials`."""
    out = torch.empty((seeds.shape[0], count), dtype=torch.float64, device=seeds.device)
    tile = min(TILE, max(4, triton.next_power_of_2(count)))
    if out.numel():
        grid = (seeds.shape[0], triton.cdiv(count, tile))
        _numbers_kernel[grid](
            seeds, positions, None, out, count, int(Purpose.RACE), EXPONENTIAL=True, TILE=tile
        )
    return out


def compile_cases() -> list[CompileCase]:
    """Uniform numbers of a step and the noise of a vocabulary."""
    signature = {
        "seed_ptr": "*i64",
        "position_ptr": "*i32",
        "node_ptr": "*i32",
        "out_ptr": "*fp64",
        "count": "i32",
        "purpose": "i32",
    }
    noise = {key: value for key, value in signature.items() if key != "node_ptr"}
    return [
        CompileCase(
            name="streams/uniforms",
            kernel=_numbers_kernel,
            signature=signature,
            constants={"EXPONENTIAL": False, "TILE": 64},
        ),
        CompileCase(
            name="streams/exponentials",
            kernel=_numbers_kernel,
            signature=noise,
            constants={"node_ptr": None, "EXPONENTIAL": True, "TILE": TILE},
        ),
    ]
