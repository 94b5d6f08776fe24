"""Greedy maximal marginal relevance, and the climb from any set by single swaps.

Owns both. MMR (Carbonell and Goldstein 1998) adds argmax of I_i - lambda * max CKA to what is chosen; the
climb then takes the best single swap under the objective until none improves it, so its result is at least
as good as its start and as all its neighbours.
"""

from __future__ import annotations

import torch

from specdec.layer_select.constraints import Feasible
from specdec.layer_select.objective import Objective

# a rise this small is rounding; climbing on it could run in a circle.
ROUNDING = 1e-12


def greedy_mmr(objective: Objective, sets: Feasible) -> list[int]:
    """Boundaries picked one by one, never into a corner where K no longer fit; ascending."""
    chosen = list(sets.forced)
    while len(chosen) < sets.count:
        gain = objective.richness.clone()
        if chosen:
            gain -= objective.diversity_weight * objective.likeness[:, chosen].max(dim=1).values
        order = torch.sort(gain, descending=True, stable=True).indices.tolist()
        best = next(b for b in order if b in sets.free and b not in chosen and sets.leaves_room([*chosen, b]))
        chosen.append(best)
    return sorted(chosen)


def climb(objective: Objective, sets: Feasible, start: list[int]) -> list[tuple[int, ...]]:
    """The set that no single swap improves, then its swaps, best first."""
    chosen = tuple(start)
    while True:
        neighbours = sets.swaps(chosen)
        values = objective.values(neighbours)
        best = int(values.argmax())
        if values[best] <= values[0] + ROUNDING * max(1.0, abs(float(values[0]))):
            order = (1 + torch.sort(values[1:], descending=True, stable=True).indices).tolist()
            return [tuple(row) for row in neighbours[[0, *order]].tolist()]
        chosen = tuple(neighbours[best].tolist())
