"""How sure a choice is: the same search on other samples of the evidence.

Owns the resampling. Units are calibration batches, which hold whole texts. All draws follow the request's
seed. A probe part of the objective is not resampled: its values are those of the full set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.layer_select.config import EXHAUSTIVE_LIMIT_PROBE
from specdec.layer_select.search import Chooser
from specdec.layer_select.terms import PROBE

SIZE_FRACTIONS = (0.125, 0.25, 0.5, 1.0)
MOST_FREQUENT = 5


@dataclass(frozen=True, kw_only=True)
class Stability:
    """How the choice moves when calibration batches are resampled with replacement.

    Attributes:
        resamples: Number of resamples.
        units: Calibration batches that were resampled.
        subset_frequency: Part of resamples that choose exactly the chosen subset.
        mean_overlap: Mean part of the chosen boundaries that a resample chooses too.
        boundary_frequency: Part of resamples in which each boundary 0..N is chosen.
        most_frequent: The subsets chosen most often with their parts, most frequent first, at most five.
    """

    resamples: int
    units: int
    subset_frequency: float
    mean_overlap: float
    boundary_frequency: tuple[float, ...]
    most_frequent: tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True, kw_only=True)
class SizeStability:
    """The choice from part of the calibration batches, drawn without replacement.

    Attributes:
        fraction: Part of the batches that was asked for.
        tokens: Measured positions in that part, on average.
        sample: What the draws chose.
    """

    fraction: float
    tokens: int
    sample: Stability


@dataclass(frozen=True, kw_only=True)
class OtherChoice:
    """The choice under another condition: a domain of texts, or an estimator.

    Attributes:
        name: The condition.
        boundaries: Its choice.
        overlap: Part of the chosen boundaries that it chooses too.
        tokens: Measured positions it rests on; None where it rests on all.
    """

    name: str
    boundaries: tuple[int, ...]
    overlap: float
    tokens: int | None = None


def bootstrap(chooser: Chooser, chosen: tuple[int, ...]) -> Stability | None:
    """Resample batches with replacement; None without resamples or with a single batch."""
    units, resamples = chooser.scores.num_batches, chooser.config.resamples
    if resamples == 0 or units < 2:
        return None
    generator = torch.Generator().manual_seed(chooser.config.seed)
    draws = (torch.randint(units, (units,), generator=generator) for _ in range(resamples))
    return _tally(chooser, chosen, (torch.bincount(drawn, minlength=units) for drawn in draws))


def by_size(chooser: Chooser, chosen: tuple[int, ...]) -> tuple[SizeStability, ...]:
    """The choice from 1/8, 1/4, 1/2 and all of the batches; sizes that round to the same are given once."""
    units, scores = chooser.scores.num_batches, chooser.scores
    if chooser.config.resamples == 0:
        return ()
    generator = torch.Generator().manual_seed(chooser.config.seed)
    found: list[SizeStability] = []
    for fraction in SIZE_FRACTIONS:
        size = round(fraction * units)
        if size < 1 or (found and size == round(found[-1].fraction * units)):
            continue
        draws = chooser.config.size_draws if size < units else 1
        counts = []
        for _ in range(draws):
            picked = torch.randperm(units, generator=generator)[:size]
            counts.append(torch.bincount(picked, minlength=units))
        tokens = float(torch.stack(counts).double().mean(dim=0) @ scores.rows)
        found.append(
            SizeStability(fraction=fraction, tokens=round(tokens), sample=_tally(chooser, chosen, counts))
        )
    return tuple(found)


def by_domain(chooser: Chooser, chosen: tuple[int, ...]) -> tuple[OtherChoice, ...]:
    """The choice from the batches of each domain alone; empty where the texts are of one kind."""
    scores = chooser.scores
    if len(scores.domains) < 2:
        return ()
    found = []
    for name in scores.domains:
        counts = scores.domain_counts(name)
        best = chooser.best(chooser.objective(counts=counts))
        tokens = round(float(counts @ scores.rows))
        found.append(OtherChoice(name=name, boundaries=best, overlap=_overlap(best, chosen), tokens=tokens))
    return tuple(found)


def by_estimator(chooser: Chooser, chosen: tuple[int, ...]) -> tuple[OtherChoice, ...]:
    """The choice of each measured estimator with CKA, same lambda, search and constraints; and of the probe.

    The probe's is the set that explains most variance, where all sets can be asked.
    """
    found = []
    for name in chooser.scores.names:
        best = chooser.best(chooser.of_estimator(name))
        found.append(OtherChoice(name=name, boundaries=best, overlap=_overlap(best, chosen)))
    candidates = chooser.candidates
    if chooser.probe is not None and candidates is not None and len(candidates) <= EXHAUSTIVE_LIMIT_PROBE:
        best = tuple(candidates[int(chooser.probe.explained(candidates).argmax())].tolist())
        found.append(OtherChoice(name=PROBE, boundaries=best, overlap=_overlap(best, chosen)))
    return tuple(found)


def _overlap(subset: Sequence[int], chosen: Sequence[int]) -> float:
    return len(set(subset) & set(chosen)) / len(chosen)


def _tally(chooser: Chooser, chosen: tuple[int, ...], samples: Iterable[Tensor]) -> Stability:
    tally: dict[tuple[int, ...], int] = {}
    for counts in samples:
        best = chooser.best(chooser.objective(counts=counts))
        tally[best] = tally.get(best, 0) + 1
    total = sum(tally.values())
    often = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    per_boundary = [0] * (chooser.scores.num_layers + 1)
    for subset, count in tally.items():
        for boundary in subset:
            per_boundary[boundary] += count
    return Stability(
        resamples=total,
        units=chooser.scores.num_batches,
        subset_frequency=tally.get(chosen, 0) / total,
        mean_overlap=sum(count * _overlap(subset, chosen) for subset, count in tally.items()) / total,
        boundary_frequency=tuple(count / total for count in per_boundary),
        most_frequent=tuple((subset, count / total) for subset, count in often[:MOST_FREQUENT]),
    )
