"""Numeric kernels of the runtime: which implementation of each operation runs, and where that is decided.

Owns the table of operations and the choice between a Triton kernel and its reference in plain torch. Both
are functions of the same name and arguments, so a caller asks once, by name, and keeps what it got:

    backend = kernel_backend(device, setting)
    rope_store = kernel("rope_store", backend)

Triton is imported only when one of its kernels is asked for: the runtime works where it is missing. Nothing
falls back: a setting that cannot be had is refused. Knows nothing of models, sequences or configuration.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import torch

from specdec.config import KERNEL_SETTINGS
from specdec.errors import SpecdecError
from specdec.kernels.entry_attention import paged_attention, store_kv

KernelBackend = Literal["triton", "reference"]

# operation: modules of its Triton kernel and of its reference; the function is named as the operation
OPERATIONS: dict[str, tuple[str, str]] = {
    "uniforms": ("streams", "reference_streams"),
    "exponentials": ("streams", "reference_streams"),
    "greedy_choices": ("sampling_rows", "reference_sampling_rows"),
    "row_laws": ("sampling_rows", "reference_sampling_rows"),
    "row_probs": ("row_choices", "reference_sampling_rows"),
    "race_winners": ("row_choices", "reference_sampling_rows"),
    "walk_choices": ("walks", "reference_walks"),
    "walk_target_only": ("walks", "reference_walks"),
    "walk_block": ("walk_block", "reference_walks"),
    "grow_level": ("growth", "reference_growth"),
    "prune_trees": ("growth_end", "reference_growth"),
    "tree_masks": ("growth_end", "reference_growth"),
    "tree_attention": ("tree_attention", "reference_tree_attention"),
    "rms_norm": ("norms", "reference_norms"),
    "add_rms_norm": ("norms", "reference_norms"),
    "silu_mul": ("norms", "reference_norms"),
    "rope_store": ("rope_store", "reference_rope_store"),
    "commit_path": ("kv_moves", "reference_kv_moves"),
    "draft_loss": ("draft_loss", "reference_draft_loss"),
}


def kernel_backend(
    device: torch.device | str, setting: str = "auto", dtype: torch.dtype | None = None
) -> KernelBackend:
    """What the kernels of `device` are: "auto" means Triton on CUDA and the reference elsewhere.

    Args:
        device: where the tensors live.
        setting: "auto", "triton" or "reference".
        dtype: of the tensors, to refuse at the start what a kernel would get wrong.

    Raises:
        SpecdecError: the setting is unknown, or cannot be had on this device.
    """
    if setting not in KERNEL_SETTINGS:
        raise SpecdecError(f"kernels ({setting!r}) must be one of {', '.join(KERNEL_SETTINGS)}")
    on_card = torch.device(device).type == "cuda"
    if setting == "reference" or (setting == "auto" and not on_card):
        return "reference"
    if importlib.util.find_spec("triton") is None:
        raise SpecdecError(
            f"kernels ({setting!r}) on device ({str(device)!r}) need the triton package, which is not "
            "installed: pip install triton (Linux), or set kernels to 'reference'"
        )
    from triton import knobs

    if not on_card and not knobs.runtime.interpret:
        raise SpecdecError(
            f"kernels ('triton') need a CUDA device, but device is ({str(device)!r}); use 'auto' or "
            "'reference', or set TRITON_INTERPRET=1 to interpret them (slow, for tests)"
        )
    if knobs.runtime.interpret and dtype == torch.bfloat16:
        raise SpecdecError(
            "dtype (bfloat16) must be float32 or float16 while TRITON_INTERPRET=1 is set: Triton's "
            "interpreter computes bfloat16 wrongly; unset it on a CUDA device"
        )
    return "triton"


def kernel(operation: str, backend: KernelBackend) -> Callable[..., Any]:
    """The function that does `operation`, from the module of its Triton kernel or of its reference."""
    assert operation in OPERATIONS, f"{operation} is none of {', '.join(sorted(OPERATIONS))}"
    fast, plain = OPERATIONS[operation]
    module = importlib.import_module(f"specdec.kernels.{fast if backend == 'triton' else plain}")
    found: Callable[..., Any] = getattr(module, operation)
    return found


__all__ = [
    "KERNEL_SETTINGS",
    "OPERATIONS",
    "KernelBackend",
    "kernel",
    "kernel_backend",
    "paged_attention",
    "store_kv",
]
