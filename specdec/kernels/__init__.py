"""Numeric kernels of the runtime; each has its reference in `specdec.kernels.reference`."""

from specdec.kernels.reference import paged_attention, store_kv

__all__ = ["paged_attention", "store_kv"]
