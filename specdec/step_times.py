"""Seconds that an engine's start and its steps take, by part.

On a card a part ends when its launches are done: whoever first needs a result waits for it in its own part.
Beside the wall's seconds a watch keeps the thread's own processor seconds, which the load of other programs
moves little: the adaptive policy learns its costs from those.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


class StepWatch:
    """Parts of one step, from when it is made; a part's name twice adds up."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def end(self, part: str) -> None:
        """Count what passed since the last part's end to `part`."""
        wall, cpu = time.perf_counter(), time.thread_time()
        self.wall[part] = self.wall.get(part, 0.0) + wall - self._wall
        self.cpu[part] = self.cpu.get(part, 0.0) + cpu - self._cpu
        self._wall, self._cpu = wall, cpu


@dataclass
class StepTimes:
    """Seconds spent per part of the loop since the engine was made; `commit` is a part of `verify`."""

    propose: float = 0.0
    target: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    steps: int = 0

    def add(self, watch: StepWatch) -> None:
        """Count one step."""
        parts = watch.wall
        self.propose += parts["propose"]
        self.target += parts["target"]
        self.verify += parts["verify"] + parts["commit"]
        self.commit += parts["commit"]
        self.steps += 1


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
