"""Tap rules that need no measurement: what a selection is compared with.

Owns the rules, free of torch. Does not know scores. Rules for shallow targets can fall on fewer boundaries
than asked for, or below 0; `reference_subsets` leaves those out.

Sources: the default triple is EAGLE-3's (arXiv:2503.01840), the uniform rule DFlash's (2602.06036); taps in
the last third follow NVIDIA's released heads (boundaries 24, 30, 36 of 36).
"""

from __future__ import annotations

from specdec.engine_limits import DEFAULT_TAPS, default_taps

DEFAULT, UNIFORM, LAST_THIRD, LAST = "default", "uniform", "last_third", "last"


def uniform_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Evenly from boundary 2 to N-2; the middle one for a single tap."""
    if count == 1:
        return (num_layers // 2 + 1,)
    return tuple(2 + round(index * (num_layers - 4) / (count - 1)) for index in range(count))


def last_third_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Evenly from 2N/3 to N, both included; N for a single tap."""
    if count == 1:
        return (num_layers,)
    first = round(2 * num_layers / 3)
    return tuple(first + round(index * (num_layers - first) / (count - 1)) for index in range(count))


def reference_subsets(num_layers: int, count: int) -> dict[str, tuple[int, ...]]:
    """The rules that give `count` distinct ascending boundaries of this target, by name."""
    rules = {DEFAULT: default_taps(num_layers)} if count == DEFAULT_TAPS else {}
    rules[UNIFORM] = uniform_taps(num_layers, count)
    rules[LAST if count == 1 else LAST_THIRD] = last_third_taps(num_layers, count)
    return {
        name: taps
        for name, taps in rules.items()
        if list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= num_layers
    }
