"""What could have foretold a tap set's acceptance: the scores of a selection file, for any set of boundaries.

Owns how a per-boundary score becomes a score of a set. Knows nothing of arms.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specdec.errors import SpecdecError
from specdec.layer_select.artifact import read_selection
from specdec.layer_select.objective import Objective, mean_pairwise, z_scores

Score = Callable[[tuple[int, ...]], float]


def subset_scores(path: Path, fingerprint: str) -> dict[str, Score]:
    """Scores of any tap set, by name.

    Every estimator's mean over the set, in the direction it calls richer; mean pairwise CKA; the objective
    with the file's lambda; and the mean and largest boundary, the scores that need no measurement.

    Raises:
        SpecdecError: not a selection file, or of another target.
    """
    document = read_selection(path)
    if document["target"].get("fingerprint") != fingerprint:
        raise SpecdecError(f"--scores ({path}) was measured on another target; run specdec select-layers")
    _require_numbers(path, document)
    cka = torch.tensor(document["cka"], dtype=torch.float64)
    scores: dict[str, Score] = {
        name: _mean(entry["sign"] * torch.tensor(entry["values"], dtype=torch.float64))
        for name, entry in document["scores"].items()
    }
    scores["mean pairwise CKA, lower first"] = lambda taps: -float(mean_pairwise(cka, torch.tensor([taps])))
    scores[f"{document['estimator']} + CKA, lambda {document['lambda']:g}"] = _objective(document)
    scores["mean boundary"] = lambda taps: sum(taps) / len(taps)
    scores["deepest boundary"] = lambda taps: float(max(taps))
    return scores


def _require_numbers(path: Path, document: dict[str, Any]) -> None:
    """Refuse a file whose scores or CKA are not those of boundaries 0..N, as a hand-edited one's are."""
    size = document["target"]["num_layers"] + 1
    scores, cka = document["scores"], document["cka"]
    whole = isinstance(scores, dict) and document["estimator"] in scores
    whole = whole and all(
        isinstance(entry, dict) and entry.get("sign") in (1, -1) and _is_row(entry.get("values"), size)
        for entry in scores.values()
    )
    if not whole or not isinstance(cka, list) or len(cka) != size or not all(_is_row(r, size) for r in cka):
        raise SpecdecError(
            f"--scores ({path}) lacks a value of every estimator and of CKA for each of {size} boundaries; "
            "it was edited, run specdec select-layers again"
        )


def _is_row(value: Any, size: int) -> bool:
    return isinstance(value, list) and len(value) == size and all(type(v) in (int, float) for v in value)


def _mean(values: torch.Tensor) -> Score:
    return lambda taps: float(values[list(taps)].mean())


def _objective(document: dict[str, Any]) -> Score:
    """The evidence part of the file's objective: z-scores over the boundaries it allowed, its own lambda."""
    entry = document["scores"][document["estimator"]]
    values = entry["sign"] * torch.tensor(entry["values"], dtype=torch.float64)
    objective = Objective(
        richness=z_scores(values, document["constraints"]["allowed"]),
        likeness=torch.tensor(document["cka"], dtype=torch.float64),
        diversity_weight=float(document["lambda"]),
    )
    return lambda taps: float(objective.evidence(torch.tensor([taps])))
