"""The choice of K boundaries from their scores.

Owns the objective, the search and the stability estimate. Knows scores only as numbers per boundary; does not
know models, texts or files.

J(S) = mean z-scored informativeness over S - lambda * mean pairwise CKA inside S, to be maximised. z-scores
are taken over the boundaries that may be chosen. Up to K = 4 all subsets are tried. Beyond, greedy maximal
marginal relevance (Carbonell and Goldstein 1998) adds argmax of I_i - lambda * max CKA to what is chosen,
then single swaps improve J until none does; the runners-up are its single swaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.config import EXHAUSTIVE_MAX, ChooseConfig
from specdec.layer_select.entropy import estimator_named
from specdec.layer_select.score import LayerScores


@dataclass(frozen=True, kw_only=True)
class Subset:
    """A candidate set of boundaries with the parts of its objective."""

    boundaries: tuple[int, ...]
    objective: float
    informativeness: float
    redundancy: float


@dataclass(frozen=True, kw_only=True)
class Stability:
    """How the choice moves when calibration batches are resampled with replacement.

    Attributes:
        resamples: Number of resamples.
        units: Calibration batches that were resampled.
        subset_frequency: Part of resamples that choose exactly the chosen subset.
        boundary_frequency: Part of resamples in which each boundary 0..N is chosen.
        most_frequent: The subsets chosen most often with their parts, most frequent first, at most five.
    """

    resamples: int
    units: int
    subset_frequency: float
    boundary_frequency: tuple[float, ...]
    most_frequent: tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True, kw_only=True)
class LayerSelection:
    """The decision, its rivals and how sure it is.

    `stability` is None when no resamples were asked for or there is only one calibration batch.
    """

    best: Subset
    runners_up: tuple[Subset, ...]
    search: str
    stability: Stability | None

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The chosen boundaries, ascending."""
        return self.best.boundaries


def choose_layers(scores: LayerScores, config: ChooseConfig | None = None) -> LayerSelection:
    """Choose boundaries that are informative and unlike one another."""
    config = config or ChooseConfig()
    estimator_named(config.estimator)
    allowed = allowed_boundaries(scores.num_layers, config)
    ranked = _search(scores.informativeness(config.estimator), scores.cka(), allowed, config)
    return LayerSelection(
        best=ranked[0],
        runners_up=tuple(ranked[1 : config.num_runners_up + 1]),
        search="exhaustive" if config.num_layers <= EXHAUSTIVE_MAX else "greedy_mmr_swaps",
        stability=_stability(scores, ranked[0], allowed, config),
    )


def allowed_boundaries(num_layers: int, config: ChooseConfig) -> list[int]:
    """Boundaries that may be chosen, ascending; refuses a request that no subset can meet."""
    if config.num_layers > num_layers:
        raise SpecdecError(f"target has {num_layers} layers, {config.num_layers} requested; ask for fewer")
    allowed = sorted(set(range(1, num_layers + 1) if config.allowed is None else config.allowed))
    for boundary in allowed:
        if not 0 <= boundary <= num_layers:
            raise SpecdecError(f"allowed boundary ({boundary}) must be in 0..{num_layers}")
    room = _most_with_gap(allowed, config.min_gap)
    if room < config.num_layers:
        raise SpecdecError(
            f"{len(allowed)} allowed boundaries with min_gap {config.min_gap} hold at most {room}, "
            f"{config.num_layers} requested; lower min_gap or allow more"
        )
    return allowed


def _most_with_gap(sorted_boundaries: Sequence[int], min_gap: int) -> int:
    count, last = 0, None
    for boundary in sorted_boundaries:
        if last is None or boundary - last >= min_gap:
            count, last = count + 1, boundary
    return count


def z_scores(values: Tensor) -> Tensor:
    """Values minus their mean over their standard deviation; zeros where all are equal."""
    spread = values.std(correction=0)
    # equal values differ by rounding only; dividing by that would invent a ranking.
    floor = 1e-12 * values.abs().max()
    return torch.zeros_like(values) if spread <= floor else (values - values.mean()) / spread


def _search(informativeness: Tensor, cka: Tensor, allowed: list[int], config: ChooseConfig) -> list[Subset]:
    """The best subset first, then its runners-up."""
    index = torch.tensor(allowed)
    richness = z_scores(informativeness[index])
    likeness = cka[index][:, index]
    if config.num_layers <= EXHAUSTIVE_MAX:
        best: list[Subset] = []
        for candidates in _candidates(allowed, config):
            best += _rank(candidates, richness, likeness, allowed, config)
            best = sorted(best, key=lambda s: (-s.objective, s.boundaries))[: config.num_runners_up + 1]
        return best
    chosen = _greedy(richness, likeness, allowed, config)
    while True:
        ranked = _rank(_swaps(chosen, allowed, config.min_gap), richness, likeness, allowed, config)
        better = [allowed.index(boundary) for boundary in ranked[0].boundaries]
        # the unchanged set is among its own swaps, so the objective never falls and the loop ends.
        if better == chosen:
            return ranked
        chosen = better


def _candidates(allowed: list[int], config: ChooseConfig) -> Iterator[Tensor]:
    """Position tuples `[subsets, K]` that keep the gap, one block for each smallest position."""
    positions = torch.arange(len(allowed))
    values = torch.tensor(allowed)
    for first in range(len(allowed) - config.num_layers + 1):
        rest = positions[first + 1 :]
        tail = (
            torch.combinations(rest, config.num_layers - 1) if config.num_layers > 1 else rest.new_empty(1, 0)
        )
        block = torch.cat([positions.new_full((len(tail), 1), first), tail], dim=1)
        wide = (values[block].diff(dim=1) >= config.min_gap).all(dim=1)
        if bool(wide.any()):
            yield block[wide]


def _rank(
    candidates: Tensor, richness: Tensor, likeness: Tensor, allowed: list[int], config: ChooseConfig
) -> list[Subset]:
    """The best of `candidates` (positions, `[subsets, K]`), best first, lower boundaries first in a tie."""
    mean_richness = richness[candidates].mean(dim=1)
    pairs = list(combinations(range(candidates.shape[1]), 2))
    redundancy = torch.zeros_like(mean_richness)
    for i, j in pairs:
        redundancy += likeness[candidates[:, i], candidates[:, j]] / len(pairs)
    objective = mean_richness - config.diversity_weight * redundancy
    order = torch.sort(objective, descending=True, stable=True).indices[: config.num_runners_up + 1]
    return [
        Subset(
            boundaries=tuple(allowed[position] for position in candidates[row].tolist()),
            objective=float(objective[row]),
            informativeness=float(mean_richness[row]),
            redundancy=float(redundancy[row]),
        )
        for row in order.tolist()
    ]


def _greedy(richness: Tensor, likeness: Tensor, allowed: list[int], config: ChooseConfig) -> list[int]:
    """Positions picked by maximal marginal relevance, never into a corner where K no longer fit."""
    chosen: list[int] = []
    while len(chosen) < config.num_layers:
        gain = richness.clone()
        if chosen:
            gain -= config.diversity_weight * likeness[:, chosen].max(dim=1).values
        for position in torch.sort(gain, descending=True, stable=True).indices.tolist():
            if position not in chosen and _still_fits([*chosen, position], allowed, config):
                chosen.append(position)
                break
    return sorted(chosen)


def _still_fits(chosen: list[int], allowed: list[int], config: ChooseConfig) -> bool:
    """Whether the chosen positions keep the gap and leave room for the rest."""
    taken = sorted(allowed[position] for position in chosen)
    if any(b - a < config.min_gap for a, b in pairwise(taken)):
        return False
    free = [b for b in allowed if all(abs(b - t) >= config.min_gap for t in taken)]
    return len(taken) + _most_with_gap(free, config.min_gap) >= config.num_layers


def _swaps(chosen: list[int], allowed: list[int], min_gap: int) -> Tensor:
    """`chosen` itself, then all position sets `[sets, K]` that differ in one member and keep the gap."""
    found = [chosen]
    for out in chosen:
        kept = [position for position in chosen if position != out]
        for new in range(len(allowed)):
            if new not in chosen:
                candidate = sorted([*kept, new])
                if all(allowed[b] - allowed[a] >= min_gap for a, b in pairwise(candidate)):
                    found.append(candidate)
    return torch.tensor(found)


def _stability(
    scores: LayerScores, best: Subset, allowed: list[int], config: ChooseConfig
) -> Stability | None:
    units = scores.num_batches
    if config.resamples == 0 or units < 2:
        return None
    generator = torch.Generator().manual_seed(config.seed)
    tally: dict[tuple[int, ...], int] = {}
    for _ in range(config.resamples):
        drawn = torch.randint(units, (units,), generator=generator)
        counts = torch.bincount(drawn, minlength=units)
        ranked = _search(
            scores.informativeness(config.estimator, counts), scores.cka(counts), allowed, config
        )
        tally[ranked[0].boundaries] = tally.get(ranked[0].boundaries, 0) + 1
    often = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    per_boundary = [0] * (scores.num_layers + 1)
    for subset, count in tally.items():
        for boundary in subset:
            per_boundary[boundary] += count
    return Stability(
        resamples=config.resamples,
        units=units,
        subset_frequency=tally.get(best.boundaries, 0) / config.resamples,
        boundary_frequency=tuple(count / config.resamples for count in per_boundary),
        most_frequent=tuple((subset, count / config.resamples) for subset, count in often[:5]),
    )
