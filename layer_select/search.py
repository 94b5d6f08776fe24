"""One request's search, repeatable on other samples of the evidence.

Owns the choice of search, the comparison of all of them on the same evidence, and `Chooser`, which
stability and the lambda sweep ask again and again. Knows scores through `LayerScores`; does not know models
or files.

`exhaustive` ranks every set by the objective; `mmr` is greedy and then climbs by swaps on the objective;
`kdpp` and `facility` maximise a criterion of their own, greedily, and are then measured by the objective.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.config import EXHAUSTIVE_LIMIT, EXHAUSTIVE_LIMIT_PROBE, ChooseConfig
from specdec.layer_select.constraints import Feasible
from specdec.layer_select.dpp import dpp_kernel, greedy_map, log_dets
from specdec.layer_select.entropy import estimator_named
from specdec.layer_select.facility import (
    GREEDY_GUARANTEE,
    coverage,
    greedy_coverage,
    has_guarantee,
    similarity,
)
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.mmr import climb, greedy_mmr
from specdec.layer_select.objective import (
    MixScale,
    Objective,
    mix_scale,
    z_scores,
)
from specdec.layer_select.probe_table import ProbeTable, SubsetProbe
from specdec.layer_select.terms import PROBE

HEURISTICS = ("mmr", "kdpp", "facility")
# random sets that stand for all where those are too many: their mean is known to 2 % of their spread.
SAMPLED_SETS = 2000
# sets drawn for a probe, which eliminates a system for each.
SAMPLED_SETS_PROBE = 300
# rounds of measuring the top of a ranking by probe, and sets in each.
PROBE_ROUNDS = 8
SETS_PER_ROUND = 4


@dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """What one search found on the full evidence.

    Attributes:
        search: Its name.
        boundaries: Its choice.
        objective: The objective's value of that choice.
        objective_gap: Best value of all sets minus this one; None where all sets are too many.
        criterion: What it maximises itself: objective, log_det or coverage.
        criterion_value: Of its choice.
        criterion_best: The largest over all sets; None where those are too many.
        guaranteed_ratio: Part of the best criterion that greedy is sure to reach; None without a guarantee.
    """

    search: str
    boundaries: tuple[int, ...]
    objective: float
    objective_gap: float | None
    criterion: str
    criterion_value: float
    criterion_best: float | None
    guaranteed_ratio: float | None = None


def resolved_search(sets: Feasible, config: ChooseConfig) -> str:
    """The search a request means; refuses an exhaustive one of too many sets."""
    fits = _all_fit(sets, config)
    if config.search == "exhaustive" and not fits:
        raise SpecdecError(
            f"search (exhaustive) would rank {sets.upper_count:,} sets, {_limit(config):,} is the limit; "
            f"choose {', '.join(HEURISTICS)}, fewer boundaries or tighter constraints"
        )
    return config.search if config.search != "auto" else "exhaustive" if fits else "mmr"


def _limit(config: ChooseConfig) -> int:
    probed = any(term.estimator is None for term in config.terms)
    return EXHAUSTIVE_LIMIT_PROBE if probed else EXHAUSTIVE_LIMIT


def _all_fit(sets: Feasible, config: ChooseConfig) -> bool:
    return sets.upper_count <= _limit(config)


class Chooser:
    """A request on given scores: what may be chosen, by which search, under which objective."""

    def __init__(
        self, scores: LayerScores, config: ChooseConfig, sets: Feasible, probe: SubsetProbe | None
    ) -> None:
        self.scores = scores
        self.config = config
        self.sets = sets
        for term in config.terms:
            if term.estimator is not None:
                estimator_named(term.estimator)
        estimator_named(config.estimator)
        self.probe_weight = sum(term.weight for term in config.terms if term.estimator is None)
        if self.probe_weight and probe is None:
            raise SpecdecError(
                f"objective ({config.objective}) needs the ridge probe, which was not run; switch it on or "
                f"drop {PROBE}"
            )
        self.probe = None if probe is None else ProbeTable(probe)
        self.search = resolved_search(sets, config)
        self.candidates = sets.candidates() if _all_fit(sets, config) else None
        self._scale: dict[float, MixScale] = {}
        self._full: dict[str, Tensor] = {}
        if self.probe is not None and self.probe_weight:
            self.probe.draw_line(self.reference_sets)

    @cached_property
    def reference_sets(self) -> Tensor:
        """All sets that may be chosen, or a random sample where they are too many, `[subsets, K]`."""
        if self.candidates is not None:
            return self.candidates
        return self.sets.sample(SAMPLED_SETS_PROBE if self.probe_weight else SAMPLED_SETS, self.config.seed)

    def objective(self, *, counts: Tensor | None = None, diversity_weight: float | None = None) -> Objective:
        """The objective on a sample of the evidence.

        Args:
            counts: how often each resampling unit counts; once each when None.
            diversity_weight: lambda; the request's when None.
        """
        weight = self.config.diversity_weight if diversity_weight is None else diversity_weight
        evidence = {term.estimator: term.weight for term in self.config.terms if term.estimator is not None}
        # a pure probe objective still shows how rich its choice is.
        evidence = evidence or {self.config.estimator: 1.0}
        total = sum(evidence.values())
        objective = Objective(
            richness=sum(
                (part / total * self._z(name, counts) for name, part in evidence.items()),
                torch.zeros(self.scores.num_layers + 1, dtype=torch.float64),
            ),
            likeness=self.scores.cka(counts),
            diversity_weight=weight,
            probe=self.probe,
            probe_weight=self.probe_weight,
        )
        if not 0 < self.probe_weight < 1:
            return objective
        # the scale is that of the full evidence, so that resamples are compared by one measure.
        if weight not in self._scale:
            full = objective if counts is None else self.objective(diversity_weight=diversity_weight)
            self._scale[weight] = mix_scale(full, self.reference_sets)
        return replace(objective, scale=self._scale[weight])

    def of_estimator(self, estimator: str) -> Objective:
        """`estimator+cka` alone, whatever the request's objective is."""
        return Objective(
            richness=self._z(estimator, None),
            likeness=self.scores.cka(),
            diversity_weight=self.config.diversity_weight,
        )

    def _z(self, estimator: str, counts: Tensor | None) -> Tensor:
        if counts is not None:
            return z_scores(self.scores.informativeness(estimator, counts), self.sets.allowed)
        # dataset-level estimators decompose anew at every call, and the sweep asks for the same values.
        if estimator not in self._full:
            values = self.scores.informativeness(estimator)
            self._full[estimator] = z_scores(values, self.sets.allowed)
        return self._full[estimator]

    def best(self, objective: Objective) -> tuple[int, ...]:
        """The choice under an objective."""
        if self.search == "exhaustive":
            assert self.candidates is not None, "an exhaustive search has its candidates"
            values = objective.values(self.candidates)
            # the first of equals: lower boundaries.
            return tuple(self.candidates[int((values == values.max()).nonzero()[0])].tolist())
        return self._heuristic(self.search, objective)

    def ranked(self, objective: Objective) -> Tensor:
        """The choice first, then its rivals by what the search maximises, `[subsets, K]`."""
        wanted = self.config.num_runners_up + 1
        if self.search == "exhaustive":
            assert self.candidates is not None, "an exhaustive search has its candidates"
            order = torch.sort(objective.values(self.candidates), descending=True, stable=True).indices
            return self.candidates[order[:wanted]]
        if self.search == "mmr":
            found = climb(objective, self.sets, greedy_mmr(objective, self.sets))
            return torch.tensor(found[:wanted])
        neighbours = self.sets.swaps(self._heuristic(self.search, objective))
        values = self._criterion(self.search, objective, neighbours[1:])
        order = 1 + torch.sort(values, descending=True, stable=True).indices
        return neighbours[[0, *order.tolist()[: wanted - 1]]]

    def settle(self) -> Tensor:
        """Rank, and measure by probe what stands at the top, until that is what was measured.

        Returns:
            The choice first, then its rivals, `[subsets, K]`; without a probe part, simply `ranked`.
        """
        left = PROBE_ROUNDS
        while True:
            ranked = self.ranked(self.objective())
            if self.probe is None or not self.probe_weight:
                return ranked
            top = [tuple(row) for row in ranked[:SETS_PER_ROUND].tolist()]
            if left == 0 or all(self.probe.measured(boundaries) for boundaries in top):
                return ranked
            self.probe.measure(ranked[:SETS_PER_ROUND])
            # measured values take the place of the line's, so the scale of a mix moves too.
            self._scale.clear()
            left -= 1

    def compare(self, objective: Objective) -> list[SearchOutcome]:
        """Every search on the same evidence, with its measured gap to the best of all sets."""
        values = None if self.candidates is None else objective.values(self.candidates)
        best = None if values is None else float(values.max())
        names = ("exhaustive", *HEURISTICS) if self.candidates is not None else HEURISTICS
        outcomes = []
        for name in names:
            if name == "exhaustive":
                assert self.candidates is not None, "all sets are at hand"
                assert values is not None, "and were valued"
                chosen = tuple(self.candidates[int((values == values.max()).nonzero()[0])].tolist())
            else:
                chosen = self._heuristic(name, objective)
            row = torch.tensor([chosen])
            value = float(objective.values(row)[0])
            top = best
            if name in ("kdpp", "facility") and self.candidates is not None:
                top = float(self._criterion(name, objective, self.candidates).max())
            outcomes.append(
                SearchOutcome(
                    search=name,
                    boundaries=chosen,
                    objective=value,
                    objective_gap=None if best is None else max(0.0, best - value),
                    criterion={"kdpp": "log_det", "facility": "coverage"}.get(name, "objective"),
                    criterion_value=float(self._criterion(name, objective, row)[0]),
                    criterion_best=top,
                    guaranteed_ratio=(
                        GREEDY_GUARANTEE if name == "facility" and has_guarantee(self.sets) else None
                    ),
                )
            )
        return outcomes

    def _heuristic(self, name: str, objective: Objective) -> tuple[int, ...]:
        if name == "kdpp":
            return tuple(greedy_map(self._kernel(objective), self.sets))
        if name == "facility":
            return tuple(greedy_coverage(similarity(objective.likeness), self.sets))
        return climb(objective, self.sets, greedy_mmr(objective, self.sets))[0]

    def _criterion(self, name: str, objective: Objective, sets: Tensor) -> Tensor:
        if name == "kdpp":
            return log_dets(self._kernel(objective), sets)
        if name == "facility":
            return coverage(similarity(objective.likeness), sets)
        return objective.values(sets)

    def _kernel(self, objective: Objective) -> Tensor:
        return dpp_kernel(objective.richness, objective.likeness, self.config.dpp_weight)
