"""Where the choice stands among all sets, and where the rules that need no measurement stand.

Owns the histogram of the objective over all sets that may be chosen (a random sample where they are too many)
and the ranks of reference sets in it. A reference is valued whether or not the constraints allow it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.stats import spearmanr
from torch import Tensor

from specdec.layer_select.config import EXHAUSTIVE_LIMIT_PROBE
from specdec.layer_select.objective import Objective, Subset
from specdec.layer_select.references import reference_subsets
from specdec.layer_select.search import SAMPLED_SETS_PROBE, Chooser

BINS = 60


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A set that a rule gives, and how many sets are better.

    Attributes:
        name: The rule.
        subset: The set with the parts of its value.
        better: Part of all sets with a higher objective, in 0..1.
    """

    name: str
    subset: Subset
    better: float


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """The objective of all sets.

    Attributes:
        sets: Number of sets it was computed for.
        sampled: Whether they are a random sample of all.
        edges: Bin edges, ascending, one more than counts.
        counts: Sets in each bin.
        mean: Mean objective, what a random set would get.
        spread: Standard deviation.
        probe_correlation: Spearman correlation over the sets (300 of them where the objective has no probe
            part) between the objective and the variance that the ridge probe explains; None without a probe,
            or where one of the two does not vary.
        references: Default, uniform and last-third taps, as far as they exist for this target and K.
    """

    sets: int
    sampled: bool
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    mean: float
    spread: float
    probe_correlation: float | None
    references: tuple[Reference, ...]


def survey(chooser: Chooser, objective: Objective) -> Landscape:
    """Value all sets, or a sample, and the references."""
    sets = chooser.reference_sets
    values = objective.values(sets)
    low, high = float(values.min()), float(values.max())
    width = max(high - low, 1e-9 * max(1.0, abs(high)))
    bins = ((values - low) / width * BINS).long().clamp(0, BINS - 1)
    counts = torch.bincount(bins, minlength=BINS)
    references = []
    for name, taps in reference_subsets(chooser.scores.num_layers, chooser.sets.count).items():
        [subset] = objective.subsets(torch.tensor([taps]))
        better = float((values > subset.objective).double().mean())
        references.append(Reference(name=name, subset=subset, better=better))
    return Landscape(
        sets=len(values),
        sampled=chooser.candidates is None,
        edges=tuple(low + width * step / BINS for step in range(BINS + 1)),
        counts=tuple(counts.tolist()),
        mean=float(values.mean()),
        spread=float(values.std(correction=0)),
        probe_correlation=_probe_correlation(chooser, sets, values),
        references=tuple(references),
    )


def _probe_correlation(chooser: Chooser, sets: Tensor, values: Tensor) -> float | None:
    if chooser.probe is None:
        return None
    # a solve a set: all of them only where the objective has asked for them anyway.
    if len(sets) > (EXHAUSTIVE_LIMIT_PROBE if chooser.probe_weight else SAMPLED_SETS_PROBE):
        kept = torch.linspace(0, len(sets) - 1, SAMPLED_SETS_PROBE).round().long()
        sets, values = sets[kept], values[kept]
    explained = chooser.probe.explained(sets)
    if len(values.unique()) < 2 or len(explained.unique()) < 2:
        return None
    return float(spearmanr(values.numpy(), explained.numpy()).statistic)
