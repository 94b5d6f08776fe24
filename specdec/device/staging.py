"""One copy from the host to the device per step: many small arrays side by side in one pinned buffer.

Owns the buffer and its layout. Two halves take turns, so that a step can be packed while the copy of the one
before it may still run. Knows nothing of what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


class Staging:
    """Moves named arrays to `device` in one copy; grows when a step needs more room."""

    def __init__(self, device: torch.device | str, num_bytes: int = 1 << 16) -> None:
        self.device = torch.device(device)
        self._pinned = self.device.type == "cuda"
        self._turn = 0
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(2)]
        self._device = [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]

    @property
    def device_bytes(self) -> int:
        return sum(half.numel() for half in self._device)

    def put(self, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, Tensor]:
        """The arrays on the device, valid until the call after the next."""
        places, used = {}, 0
        for name, array in arrays.items():
            places[name] = used
            used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if used > self._host[0].numel():
            self._allocate(2 * used)
        self._turn = 1 - self._turn
        host, device = self._host[self._turn], self._device[self._turn]
        image = host.numpy()
        for name, array in arrays.items():
            start = places[name]
            image[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device[:used].copy_(host[:used], non_blocking=True)
        return {
            name: device[places[name] : places[name] + array.nbytes]
            .view(TORCH_DTYPES[array.dtype])
            .view(array.shape)
            for name, array in arrays.items()
        }


class FixedStaging:
    """The same arrays again and again, at the same places of the device.

    Two halves on the host take turns, so that a step can be loaded while the copy of the one before it may
    still run; there is one place on the device, where copies and steps follow each other in order.

    Args:
        arrays: an example of each, for names, shapes and dtypes.
        device: where they go.
    """

    def __init__(self, arrays: Mapping[str, NDArray[np.generic]], device: torch.device) -> None:
        self._places, used = {}, 0
        for name, array in arrays.items():
            self._places[name] = used
            used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        pinned = device.type == "cuda"
        self._turn = 0
        self._host = [torch.empty(used, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._device = torch.empty(used, dtype=torch.uint8, device=device)
        self.views = {
            name: self._device[start : start + arrays[name].nbytes]
            .view(TORCH_DTYPES[arrays[name].dtype])
            .view(arrays[name].shape)
            for name, start in self._places.items()
        }

    def load(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Copy the arrays; the last copy but one must have ended, as it has once its step was fetched."""
        self._turn = 1 - self._turn
        host = self._host[self._turn]
        image = host.numpy()
        for name, start in self._places.items():
            array = arrays[name]
            image[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device.copy_(host, non_blocking=True)
