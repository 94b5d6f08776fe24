"""How a user spells a tree's shape, `chain:4` or `tree:5x4:16`, and an acceptance length to simulate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.config import SpecConfig
from specdec.errors import SpecdecError, UsageError

SPELLING = "chain:DEPTH or tree:DEPTHxTOP_K:NODES"


def parse_shape(text: str, base: SpecConfig | None = None, *, option: str = "--shape") -> SpecConfig:
    """Speculation settings of a shape spelled at `option`; the other fields are those of `base`.

    Raises:
        UsageError: not a shape, or numbers out of range.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("chain", "tree"):
        raise UsageError(f"{option} ({text}) must be {SPELLING}")
    try:
        if kind == "chain":
            depth, top_k = int(rest), 1
            nodes = depth
        else:
            grown, _, count = rest.partition(":")
            left, _, right = grown.partition("x")
            depth, top_k, nodes = int(left), int(right), int(count)
    except ValueError as error:
        raise UsageError(f"{option} ({text}) must be {SPELLING}, with whole numbers") from error
    try:
        return replace(base or SpecConfig(), max_depth=depth, top_k=top_k, max_nodes=nodes)
    except SpecdecError as error:
        raise UsageError(f"{option} ({text}): {error}") from error


def check_simulation(length: float, shape: str, spec: SpecConfig) -> None:
    """Refuse an acceptance length to simulate that a shape cannot have.

    Raises:
        UsageError: naming the range.
    """
    try:
        spec.check_simulated(length)
    except SpecdecError as error:
        message = str(error).replace("simulate_acceptance", "--simulate-acceptance", 1)
        raise UsageError(f"{message} (--shape {shape})") from error


def simulation_notice(length: float) -> dict[str, Any]:
    """What every result of simulated acceptance carries."""
    return {
        "simulated": True,
        "simulated_acceptance_length": length,
        "simulation": f"acceptance is SIMULATED ({length:g} tokens a step on average, drawn): speed only; "
        "the text is meaningless and nothing here is lossless",
    }
