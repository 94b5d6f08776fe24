"""What could have foretold a tap set's acceptance: the scores of a selection file, for any set of boundaries.

Owns how a per-boundary score becomes a score of a set. Knows nothing of arms.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecdecError
from specdec.layer_select.artifact import read_selection

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
    cka = np.array(document["cka"])
    scores: dict[str, Score] = {
        name: _mean(entry["sign"] * np.array(entry["values"], dtype=float))
        for name, entry in document["scores"].items()
    }
    scores["mean CKA (lower first)"] = lambda taps: -_redundancy(cka, taps)
    scores["entropy + CKA objective"] = _objective(document, cka)
    scores["mean boundary"] = lambda taps: float(np.mean(taps))
    scores["deepest boundary"] = lambda taps: float(max(taps))
    return scores


def _mean(values: np.ndarray) -> Score:
    return lambda taps: float(values[list(taps)].mean())


def _redundancy(cka: np.ndarray, taps: tuple[int, ...]) -> float:
    pairs = [float(cka[a, b]) for a, b in combinations(taps, 2)]
    return float(np.mean(pairs)) if pairs else 0.0


def _objective(document: dict[str, Any], cka: np.ndarray) -> Score:
    entry = document["scores"][document["estimator"]]
    values = entry["sign"] * np.array(entry["values"], dtype=float)
    # boundary 0 is not a candidate, so it does not shape the z-scores.
    centre, spread = values[1:].mean(), values[1:].std() or 1.0
    weight = float(document["lambda"])

    def score(taps: tuple[int, ...]) -> float:
        return float(((values[list(taps)] - centre) / spread).mean()) - weight * _redundancy(cka, taps)

    return score
