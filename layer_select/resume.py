"""A scoring pass on disk: written whole after every batch, continued by a run with the same inputs.

Owns the file and the check that it belongs to the run. Does not know what the pass keeps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from specdec.errors import SpecdecError
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.texts import CalibrationText, texts_hash
from specdec.provenance import sha256_text

SCHEMA = "specdec.scoring/1"
# values of each weight that tell one target from another.
DIGEST_VALUES = 8


def run_key(model: Any, texts: Sequence[CalibrationText], config: ScoreConfig) -> dict[str, str]:
    """What must be equal for a pass to be continued, named for the message."""
    weights = [
        [name, str(weight.dtype), list(weight.shape), _first_values(weight)]
        for name, weight in model.named_parameters()
    ]
    return {
        "target": sha256_text(json.dumps(weights)),
        "texts": sha256_text(texts_hash(list(texts)) + json.dumps([text.domain for text in texts])),
        "settings": json.dumps(asdict(config), sort_keys=True),
    }


def _first_values(weight: torch.Tensor) -> list[float]:
    # an offloaded weight has no values here; its name, type and shape still count.
    return [] if weight.device.type == "meta" else weight.flatten()[:DIGEST_VALUES].float().tolist()


def save_pass(path: Path, key: dict[str, str], content: dict[str, Any]) -> None:
    """Write tensors, lists and numbers so that an interrupt leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch.save({"schema": SCHEMA, "key": key, "content": content}, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        raise SpecdecError(f"resume file ({path}) cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load_pass(path: Path, key: dict[str, str], device: torch.device) -> dict[str, Any] | None:
    """What a run with the same key has saved; None where there is no file yet."""
    if not path.exists():
        return None
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        raise SpecdecError(
            f"resume file ({path}) cannot be read; remove it to start anew, or name another"
        ) from error
    if not isinstance(saved, dict) or saved.get("schema") != SCHEMA:
        raise SpecdecError(f"resume file ({path}) is no {SCHEMA} file; name another")
    differing = [name for name, value in key.items() if saved["key"].get(name) != value]
    if differing:
        raise SpecdecError(
            f"resume file ({path}) belongs to a run with other {' and '.join(differing)}; remove it to start "
            "anew, or name another"
        )
    content = saved["content"]
    assert isinstance(content, dict), "a pass is saved as a dictionary"
    return content
