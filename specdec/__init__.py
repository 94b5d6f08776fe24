"""specdec: speculative decoding whose draft head reads the layers that carry the most information.

Public names are looked up on first use, so that ``import specdec`` (and with it every ``--help``) stays
free of torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.engine import Engine
    from specdec.errors import SpecdecError
    from specdec.sampling_params import GrammarSpec, SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "GrammarSpec", "SamplingParams", "SpecdecError", "__version__"]

_HOMES = {
    "Engine": "specdec.engine",
    "GrammarSpec": "specdec.sampling_params",
    "SamplingParams": "specdec.sampling_params",
    "SpecdecError": "specdec.errors",
}


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when the name is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
