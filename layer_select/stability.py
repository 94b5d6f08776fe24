"""How sure a choice is: the same search on other samples of the evidence.

Owns the resampling. Units are calibration batches, which hold whole texts. All draws follow the request's
seed. The probe is fitted once: in a mix its part keeps the values of the full set, and where it decides alone
the positions it is judged on are resampled instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.layer_select.search import Chooser
from specdec.layer_select.terms import PROBE

SIZE_FRACTIONS = (0.125, 0.25, 0.5, 1.0)
MOST_FREQUENT = 5


@dataclass(frozen=True, kw_only=True)
class Stability:
    """How the choice moves when part of the evidence is drawn anew.

    Attributes:
        resamples: Number of resamples.
        units: How many there were to draw from.
        unit: What they are.
        subset_frequency: Part of resamples that choose exactly the chosen subset.
        mean_overlap: Mean part of the chosen boundaries that a resample chooses too.
        boundary_frequency: Part of resamples in which each boundary 0..N is chosen.
        most_frequent: The subsets chosen most often with their parts, most frequent first, at most five.
    """

    resamples: int
    units: int
    unit: str
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
    """Resample batches with replacement; None without resamples or with a single batch.

    Where the probe alone decides, its held-out rows are resampled, and the measured sets compete.
    """
    units, resamples = chooser.scores.num_batches, chooser.config.resamples
    if resamples == 0:
        return None
    if chooser.probe_weight == 1:
        return _bootstrap_probe(chooser, chosen)
    if units < 2:
        return None
    draws = _draws(chooser, units)
    kind = "calibration batches" + (", the probe part fixed" if chooser.probe_weight else "")
    choices = [chooser.best(chooser.objective(counts=counts)) for counts in draws]
    return _tally(chooser, chosen, choices, units, kind)


def _bootstrap_probe(chooser: Chooser, chosen: tuple[int, ...]) -> Stability:
    assert chooser.probe is not None, "a probe objective has its table"
    keys, by_row = chooser.probe.measured_rows(chooser.sets.count)
    legal = [index for index, key in enumerate(keys) if chooser.sets.holds(key)]
    counts = torch.stack(_draws(chooser, by_row.shape[1])).double()
    best = (counts @ by_row[legal].mT).argmax(dim=1).tolist()
    choices = [keys[legal[index]] for index in best]
    kind = f"held-out positions of the probe, {len(legal)} measured sets"
    return _tally(chooser, chosen, choices, by_row.shape[1], kind)


def _draws(chooser: Chooser, units: int) -> list[Tensor]:
    """How often each unit is drawn in each resample, `[units]` each."""
    generator = torch.Generator().manual_seed(chooser.config.seed)
    return [
        torch.bincount(torch.randint(units, (units,), generator=generator), minlength=units)
        for _ in range(chooser.config.resamples)
    ]


def by_size(chooser: Chooser, chosen: tuple[int, ...]) -> tuple[SizeStability, ...]:
    """The choice from 1/8, 1/4, 1/2 and all of the batches; sizes that round to the same are given once.

    Empty where the probe alone decides: it is fitted once, on all texts.
    """
    units, scores = chooser.scores.num_batches, chooser.scores
    if chooser.config.resamples == 0 or chooser.probe_weight == 1:
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
        choices = [chooser.best(chooser.objective(counts=each)) for each in counts]
        sample = _tally(chooser, chosen, choices, units, "calibration batches")
        found.append(SizeStability(fraction=fraction, tokens=round(tokens), sample=sample))
    return tuple(found)


def by_domain(chooser: Chooser, chosen: tuple[int, ...]) -> tuple[OtherChoice, ...]:
    """The choice from the batches of each domain alone.

    Empty where the texts are of one kind, or where the probe alone decides.
    """
    scores = chooser.scores
    if len(scores.domains) < 2 or chooser.probe_weight == 1:
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

    The probe's is the set that explains most variance, where all sets were asked for the objective.
    """
    found = []
    for name in chooser.scores.names:
        best = chooser.best(chooser.of_estimator(name))
        found.append(OtherChoice(name=name, boundaries=best, overlap=_overlap(best, chosen)))
    candidates = chooser.candidates
    if chooser.probe is not None and chooser.probe_weight and candidates is not None:
        best = tuple(candidates[int(chooser.probe.explained(candidates).argmax())].tolist())
        found.append(OtherChoice(name=PROBE, boundaries=best, overlap=_overlap(best, chosen)))
    return tuple(found)


def _overlap(subset: Sequence[int], chosen: Sequence[int]) -> float:
    return len(set(subset) & set(chosen)) / len(chosen)


def _tally(
    chooser: Chooser, chosen: tuple[int, ...], choices: Sequence[tuple[int, ...]], units: int, kind: str
) -> Stability:
    tally = Counter(choices)
    total = len(choices)
    often = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    per_boundary = [0] * (chooser.scores.num_layers + 1)
    for subset, count in tally.items():
        for boundary in subset:
            per_boundary[boundary] += count
    return Stability(
        resamples=total,
        units=units,
        unit=kind,
        subset_frequency=tally[chosen] / total,
        mean_overlap=sum(count * _overlap(subset, chosen) for subset, count in tally.items()) / total,
        boundary_frequency=tuple(count / total for count in per_boundary),
        most_frequent=tuple((subset, count / total) for subset, count in often[:MOST_FREQUENT]),
    )
