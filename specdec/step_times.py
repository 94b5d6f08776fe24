"""Seconds that an engine's start and its steps take, by part.

Owns the sums only; the engine reads the clock. On a card a part ends when its launches are done: whoever
first needs a result waits for it in its own part.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class StepTimes:
    """Seconds spent per part of the loop since the engine was made; `commit` is a part of `verify`."""

    propose: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    steps: int = 0


@dataclass
class StartTimes:
    """Seconds of an engine's start by part: target read and packed, tokenizer, draft, pool and costs."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.perf_counter)

    def end(self, part: str) -> None:
        """Count the time since the last part's end to `part`."""
        now = time.perf_counter()
        self.seconds[part] = now - self._since
        self._since = now
