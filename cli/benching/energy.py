"""Energy that the cards in use have drawn, where their driver tells (NVML).

Owns the reading. The counter counts from the driver's start, so two readings give the energy between them; it
is the whole card's, other work on it included. Nothing is estimated: without a card, a driver or a counter
there is no meter.

Source: NVML reference, nvmlDeviceGetTotalEnergyConsumption (millijoules; Volta and later).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_MILLI = 1e-3


class EnergyMeter:
    """Sums the energy counters of cards.

    Args:
        library: NVML, loaded and initialised.
        handles: its handles of the cards.
    """

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library, self._handles = library, list(handles)

    def joules(self) -> float | None:
        """Energy since the driver's start; None where a card does not tell."""
        total = 0
        for handle in self._handles:
            value = ctypes.c_ulonglong()
            if self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)) != 0:
                return None
            total += value.value
        return total * _MILLI


def energy_meter(device: str, library_name: str = _LIBRARY) -> EnergyMeter | None:
    """The meter of a device's card; None on the processor, and where no driver counts energy.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        library_name: NVML's file.
    """
    if device == "cpu":
        return None
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        library = ctypes.CDLL(library_name)
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    # by uuid: NVML counts cards that CUDA_VISIBLE_DEVICES hides, and in another order
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None
    meter = EnergyMeter(library, [handle])
    return meter if meter.joules() is not None else None
