"""`selection.json`: the decision and its evidence as a file.

Owns the schema `specdec.selection/1`, writing and reading. Does not compute anything. Fields: target
(fingerprint, name, num_layers, hidden_size), boundaries (ascending), objective (the maximised value and its
parts), lambda, estimator, search, constraints, scores (per estimator: values at boundaries 0..N, sign,
normalization, drop_bos), cka (debiased minibatch matrix over 0..N), runners_up, stability (null when not
estimated), cost (tokens, texts, seconds, peak memory), settings, warnings and hashes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.layer_select.choose import LayerSelection, Subset, allowed_boundaries
from specdec.layer_select.config import ChooseConfig, ScoreConfig
from specdec.layer_select.entropy import ESTIMATORS
from specdec.layer_select.score import LayerScores
from specdec.provenance import write_json_atomic

SCHEMA = "specdec.selection/1"
# the evidence is noise far above this; six digits keep the file readable.
DIGITS = 6


def selection_document(
    scores: LayerScores,
    selection: LayerSelection,
    *,
    score_config: ScoreConfig,
    choose_config: ChooseConfig,
    target: Mapping[str, Any],
    cost: Mapping[str, Any],
    hashes: Mapping[str, str],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Put scores and decision into the file's form.

    Args:
        scores: the evidence.
        selection: the decision.
        score_config: how boundaries were measured.
        choose_config: how they were chosen.
        target: fingerprint and name; layer count and width are added here.
        cost: seconds and memory; measured tokens are added here.
        hashes: of calibration set, template and whatever else the caller knows.
        warnings: what was noticed on the way.
    """
    stability = None if selection.stability is None else asdict(selection.stability)
    return {
        "schema": SCHEMA,
        "target": {**target, "num_layers": scores.num_layers, "hidden_size": scores.hidden_size},
        "boundaries": list(selection.boundaries),
        "objective": _subset(selection.best),
        "lambda": choose_config.diversity_weight,
        "estimator": choose_config.estimator,
        "search": selection.search,
        "constraints": {
            "min_gap": choose_config.min_gap,
            "allowed": allowed_boundaries(scores.num_layers, choose_config),
        },
        "scores": {
            name: {
                "values": [round(value, DIGITS) for value in scores.text_values[name].mean(dim=0).tolist()],
                "sign": ESTIMATORS[name].sign,
                "normalization": ESTIMATORS[name].normalization,
                "drop_bos": ESTIMATORS[name].drop_bos and score_config.drop_first > 0,
            }
            for name in scores.text_values
        },
        "cka": [[round(value, DIGITS) for value in row] for row in scores.cka().tolist()],
        "runners_up": [_subset(subset) for subset in selection.runners_up],
        "stability": stability,
        "cost": {"tokens": scores.tokens, "texts": len(scores.batch_of_text), **cost},
        "settings": {"score": asdict(score_config), "choose": asdict(choose_config)},
        "warnings": list(warnings),
        "hashes": dict(hashes),
    }


def _subset(subset: Subset) -> dict[str, Any]:
    return {
        "boundaries": list(subset.boundaries),
        "value": round(subset.objective, DIGITS),
        "mean_informativeness_z": round(subset.informativeness, DIGITS),
        "mean_pairwise_cka": round(subset.redundancy, DIGITS),
    }


def write_selection(path: str | Path, document: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    write_json_atomic(Path(path), document)


def read_selection(path: str | Path) -> dict[str, Any]:
    """Read a selection file, checking its schema and that its boundaries fit its target."""
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecdecError(f"selection file ({path}) cannot be read: {error}") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise SpecdecError(f"selection file ({path}) has schema ({schema}), {SCHEMA} is needed; select again")
    boundaries, num_layers = document["boundaries"], document["target"]["num_layers"]
    if boundaries != sorted(set(boundaries)) or not all(0 <= b <= num_layers for b in boundaries):
        raise SpecdecError(
            f"selection file ({path}) has boundaries {boundaries}; they must be distinct, ascending and in "
            f"0..{num_layers}"
        )
    return document
