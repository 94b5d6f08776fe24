"""Training of draft heads on the target's own answers.

Public names are looked up on first use, so that importing the folder's settings costs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.train.config import TrainConfig
    from specdec.train.evaluate import OfflineAcceptance, offline_acceptance
    from specdec.train.run import TrainResult, TrainRun, train_draft

__all__ = ["OfflineAcceptance", "TrainConfig", "TrainResult", "TrainRun", "offline_acceptance", "train_draft"]

_HOMES = {
    "OfflineAcceptance": "evaluate",
    "TrainConfig": "config",
    "TrainResult": "run",
    "TrainRun": "run",
    "offline_acceptance": "evaluate",
    "train_draft": "run",
}


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when the name is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
