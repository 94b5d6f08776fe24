"""The tap sets a study compares: baselines a selection has to beat, and sets named by the user.

Owns the list of sets and the order of work. Knows nothing of training. An *arm* is one tap set under one
seed, and one recipe where recipes are compared; a tap set that several rules arrive at is trained once and
carries all their names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.errors import SpecdecError
from specdec.layer_select.references import DEFAULT, LAST, LAST_THIRD, UNIFORM, reference_subsets
from specdec.train.study_recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class TapSet:
    """Boundaries, ascending, and the names of the rules that lead to them."""

    boundaries: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One head to train."""

    boundaries: tuple[int, ...]
    seed: int
    recipe: Recipe | None = None

    @property
    def key(self) -> str:
        """Its folder's name."""
        recipe = "" if self.recipe is None else f".{self.recipe.name}"
        return "-".join(str(boundary) for boundary in self.boundaries) + f"{recipe}.seed{self.seed}"


def is_rule(name: str) -> bool:
    """Whether the study itself gives sets that name."""
    return name in (DEFAULT, UNIFORM, LAST_THIRD, LAST) or re.fullmatch(r"random\d+", name) is not None


def random_taps(num_layers: int, count: int, draws: int, seed: int) -> list[tuple[int, ...]]:
    """Different random subsets of boundaries 1..N."""
    generator = random.Random(seed)
    found: list[tuple[int, ...]] = []
    # a shallow target may have fewer subsets than were asked for
    for _ in range(100 * draws):
        drawn = tuple(sorted(generator.sample(range(1, num_layers + 1), count)))
        if drawn not in found:
            found.append(drawn)
        if len(found) == draws:
            break
    return found


def plan_tap_sets(
    num_layers: int,
    counts: Sequence[int],
    named: Sequence[tuple[str, tuple[int, ...]]],
    *,
    random_draws: int,
    random_seed: int,
) -> list[TapSet]:
    """All tap sets of a study, those named by the user first.

    Args:
        num_layers: the target's layers, N.
        counts: numbers of taps K that get baselines; the first also gets the random sets.
        named: (name, boundaries) of the user's choices.
        random_draws: random sets of the first K.
        random_seed: seed of their draw.

    Raises:
        SpecdecError: a K or a boundary the target does not have, or repeated boundaries.
    """
    for count in counts:
        if not 1 <= count <= num_layers:
            raise SpecdecError(f"--k ({count}) must be in 1..{num_layers}, the target's layers")
    wanted: list[tuple[str, tuple[int, ...]]] = []
    if random_draws < 0:
        raise SpecdecError(f"--random-sets ({random_draws}) must be at least 0")
    for name, boundaries in named:
        check_taps(name, boundaries, num_layers)
        if is_rule(name) or [other for other, _ in named].count(name) > 1:
            raise SpecdecError(f"--layers {name} ({list(boundaries)}) needs a name that no other set has")
        wanted.append((name, tuple(sorted(boundaries))))
    for position, count in enumerate(counts):
        wanted += reference_subsets(num_layers, count).items()
        if position == 0:
            draws = random_taps(num_layers, count, random_draws, random_seed)
            wanted += [(f"random{number + 1}", drawn) for number, drawn in enumerate(draws)]
    names: dict[tuple[int, ...], list[str]] = {}
    for name, boundaries in wanted:
        names.setdefault(boundaries, []).append(name)
    return [TapSet(boundaries=boundaries, names=tuple(found)) for boundaries, found in names.items()]


def order_arms(tap_sets: Sequence[TapSet], seeds: Mapping[int, int]) -> list[Arm]:
    """All arms, one seed of every set before the next: a study cut short is still balanced.

    Args:
        tap_sets: the sets.
        seeds: seeds for each number of taps.
    """
    rounds = max((seeds[len(taps.boundaries)] for taps in tap_sets), default=0)
    return [
        Arm(boundaries=taps.boundaries, seed=seed)
        for seed in range(rounds)
        for taps in tap_sets
        if seed < seeds[len(taps.boundaries)]
    ]


def recipe_arms(boundaries: tuple[int, ...], recipes: Sequence[Recipe], seeds: int) -> list[Arm]:
    """The study's own training and every recipe on one tap set, one seed of all before the next."""
    return [
        Arm(boundaries=boundaries, seed=seed, recipe=recipe)
        for seed in range(seeds)
        for recipe in (None, *recipes)
    ]


def check_taps(name: str, boundaries: Sequence[int], num_layers: int) -> None:
    """Refuse boundaries that the target does not have, or that are repeated.

    Raises:
        SpecdecError: naming the set.
    """
    if not boundaries or len(set(boundaries)) != len(boundaries):
        raise SpecdecError(f"--layers {name} ({list(boundaries)}) must be different boundaries")
    for boundary in boundaries:
        if not 0 <= boundary <= num_layers:
            raise SpecdecError(f"--layers {name}: boundary {boundary} must be in 0..{num_layers}")
