"""Random numbers that are a function of (seed, position, purpose, node), not of what was drawn before.

Owns the counter layout, so that two draws never share a number and the batch, the chunking and preemption
cannot change a sampled text. Does not know what the numbers are used for. Generator: Philox4x64-10 (Salmon
et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"), numpy's implementation, whose raw stream numpy
keeps stable.

Counter words, lowest first: block of four numbers, node, purpose, position; key: the seed. `position` is
the absolute position of a committed token: the step's root, or (coupled draws) the token a draw follows.
Steps have different roots, so even a rule that looks at later tokens before it accepts an earlier one never
meets a number twice.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np

# 53 random bits: every double of that grid in [0, 1), 1 itself never
_TO_UNIT = 2.0**-53
_DROPPED_BITS = np.uint64(11)
_FULL_BUFFER = 4


class Purpose(enum.IntEnum):
    """What a number decides. The values are part of the stream: never renumber them."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


class Coin(Protocol):
    """A number in [0, 1) that can only be compared."""

    def __lt__(self, threshold: float, /) -> bool: ...


class UniformSource(Protocol):
    """Where verification takes its numbers from."""

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> Sequence[Coin]:
        """Numbers of one place; asking again gives the same ones, and a longer answer begins alike."""
        ...


class RandomStream:
    """The random numbers of one request.

    Args:
        seed: 0 .. 2**64 - 1.
    """

    def __init__(self, seed: int) -> None:
        assert 0 <= seed < 2**64, f"seed ({seed}) must fit in 64 unsigned bits"
        self.seed = seed
        self._bits = np.random.Philox(key=seed)
        # resetting the counter of one generator costs a tenth of making one
        self._state = self._bits.state
        self._counter = self._state["state"]["counter"]

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> list[float]:
        """Draw numbers in [0, 1).

        Args:
            position: absolute position of the token they follow (the step's root, as a rule).
            purpose: what they decide.
            count: how many; the first ones do not depend on it.
            node: tree node they belong to.
        """
        self._counter[:] = (0, node, purpose, position)
        self._state["buffer_pos"] = _FULL_BUFFER
        self._bits.state = self._state
        return ((self._bits.random_raw(count) >> _DROPPED_BITS) * _TO_UNIT).tolist()
