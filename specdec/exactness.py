"""What exactness is relative to: the words of every record and answer that calls a text exact or lossless.

An exact rule leaves a text what the same engine writes without drafts. Where weights or the KV cache are
rounded, that is the plain text of another model than the one that was named, and nothing is promised about
the named one's own. Draft weights change no text under an exact rule.
"""

from __future__ import annotations

# the target as it was named, in the compute dtype
TARGET = "the target"
# settings of weights or KV cache that round what was loaded
ROUNDING_SETTINGS = ("bf16-packed", "int8", "fp8")


def exact_against(*, weights: str, kv_cache_dtype: str) -> str:
    """Whose plain text an exact rule leaves as it is, under these settings of an engine."""
    rounded = {"weights": weights, "KV cache": kv_cache_dtype}
    held = [f"{setting} {name}" for name, setting in rounded.items() if setting in ROUNDING_SETTINGS]
    return f"{TARGET} with {' and '.join(held)}" if held else TARGET


def exactness_notice(against: str) -> str | None:
    """A sentence for people; None where exact means what it seems to mean."""
    if against == TARGET:
        return None
    return f"exact here means: as {against} writes without drafts, which is another model than the named one"
