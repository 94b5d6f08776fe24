"""Parts of an optimiser step: how long they take, and what is said when memory runs out in one.

Owns both. Knows nothing of what the parts do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from specdec.errors import SpecdecError


class StepParts:
    """Seconds by part of all steps so far; of a card's work only what the host waits for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the block's time to `part`."""
        begun = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - begun


@contextmanager
def memory_named(describe: Callable[[], str]) -> Iterator[None]:
    """Tell what took the memory that ran out, and what to lower.

    Raises:
        SpecdecError: in the place of the allocator's error.
    """
    try:
        yield
    except RuntimeError as error:
        # a processor's allocator has no error of its own
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise SpecdecError(
            f"out of memory in {describe()}; lower --micro-batch-tokens, then --max-length or "
            "--draft-vocab-size"
        ) from error
