"""What a set of boundaries is worth.

Owns the objective. Knows scores only as numbers; does not know how sets are searched.

Evidence part: J(S) = mean z-scored informativeness over S - lambda * mean pairwise CKA inside S. z-scores
are taken over the boundaries that may be chosen; several estimators in one objective are averaged by
weight. Probe part: the overlap of the ridge probe's prediction from S with the target's law of a draft's
first step, in 0..1 (`probe_table`). An objective of one part has that part's unit. In a mix each part is
first standardised over the sets that may be chosen (all of them, or a random sample where they are too
many), so that its weight means the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from specdec.layer_select.probe_table import ProbeTable, Verdict


@dataclass(frozen=True, kw_only=True)
class Subset:
    """A candidate set of boundaries with the parts of its objective.

    Attributes:
        boundaries: The set, ascending.
        objective: What is maximised.
        informativeness: Mean z-score.
        redundancy: Mean pairwise CKA; 0 for a single boundary.
        explained: Variance the ridge probe explains; None where it was not run.
        probe: The probe's measured verdict; None where this set was not measured.
    """

    boundaries: tuple[int, ...]
    objective: float
    informativeness: float
    redundancy: float
    explained: float | None = None
    probe: Verdict | None = None


@dataclass(frozen=True, kw_only=True)
class MixScale:
    """Mean and spread of both parts over the sets that may be chosen."""

    evidence_mean: float
    evidence_spread: float
    probe_mean: float
    probe_spread: float


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The value of sets under one sample of the evidence.

    Attributes:
        richness: z-scored informativeness of boundaries 0..N, `[N + 1]`.
        likeness: CKA of boundaries 0..N, `[N + 1, N + 1]`.
        diversity_weight: lambda.
        probe: Probe values; None where it was not run.
        probe_weight: Part of the probe in the objective, in 0..1.
        scale: Of both parts; needed for a mix.
    """

    richness: Tensor
    likeness: Tensor
    diversity_weight: float
    probe: ProbeTable | None = None
    probe_weight: float = 0.0
    scale: MixScale | None = None

    def evidence(self, sets: Tensor) -> Tensor:
        """Evidence part of each set `[subsets, K]`, `[subsets]`."""
        redundancy = mean_pairwise(self.likeness, sets)
        return mean_richness(self.richness, sets) - self.diversity_weight * redundancy

    def values(self, sets: Tensor) -> Tensor:
        """Objective of each set `[subsets, K]`, `[subsets]`."""
        if self.probe_weight == 0:
            return self.evidence(sets)
        assert self.probe is not None, "an objective with a probe part needs its table"
        overlap = self.probe.values(sets)
        if self.probe_weight == 1:
            return overlap
        assert self.scale is not None, "a mix needs the scale of its parts"
        evidence = (self.evidence(sets) - self.scale.evidence_mean) / self.scale.evidence_spread
        overlap = (overlap - self.scale.probe_mean) / self.scale.probe_spread
        return (1 - self.probe_weight) * evidence + self.probe_weight * overlap

    def subsets(self, sets: Tensor) -> list[Subset]:
        """Each set with the parts of its value, in the given order."""
        explained = [None] * len(sets) if self.probe is None else self.probe.explained(sets).tolist()
        return [
            Subset(
                boundaries=tuple(boundaries),
                objective=value,
                informativeness=richness,
                redundancy=redundancy,
                explained=share,
                probe=None if self.probe is None else self.probe.measured(tuple(boundaries)),
            )
            for boundaries, value, richness, redundancy, share in zip(
                sets.tolist(),
                self.values(sets).tolist(),
                mean_richness(self.richness, sets).tolist(),
                mean_pairwise(self.likeness, sets).tolist(),
                explained,
                strict=True,
            )
        ]


def mean_richness(richness: Tensor, sets: Tensor) -> Tensor:
    """Mean of a boundary's value over each set `[subsets, K]`."""
    return richness[sets].mean(dim=1)


def mean_pairwise(likeness: Tensor, sets: Tensor) -> Tensor:
    """Mean over the pairs of each set `[subsets, K]`; 0 where K is 1."""
    pairs = list(combinations(range(sets.shape[1]), 2))
    total = likeness.new_zeros(len(sets))
    flat, size = likeness.flatten(), len(likeness)
    for low, high in pairs:
        total += flat[sets[:, low] * size + sets[:, high]]
    return total / max(len(pairs), 1)


def z_scores(values: Tensor, among: Sequence[int] | None = None) -> Tensor:
    """Values minus the mean over the standard deviation of `among`; zeros where those are equal.

    Args:
        values: one per boundary, `[N + 1]`.
        among: boundaries that set mean and deviation; all when None.
    """
    chosen = values if among is None else values[torch.tensor(among)]
    spread = chosen.std(correction=0)
    # equal values differ by rounding only; dividing by that would invent a ranking.
    floor = 1e-12 * chosen.abs().max()
    return torch.zeros_like(values) if spread <= floor else (values - chosen.mean()) / spread


def mix_scale(objective: Objective, sets: Tensor) -> MixScale:
    """Scale of both parts of a mix over `sets`; a part that does not vary keeps its unit."""
    assert objective.probe is not None, "a mix has a probe part"
    evidence, overlap = objective.evidence(sets), objective.probe.values(sets)
    return MixScale(
        evidence_mean=float(evidence.mean()),
        evidence_spread=_spread(evidence),
        probe_mean=float(overlap.mean()),
        probe_spread=_spread(overlap),
    )


def _spread(values: Tensor) -> float:
    spread = float(values.std(correction=0))
    return spread if spread > 1e-12 * float(values.abs().max()) else 1.0
