"""The counter-based random numbers of `specdec.random_streams` in torch, for many streams at once.

Owns Philox4x64-10 on int64 tensors: torch has no unsigned 64-bit multiplication, so words are kept as the
int64 with the same bits and the high half of a product is put together from 32-bit halves. Uniform numbers
are those of `RandomStream` bit for bit; race noise is so up to the last bit of the logarithm. Nothing is read
on the host. Generator: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.tree_records import seed_bits
from specdec.random_streams import Purpose

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
# numbers of one counter value
LANES = 4
TO_UNIT = 2.0**-53
TO_UNIT_OF_RACES = 2.0**-52
_LOW = 0xFFFFFFFF


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low half of the unsigned product of 64-bit words with a constant."""
    factor_low, factor_high = factor & _LOW, factor >> 32
    low, high = words & _LOW, (words >> 32) & _LOW
    low_low, low_high = low * factor_low, high * factor_low
    high_low, high_high = low * factor_high, high * factor_high
    middle = ((low_low >> 32) & _LOW) + (low_high & _LOW) + (high_low & _LOW)
    upper = high_high + ((low_high >> 32) & _LOW) + ((high_low >> 32) & _LOW) + (middle >> 32)
    return upper, words * seed_bits(factor)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor) -> Tensor:
    """Four random words of every counter value.

    Args:
        counter: block, node, purpose and position, int64 tensors that broadcast together.
        key: seeds, int64.

    Returns:
        int64 `[..., 4]`.
    """
    a, b, c, d = counter
    first, second = key, torch.zeros_like(key)
    for _ in range(ROUNDS):
        high_a, low_a = _multiply(a, MULTIPLIERS[0])
        high_c, low_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = first + seed_bits(KEY_STEPS[0]), second + seed_bits(KEY_STEPS[1])
    return torch.stack(torch.broadcast_tensors(a, b, c, d), dim=-1)


def _words(seeds: Tensor, positions: Tensor, purpose: int, nodes: Tensor, count: int) -> Tensor:
    """The first `count` words of each place, int64 `[rows, count]`."""
    # numpy steps its counter before it makes a block
    blocks = 1 + torch.arange((count + LANES - 1) // LANES, device=seeds.device)
    counter = (
        blocks,
        nodes.long().unsqueeze(1),
        torch.full_like(blocks, purpose),
        positions.long().unsqueeze(1),
    )
    words = philox(counter, seeds.unsqueeze(1))
    return words.flatten(1)[:, :count]


def uniforms(seeds: Tensor, positions: Tensor, nodes: Tensor, *, purpose: int, count: int) -> Tensor:
    """Numbers in [0, 1) as `RandomStream.uniform` draws them.

    Args:
        seeds: int64 `[rows]`, see `tree_records.seed_bits`.
        positions: integers `[rows]`, absolute position of the token the numbers follow.
        nodes: integers `[rows]`, the tree node they belong to.
        purpose: a `Purpose`.
        count: numbers of each row; the first ones do not depend on it.

    Returns:
        float64 `[rows, count]`.
    """
    words = _words(seeds, positions, purpose, nodes, count)
    return ((words >> 11) & ((1 << 53) - 1)).double() * TO_UNIT


def exponentials(seeds: Tensor, positions: Tensor, *, count: int) -> Tensor:
    """Noise of the races at each position as `RandomStream.exponentials` makes it, float64 `[rows, count]`.

    Args:
        seeds: int64 `[rows]`.
        positions: integers `[rows]`, absolute position of the token the winner follows.
        count: ids; the first numbers do not depend on it.
    """
    words = _words(seeds, positions, int(Purpose.RACE), torch.zeros_like(positions), count)
    return -((((words >> 12) & ((1 << 52) - 1)).double() + 0.5) * TO_UNIT_OF_RACES).log()
