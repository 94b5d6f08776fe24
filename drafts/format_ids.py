"""How each format spells the boundaries a draft reads.

Owns the conversion between boundaries b (0..N, as everywhere in specdec) and stored layer ids, both ways, and
the refusal of a config whose ids have more than one meaning. Sources: vLLM 0.33.0 (top-level ids are
boundaries), SGLang 0.5.23 (nested ids are layers whose output is taken, with exceptions by family),
speculators 0.9.0 (boundaries), SafeAILab/EAGLE cb7e084 (no ids: always 2, N // 2, N - 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.engine_limits import (
    SGLANG_CAPTURES_LAST,
    SGLANG_FIRST_ID_HEURISTIC,
    default_taps,
)
from specdec.errors import SpecdecError

IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"


def nested_ids(boundaries: Sequence[int], num_layers: int, model_type: str) -> list[int]:
    """SGLang's ids of ascending boundaries: b - 1, but b where its family reads ids as boundaries."""
    if model_type in SGLANG_FIRST_ID_HEURISTIC:
        assert boundaries[0] != 1, "a first id of 1 would be read as boundary 2"
        return list(boundaries)
    if model_type in SGLANG_CAPTURES_LAST and max(boundaries) == num_layers:
        return list(boundaries)
    return [boundary - 1 for boundary in boundaries]


def nested_boundaries(ids: Sequence[int], num_layers: int, model_type: str) -> list[int]:
    """The boundaries that SGLang captures for nested ids, in the order of the ids."""
    if model_type in SGLANG_FIRST_ID_HEURISTIC and ids[0] != 1:
        return list(ids)
    if model_type in SGLANG_CAPTURES_LAST and max(ids) == num_layers:
        return list(ids)
    return [value + 1 for value in ids]


def stored_boundaries(
    name: str, raw: Mapping[str, Any], num_layers: int, model_type: str, where: str
) -> tuple[list[int], str | None]:
    """The boundaries of a foreign config, in the order in which its fusion reads them.

    Args:
        name: the format it is read as.
        raw: config.json.
        num_layers: of the target.
        model_type: of the target.
        where: the file, for errors.

    Returns:
        The boundaries, and a remark where they are not stated but assumed.

    Raises:
        SpecdecError: ids that two readers take for different boundaries, or that the format's reader ignores.
    """
    assumed = list(default_taps(num_layers))
    if name == "eagle":
        return assumed, None
    top = _ids(raw.get(IDS), IDS, where)
    nested = _ids((raw.get(NESTED) or {}).get(IDS), f"{NESTED}.{IDS}", where)
    from_nested = None if nested is None else nested_boundaries(nested, num_layers, model_type)
    if top is not None and from_nested is not None and top != from_nested:
        raise SpecdecError(
            f"{where}: {IDS} {top} are boundaries {top}, but {NESTED}.{IDS} {nested} are boundaries "
            f"{from_nested} on a {model_type} target; remove the list that is wrong"
        )
    stated = from_nested if name == "sglang" else top
    if stated is not None:
        return stated, None
    if top is not None:
        raise SpecdecError(
            f"{where}: SGLang ignores {IDS} {top} at top level and would capture {assumed}; import it with "
            "--from vllm if these are the boundaries it was trained on"
        )
    if nested is not None:
        raise SpecdecError(
            f"{where}: {NESTED}.{IDS} {nested} mean {nested} to one vLLM runner and nothing to the other; "
            f"import it with --from sglang if they are layers whose output is taken (boundaries "
            f"{from_nested}), or write the boundaries as {IDS} at top level"
        )
    return assumed, f"no layer ids stored: boundaries {assumed}, which the engines assume"


def _ids(value: Any, name: str, where: str) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
        raise SpecdecError(f"{where}: {name} ({value}) must be a list of whole numbers")
    return value
