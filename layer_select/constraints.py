"""Which sets of K boundaries may be chosen.

Owns the constraints (allowed, forced and forbidden boundaries, minimum gap, what a serving engine captures),
their contradictions, and the enumeration of the sets they leave. Does not know scores.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations, pairwise

import numpy as np
import torch
from torch import Tensor

from specdec.engine_limits import EngineLimit, engine_limit
from specdec.errors import SpecdecError
from specdec.layer_select.config import ChooseConfig


@dataclass(frozen=True, kw_only=True)
class Feasible:
    """The sets of boundaries that may be chosen; at least one exists.

    Attributes:
        num_layers: Decoder layers N of the target.
        count: Boundaries in a set, K.
        allowed: Boundaries that may be chosen, ascending; the forced ones are among them.
        forced: Boundaries in every set, ascending.
        min_gap: Smallest distance between two of a set.
        engine: The engine limit that is already taken into account.
    """

    num_layers: int
    count: int
    allowed: tuple[int, ...]
    forced: tuple[int, ...] = ()
    min_gap: int = 1
    engine: EngineLimit | None = None

    @cached_property
    def free(self) -> tuple[int, ...]:
        """Boundaries that can join the forced ones."""
        return _far_from(self.allowed, self.forced, self.min_gap)

    @property
    def upper_count(self) -> int:
        """Number of sets before the gaps between free boundaries are looked at."""
        return math.comb(len(self.free), self.count - len(self.forced))

    def candidates(self) -> Tensor:
        """All sets, `[subsets, K]`, each ascending, in lexicographic order."""
        picks = self.count - len(self.forced)
        flat = np.fromiter(
            chain.from_iterable(combinations(self.free, picks)),
            dtype=np.int64,
            count=self.upper_count * picks,
        )
        sets = flat.reshape(self.upper_count, picks)
        if self.forced:
            fixed = np.broadcast_to(np.array(self.forced, dtype=np.int64), (len(sets), len(self.forced)))
            sets = np.sort(np.concatenate([sets, fixed], axis=1), axis=1)
            sets = sets[np.lexsort(sets.T[::-1])]
        if self.min_gap > 1 and self.count > 1:
            sets = sets[(np.diff(sets, axis=1) >= self.min_gap).all(axis=1)]
        return torch.from_numpy(np.ascontiguousarray(sets))

    def holds(self, chosen: Sequence[int]) -> bool:
        """Whether `chosen` is one of the sets that may be chosen."""
        whole = len(chosen) == self.count and set(chosen) <= set(self.allowed)
        return whole and self.leaves_room(chosen)

    def leaves_room(self, chosen: Sequence[int]) -> bool:
        """Whether `chosen` with the forced boundaries keeps the gap and can be completed to K."""
        taken = sorted({*chosen, *self.forced})
        if len(taken) > self.count or any(b - a < self.min_gap for a, b in pairwise(taken)):
            return False
        return len(taken) + _most(_far_from(self.allowed, taken, self.min_gap), self.min_gap) >= self.count

    def swaps(self, chosen: Sequence[int]) -> Tensor:
        """`chosen` itself, then every set that differs from it in one member, `[subsets, K]`."""
        found = [sorted(chosen)]
        for out in chosen:
            if out in self.forced:
                continue
            kept = [boundary for boundary in chosen if boundary != out]
            found += [
                sorted([*kept, new])
                for new in _far_from(self.allowed, kept, self.min_gap)
                if new not in chosen
            ]
        return torch.tensor(found)

    def sample(self, draws: int, seed: int) -> Tensor:
        """Different random sets in lexicographic order, `[subsets, K]`, at most `draws`."""
        generator = random.Random(seed)
        found: set[tuple[int, ...]] = set()
        for _ in range(draws):
            chosen = list(self.forced)
            while len(chosen) < self.count:
                order = generator.sample(self.allowed, len(self.allowed))
                chosen.append(next(b for b in order if b not in chosen and self.leaves_room([*chosen, b])))
            found.add(tuple(sorted(chosen)))
        return torch.tensor(sorted(found))


def feasible_sets(num_layers: int, config: ChooseConfig, model_type: str | None = None) -> Feasible:
    """Read the constraints of a request; refuses one that no set can meet, saying which part of it.

    Args:
        num_layers: decoder layers N of the target.
        config: the request.
        model_type: the target's, for engines whose families differ.
    """
    count = config.num_layers
    if count > num_layers:
        raise SpecdecError(f"target has {num_layers} layers, {count} requested; lower num_layers")
    for name, given in (
        ("allowed", config.allowed or ()),
        ("forced", config.forced),
        ("forbidden", config.forbidden),
    ):
        for boundary in given:
            if not 0 <= boundary <= num_layers:
                raise SpecdecError(f"{name} boundary ({boundary}) must be in 0..{num_layers}")
    forced, forbidden = sorted(set(config.forced)), set(config.forbidden)
    # a boundary that is asked for by name need not be allowed by name as well.
    base = {*range(1, num_layers + 1), *forced} if config.allowed is None else set(config.allowed)
    for boundary in forced:
        if boundary in forbidden:
            raise SpecdecError(f"boundary ({boundary}) is both forced and forbidden; drop one of the two")
        if boundary not in base:
            raise SpecdecError(f"forced boundary ({boundary}) is not among the allowed {sorted(base)}")
    limit = None
    if config.engine is not None:
        limit = engine_limit(config.engine, num_layers, model_type)
        _require_engine_fits(limit, forced, count)
        base &= set(limit.boundaries)
    sets = Feasible(
        num_layers=num_layers,
        count=count,
        allowed=tuple(sorted(base - forbidden)),
        forced=tuple(forced),
        min_gap=config.min_gap,
        engine=limit,
    )
    _require_room(sets)
    return sets


def _require_engine_fits(limit: EngineLimit, forced: Sequence[int], count: int) -> None:
    if limit.num_layers is not None and count != limit.num_layers:
        raise SpecdecError(f"engine ({limit.engine}) serves {limit.num_layers} boundaries, {count} requested")
    for boundary in forced:
        if boundary not in limit.boundaries:
            raise SpecdecError(
                f"forced boundary ({boundary}) cannot be captured by {limit.engine}: {limit.reason}"
            )


def _require_room(sets: Feasible) -> None:
    if len(sets.forced) > sets.count:
        raise SpecdecError(f"{len(sets.forced)} boundaries are forced, {sets.count} requested; force fewer")
    for low, high in pairwise(sets.forced):
        if high - low < sets.min_gap:
            raise SpecdecError(f"forced boundaries {low} and {high} are closer than min_gap ({sets.min_gap})")
    room = len(sets.forced) + _most(sets.free, sets.min_gap)
    if room < sets.count:
        of_engine = "" if sets.engine is None else f" (engine {sets.engine.engine}: {sets.engine.reason})"
        raise SpecdecError(
            f"{len(sets.allowed)} allowed boundaries{of_engine} with min_gap {sets.min_gap} hold at most "
            f"{room}, {sets.count} requested; lower min_gap or allow more"
        )


def _far_from(boundaries: Sequence[int], taken: Sequence[int], min_gap: int) -> tuple[int, ...]:
    return tuple(b for b in boundaries if all(abs(b - t) >= min_gap for t in taken))


def _most(ascending: Sequence[int], min_gap: int) -> int:
    """How many of the boundaries fit with the gap: taking each as early as possible is optimal on a line."""
    count, last = 0, None
    for boundary in ascending:
        if last is None or boundary - last >= min_gap:
            count, last = count + 1, boundary
    return count
