"""Seconds that an engine's steps take, by part.

Owns the sums only; the engine reads the clock. On a card a part ends when its launches are done: whoever
first needs a result waits for it in its own part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepTimes:
    """Seconds spent per part of the loop since the engine was made; `commit` is a part of `verify`."""

    propose: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    steps: int = 0
