"""Facility location: the K boundaries that best stand for all depths.

Owns coverage(S) = sum over boundaries l of max over j in S of R_lj, R being CKA with negative values set to
0, and its greedy maximisation. Coverage is monotone submodular, so greedy reaches at least 1 - 1/e of the
best (Nemhauser, Wolsey and Fisher 1978) where any K boundaries may be chosen; with a minimum gap or forced
boundaries that promise is lost. Informativeness plays no part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.layer_select.constraints import Feasible

GREEDY_GUARANTEE = 1 - 1 / math.e


def similarity(likeness: Tensor) -> Tensor:
    """CKA as a gain that is never negative."""
    return likeness.clamp_min(0)


def coverage(similar: Tensor, sets: Tensor) -> Tensor:
    """How well each set `[subsets, K]` stands for all boundaries, `[subsets]`, at most N + 1."""
    total = similar.new_zeros(len(sets))
    for row in similar:
        total += row[sets].max(dim=1).values
    return total


def greedy_coverage(similar: Tensor, sets: Feasible) -> list[int]:
    """Add the boundary that raises coverage most until K are chosen, never into a corner; ascending."""
    chosen = list(sets.forced)
    covered = similar[:, chosen].max(dim=1).values if chosen else similar.new_zeros(len(similar))
    while len(chosen) < sets.count:
        gain = torch.maximum(similar, covered[:, None]).sum(dim=0)
        order = torch.sort(gain, descending=True, stable=True).indices.tolist()
        best = next(b for b in order if b in sets.free and b not in chosen and sets.leaves_room([*chosen, b]))
        chosen.append(best)
        covered = torch.maximum(covered, similar[:, best])
    return sorted(chosen)


def has_guarantee(sets: Feasible) -> bool:
    """Whether greedy's 1 - 1/e holds for these constraints."""
    return sets.min_gap == 1 and not sets.forced
