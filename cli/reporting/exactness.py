"""What the exactness of a record is relative to; older records tell it by their settings alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.exactness import exact_against, exactness_notice


def recorded_exactness(body: Mapping[str, Any]) -> str:
    """Whose plain text the exact settings of a bench, or an audited rule, leave."""
    defaults = (body.get("run") or {}).get("defaults") or {}
    known = {**defaults, **(body.get("conditions") or {}), **body}
    told = known.get("exact_against")
    settings = {name: str(known.get(name)) for name in ("weights", "kv_cache_dtype")}
    return exact_against(**settings) if told is None else str(told)


def exactness_lines(body: Mapping[str, Any]) -> list[str]:
    """The disclosure of a report; nothing where exact means what it seems to mean."""
    notice = exactness_notice(recorded_exactness(body))
    return [f"{notice[0].upper()}{notice[1:]}."] if notice else []
