"""How a target may be loaded through transformers: the names of precisions and device maps.

Owns the names and their refusal, so that a command line is checked before anything large is imported. Does
not load.
"""

from __future__ import annotations

from collections.abc import Mapping

from specdec.errors import SpecdecError

DTYPE_NAMES = ("float32", "float16", "bfloat16")
# accelerate's
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def require_loading(dtype: str, device_map: str | Mapping[str, object] | None) -> None:
    """Refuse a precision or a named device map that no target can be loaded with.

    Raises:
        SpecdecError: naming the field, its value and what is allowed.
    """
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        raise SpecdecError(f"device_map ({device_map}) must be one of {', '.join(DEVICE_MAPS)}")
    if dtype not in DTYPE_NAMES:
        raise SpecdecError(f"dtype ({dtype}) must be one of {', '.join(DTYPE_NAMES)}")
