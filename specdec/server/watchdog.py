"""Notices an engine that hangs, and sees to it that nobody waits for it.

Watches from the event loop, which runs while the engine's thread computes. For a hang that keeps Python's
lock as well, so that the event loop stands still too, there is a last resort in C: it writes where every
thread stands and ends the process, whose connections the system then closes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections.abc import Callable

_LONGEST_TICK_S = 1.0
# the last resort gives the event loop time to speak first
_LAST_RESORT = 2.0


class Watchdog:
    """Watches turns.

    Args:
        timeout_s: longest turn.
        turn: the number of the turn that is under way; None when there is none.
        on_hang: called once, on the event loop, with what is wrong.
    """

    def __init__(
        self, timeout_s: float, turn: Callable[[], int | None], on_hang: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._turn = turn
        self._on_hang = on_hang

    async def watch(self) -> None:
        """Watch until a turn takes too long."""
        tick = min(_LONGEST_TICK_S, self._timeout_s / 4)
        seen, watched = None, 0.0
        while watched < self._timeout_s:
            before = time.perf_counter()
            await asyncio.sleep(tick)
            turn = self._turn()
            if turn is None or turn != seen:
                seen, watched = turn, 0.0
            else:
                # a process that was stopped for a while has not hung: time nobody watched does not count
                watched += min(time.perf_counter() - before, 2 * tick)
        self._on_hang(f"a step took more than {self._timeout_s:g} s")


class LastResort:
    """While open and kept awake, ends a process whose event loop stands still for too long.

    Args:
        timeout_s: see `Watchdog`; the event loop has twice as long.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def keep_awake(self) -> None:
        """Put the end off, until cancelled."""
        tick = min(_LONGEST_TICK_S, self._timeout_s / 4)
        try:
            while True:
                faulthandler.dump_traceback_later(
                    _LAST_RESORT * self._timeout_s + tick, exit=True, file=sys.stderr.fileno()
                )
                await asyncio.sleep(tick)
        finally:
            faulthandler.cancel_dump_traceback_later()
