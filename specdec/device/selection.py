"""Whether an engine serves through the device path, and the refusals that go with it."""

from __future__ import annotations

import torch

from specdec.config import EngineConfig
from specdec.errors import SpecdecError
from specdec.kernels.operations import Operations, operations


def device_operations(config: EngineConfig, dtype: torch.dtype) -> Operations | None:
    """The kernels of an engine; None for the processor's own path (device "cpu", kernels "auto").

    Raises:
        SpecdecError: no such card, kernels that cannot be had, or a mode they do not have.
    """
    if config.device == "cpu" and config.kernels == "auto":
        if config.kv_cache_dtype != "auto":
            raise SpecdecError(
                f"kv_cache_dtype ({config.kv_cache_dtype}) needs kernels (a card, or kernels 'reference'): "
                "the processor's own path keeps rows in the compute dtype ('auto')"
            )
        return None
    _check_card(config.device)
    ops = operations(config.device, config.kernels, dtype, deterministic=config.deterministic)
    if config.deterministic and ops.backend == "reference":
        raise SpecdecError(
            "deterministic needs kernels 'auto': the reference kernels have no fixed order of summation"
        )
    return ops


def check_deterministic_trees(config: EngineConfig, makes_chains: bool) -> None:
    """Refuse trees where only chains are deterministic.

    Raises:
        SpecdecError: such a draft and shape.
    """
    if config.deterministic and not makes_chains:
        raise SpecdecError(
            f"deterministic on device ({config.device}) verifies chains only: a tree's keys stand in another "
            "order there. Use a chain (top_k 1) and a draft that is no mixture, or serve on the cpu"
        )


def _check_card(device: str) -> None:
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SpecdecError(f"device ({device}) needs a CUDA card, and torch sees none; use 'cpu'")
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        raise SpecdecError(f"device ({device}) is not there: torch sees {torch.cuda.device_count()} card(s)")
