"""Random numbers that are a function of (seed, position, purpose, node), not of what was drawn before.

Owns the counter layout, so that two draws never share a number and the batch, the chunking and preemption
cannot change a sampled text. Does not know what the numbers are used for. Generator: Philox4x64-10 (Salmon
et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"), numpy's implementation, whose raw stream numpy
keeps stable.

Counter words, lowest first: block of four numbers, node, purpose, position; key: the seed. `position` is
the absolute position of a committed token: the step's root, or (races) the token a draw follows.
Steps have different roots, so even a rule that looks at later tokens before it accepts an earlier one never
meets a number twice.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

# 53 random bits: every double of that grid in [0, 1), 1 itself never
_TO_UNIT = 2.0**-53
_DROPPED_BITS = np.uint64(11)
# races use one bit less, which leaves room for a half
_DROPPED_BITS_OF_RACES = np.uint64(12)
_TO_UNIT_OF_RACES = 2.0**-52
_FULL_BUFFER = 4


class Purpose(enum.IntEnum):
    """What a number decides. The values are part of the stream: never renumber them."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    RACE = 4
    SIMULATED = 5


class Coin(Protocol):
    """A number in [0, 1) that can only be compared."""

    def __lt__(self, threshold: float, /) -> bool: ...


class UniformSource(Protocol):
    """Where verification takes its numbers from."""

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> Sequence[Coin]:
        """Numbers of one place; asking again gives the same ones, and a longer answer begins alike."""
        ...

    def race(self, position: int, rates: NDArray[np.float64], count: int = 1) -> list[int]:
        """First ids of an exponential race; asking with other rates keeps the noise of every id."""
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
        self._seek(position, purpose, node)
        return ((self._bits.random_raw(count) >> _DROPPED_BITS) * _TO_UNIT).tolist()

    def _seek(self, position: int, purpose: Purpose, node: int) -> None:
        self._counter[:] = (0, node, purpose, position)
        self._state["buffer_pos"] = _FULL_BUFFER
        self._bits.state = self._state

    def race(self, position: int, rates: NDArray[np.float64], count: int = 1) -> list[int]:
        """Let every id arrive after E[id] / rates[id], E standard exponential, and take the first ones.

        The first id has the law rates / sum(rates). E depends on seed, position and id alone, so two races
        with similar rates tend to have the same winner (arXiv 2408.07978).

        Args:
            position: absolute position of the token the winner follows.
            rates: `[vocab]`, non-negative, not necessarily normalised; an id of rate 0 never arrives.
            count: how many ids; fewer come back when fewer have a rate.

        Returns:
            Ids in order of arrival; ties go to the lowest id.
        """
        speeds = rates / self.exponentials(position, len(rates))
        if count == 1:
            winner = int(speeds.argmax())
            return [winner] if speeds[winner] > 0.0 else []
        order = np.argsort(-speeds, kind="stable")[:count]
        return [int(token) for token in order if speeds[token] > 0.0]

    def exponentials(self, position: int, count: int) -> NDArray[np.float64]:
        """Noise of the races at a position: standard exponential numbers, positive and finite.

        Args:
            position: absolute position of the token the winner follows.
            count: how many ids; the first numbers do not depend on it.
        """
        self._seek(position, Purpose.RACE, 0)
        # the middles of 2**52 cells: neither 0 nor 1 among them
        return -np.log(((self._bits.random_raw(count) >> _DROPPED_BITS_OF_RACES) + 0.5) * _TO_UNIT_OF_RACES)
