"""Draft heads and drafters, and the one table from a user's spelling to a drafter.

Spellings: "ngram"; a draft folder, or the name of a shipped draft; "random", a head of random weights for
measurements of speed; "ngram+DRAFT" for both in one tree.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.drafts.checkpoint import LoadedDraft, load_draft, read_draft_config
from specdec.errors import SpecdecError

if TYPE_CHECKING:
    from specdec.drafter import Drafter, TargetView

logger = logging.getLogger(__name__)

PRETRAINED = Path(__file__).resolve().parent / "pretrained"
LOOKUP = "ngram"
RANDOM = "random"

__all__ = ["LoadedDraft", "check_spelling", "draft_folder", "load_draft", "load_drafter", "shipped_drafts"]


def shipped_drafts() -> list[str]:
    """Names of the drafts that come with specdec."""
    return sorted(path.parent.name for path in PRETRAINED.glob("*/config.json"))


def draft_folder(name: str) -> Path:
    """The folder of a draft: a path, or the name of a shipped draft.

    Raises:
        SpecdecError: neither a folder nor a shipped name.
    """
    if not name.strip():
        raise SpecdecError(f'--draft ("{name}") is empty; {_allowed()}')
    if Path(name).is_dir():
        return Path(name)
    if (PRETRAINED / name / "config.json").exists():
        return PRETRAINED / name
    raise SpecdecError(f"--draft ({name}) is no draft; {_allowed()}")


def _allowed() -> str:
    known = ", ".join(shipped_drafts()) or "none"
    return (
        f"give {LOOKUP}, a draft folder, a shipped draft ({known}), {RANDOM} (untrained weights, to measure "
        f"speed), or {LOOKUP}+ one of the latter three"
    )


def check_spelling(spelling: str) -> None:
    """Refuse what names no drafter, before a target is loaded for it.

    Raises:
        SpecdecError: naming what there is.
    """
    head = _head_of(spelling)
    if head is None or head == RANDOM:
        return
    folder = draft_folder(head)
    try:
        read_draft_config(folder)
    except SpecdecError as error:
        raise SpecdecError(
            f"--draft ({spelling}): {error}; specdec import takes over a draft of another engine"
        ) from error


def _head_of(spelling: str) -> str | None:
    """The draft head in a spelling; None where it is lookup alone."""
    if spelling == LOOKUP:
        return None
    if not spelling.startswith(f"{LOOKUP}+"):
        return spelling
    head = spelling.removeprefix(f"{LOOKUP}+")
    if not head.strip() or head.split("+")[0] == LOOKUP:
        raise SpecdecError(f"--draft ({spelling}) must add a draft head to {LOOKUP}; {_allowed()}")
    return head


def load_drafter(spelling: str, target: TargetView) -> Drafter:
    """Build the drafter a user named, for the target at hand.

    Raises:
        SpecdecError: an unknown spelling, or a draft that does not belong to this target.
    """
    from specdec.drafts.ngram import NgramDrafter
    from specdec.drafts.stacked import StackedDrafter

    head = _head_of(spelling)
    if head is None:
        return NgramDrafter()
    drafter = _load_head(head, target)
    return drafter if head == spelling else StackedDrafter(NgramDrafter(), drafter)


def _load_head(name: str, target: TargetView) -> Drafter:
    if name == RANDOM:
        from specdec.drafts.random_head import random_head

        return _serve(random_head(target), target)
    folder = draft_folder(name)
    draft = load_draft(folder, target.embed_tokens, target.head_weight, target_fingerprint=target.fingerprint)
    trained = draft.contract.template_hash
    if target.template_hash is not None and trained != target.template_hash:
        # the text stays the target's own; only acceptance suffers, so this is said and not refused
        logger.warning(
            "draft (%s) was trained with another chat template (%s, the target has %s): less acceptance",
            folder,
            trained[:12],
            target.template_hash[:12],
        )
    return _serve(draft, target)


def _serve(draft: LoadedDraft, target: TargetView) -> Drafter:
    """The drafter of a loaded head, for the path the engine serves on."""
    if target.operations is not None:
        from specdec.drafts.eagle3_device import DeviceEagle3Drafter

        return DeviceEagle3Drafter(draft, target, target.operations)
    from specdec.drafts.eagle3_drafter import Eagle3Drafter

    return Eagle3Drafter(draft, target)
