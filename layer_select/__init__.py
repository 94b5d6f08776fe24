"""Layer selection: which residual-stream boundaries a draft head should read.

One streaming pass over calibration texts scores every boundary (`score`), a search chooses a few that are
informative and unlike one another (`choose`). Public names are looked up on first use, so that importing the
folder's settings costs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.layer_select.artifact import read_selection
    from specdec.layer_select.choose import LayerSelection, choose_layers
    from specdec.layer_select.config import ChooseConfig, ScoreConfig
    from specdec.layer_select.score import LayerScores, score_layers
    from specdec.layer_select.texts import CalibrationText, read_texts

__all__ = [
    "CalibrationText",
    "ChooseConfig",
    "LayerScores",
    "LayerSelection",
    "ScoreConfig",
    "choose_layers",
    "read_selection",
    "read_texts",
    "score_layers",
]

_HOMES = {
    "CalibrationText": "texts",
    "ChooseConfig": "config",
    "LayerScores": "score",
    "LayerSelection": "choose",
    "ScoreConfig": "config",
    "choose_layers": "choose",
    "read_selection": "artifact",
    "read_texts": "texts",
    "score_layers": "score",
}


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when the name is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
