"""Which boundaries a named serving engine can hand to a draft head.

Owns the table and its reasons, for choosing layers and for exporting drafts. Knows neither scores nor files.
Boundary b: 0 is the embedding output, N the residual stream before the final norm, of a target with N decoder
layers.

Read from code by the checkpoint survey this project was given (vLLM 0.33.0, SGLang 0.5.23, SafeAILab/EAGLE
cb7e084, speculators 0.9.0), not executed here:

- vLLM adds the state after each layer under id + 1, and b = 0 before the first (`llama.py`): 0..N.
- SGLang stores b - 1 and loops over layers 0..N-1 (Llama, Qwen3 and most others), so b = N gives fewer
  columns and a crash, and b = 0 would need the id -1: 1..N-1. Its gpt_oss also captures N. Its deepseek_v2
  and glm4_moe_lite read a first id of 1 as boundary 2, so b = 1 cannot be expressed: 2..N-1.
- speculators reads boundaries, but its launcher appends N for the verifier's own last state: 0..N-1. K other
  than 3 does not load in vLLM from that format (speculators #1065, vllm #54526).
- SafeAILab's EAGLE stores no ids: it captures exactly 2, N // 2 and N - 3.
- specdec captures any: 0..N.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import SpecdecError

DEFAULT_TAPS = 3
# model_type of the families that sglang serves through its deepseek_v2 and glm4_moe_lite files.
SGLANG_FIRST_ID_HEURISTIC = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"})
SGLANG_CAPTURES_LAST = frozenset({"gpt_oss"})


def default_taps(num_layers: int) -> tuple[int, ...]:
    """[2, N/2, N-3], what engines assume when a draft does not say (EAGLE-3, arXiv:2503.01840)."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True, kw_only=True)
class EngineLimit:
    """What an engine can capture of one target.

    Attributes:
        engine: Its name.
        boundaries: Those it can capture, ascending.
        num_layers: The only K it serves; None where it serves any.
        reason: Why, in a few words.
    """

    engine: str
    boundaries: tuple[int, ...]
    num_layers: int | None
    reason: str


ENGINES = ("specdec", "vllm", "sglang", "speculators", "eagle")


def require_engine(name: str) -> None:
    """Refuse an engine that the table does not hold."""
    if name not in ENGINES:
        raise SpecdecError(
            f"engine ({name}) must be one of {', '.join(ENGINES)}; for another, say what it captures with "
            "allowed boundaries"
        )


def engine_limit(name: str, num_layers: int, model_type: str | None) -> EngineLimit:
    """What the engine can capture.

    Args:
        name: one of ENGINES.
        num_layers: decoder layers N of the target.
        model_type: the target's, from its config.json; needed for sglang, whose families differ.
    """
    require_engine(name)
    first, last, count, reason = 0, num_layers, None, "captures every boundary"
    if name == "sglang":
        if model_type is None:
            raise SpecdecError("engine (sglang) captures by family: the target's model_type must be known")
        first, last = 1, num_layers - 1
        reason = "its layer loop captures neither the embedding output nor boundary N"
        if model_type in SGLANG_CAPTURES_LAST:
            last, reason = num_layers, f"{model_type} also captures N, not the embedding output"
        elif model_type in SGLANG_FIRST_ID_HEURISTIC:
            first, reason = 2, f"{model_type} reads a first id of 1 as boundary 2, and never captures N"
    elif name == "speculators":
        last, count = num_layers - 1, DEFAULT_TAPS
        reason = "its launcher appends N for the verifier's own last state"
    elif name == "eagle":
        fixed = default_taps(num_layers)
        if list(fixed) != sorted(set(fixed)):
            raise SpecdecError(
                f"engine (eagle) captures {list(fixed)}: no three boundaries of {num_layers} layers"
            )
        return EngineLimit(
            engine=name,
            boundaries=fixed,
            num_layers=DEFAULT_TAPS,
            reason="it captures exactly 2, N // 2 and N - 3",
        )
    return EngineLimit(engine=name, boundaries=tuple(range(first, last + 1)), num_layers=count, reason=reason)
