"""A call without arguments, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
# runs before the capture: kernels are compiled and libraries set up in them
WARM_UPS = 2


class CapturedCall(Generic[Result]):
    """Runs `call` for the first time eagerly and captures it; later calls replay it.

    The call reads and writes tensors at fixed places; what it returns is at the same place every time.
    """

    # captured calls never run at the same time, so all of them share what they allocate
    _pool: Any = None

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def __call__(self) -> Result:
        """The result of one call, valid until the next one of any captured call."""
        if self._graph is None:
            self._capture()
        assert self._graph is not None, "a captured call has its graph"
        assert self._result is not None, "a captured call has its result"
        self._graph.replay()
        return self._result

    def _capture(self) -> None:
        current = torch.cuda.current_stream()
        beside = torch.cuda.Stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                self._call()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        if CapturedCall._pool is None:
            CapturedCall._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=CapturedCall._pool):
            self._result = self._call()
        self._graph = graph
