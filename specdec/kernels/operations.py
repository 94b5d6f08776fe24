"""The kernels that one engine uses, chosen once.

Owns how a pass calls attention: in the deterministic mode with keys per split and tile height fixed, so that
a row's sum is taken in one order whatever the pass carries. Knows nothing of models or sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec.kernels import KernelBackend, kernel, kernel_backend

# of a deterministic pass: long enough that short texts need no second launch
DETERMINISTIC_SPLIT_KEYS = 2048


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Functions of `specdec.kernels`, all of one backend; see their references for arguments."""

    backend: KernelBackend
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Tensor]
    silu_mul: Callable[..., Tensor]
    rope_store: Callable[..., Tensor]
    tree_attention: Callable[..., Tensor]


def operations(
    device: torch.device | str, setting: str, dtype: torch.dtype, *, deterministic: bool = False
) -> Operations:
    """The kernels of a device.

    Args:
        device: where the tensors live.
        setting: "auto", "triton" or "reference".
        dtype: of the model.
        deterministic: whether the order of every sum is fixed.

    Raises:
        SpecdecError: the setting cannot be had there.
    """
    backend = kernel_backend(device, setting, dtype)
    attention = kernel("tree_attention", backend)
    return Operations(
        backend=backend,
        rms_norm=kernel("rms_norm", backend),
        add_rms_norm=kernel("add_rms_norm", backend),
        silu_mul=kernel("silu_mul", backend),
        rope_store=kernel("rope_store", backend),
        tree_attention=partial(attention, split_keys=DETERMINISTIC_SPLIT_KEYS)
        if deterministic
        else attention,
    )
