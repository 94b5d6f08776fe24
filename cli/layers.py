"""Boundaries as a user names them: numbers, or a selection file of the same target."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import SpecdecError, UsageError


def read_layers(text: str, fingerprint: str) -> tuple[int, ...]:
    """Read --layers.

    Args:
        text: boundaries like 2,15,29, or the path of a selection.json.
        fingerprint: the target's; a selection made for another one is refused.

    Raises:
        SpecdecError: neither numbers nor a selection of this target.
    """
    parts = [part.strip() for part in text.split(",")]
    if all(part.isdecimal() for part in parts):
        return tuple(int(part) for part in parts)
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--layers ({text}) must be a selection.json or boundaries like 2,15,29")

    from specdec.layer_select.artifact import read_selection

    selection = read_selection(path)
    chosen_for = selection["target"].get("fingerprint")
    if chosen_for != fingerprint:
        raise SpecdecError(
            f"--layers ({path}) was chosen for another target (fingerprint {str(chosen_for)[:12]}, not "
            f"{fingerprint[:12]}); run specdec select-layers on this one"
        )
    return tuple(int(value) for value in selection["boundaries"])
