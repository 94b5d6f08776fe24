"""Every search keeps its promise, and comes with its measured gap to the best of all sets."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.layer_select.choose import choose_layers
from specdec.layer_select.config import MAX_DPP_WEIGHT, ChooseConfig
from specdec.layer_select.constraints import Feasible, feasible_sets
from specdec.layer_select.dpp import dpp_kernel, greedy_map, log_dets, project_psd
from specdec.layer_select.facility import GREEDY_GUARANTEE, greedy_coverage, similarity
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.mmr import climb, greedy_mmr
from specdec.layer_select.objective import z_scores
from specdec.layer_select.search import Chooser, SearchOutcome

MakeScores = Callable[..., LayerScores]
SEEDS = range(12)


def compared(make: MakeScores, seed: int, **settings: object) -> dict[str, SearchOutcome]:
    config = ChooseConfig(resamples=0, **settings)  # type: ignore[arg-type]
    outcomes = choose_layers(make(13, seed=seed), config).compared
    return {outcome.search: outcome for outcome in outcomes}


@pytest.mark.parametrize("count", [3, 5])
def test_every_heuristic_reports_its_gap_to_the_best_of_all_sets(
    made_up_scores: MakeScores, count: int
) -> None:
    """Measured on 12 random targets of 13 layers, lambda 2, in z-units.

    The mean gap of greedy and swaps is below 0.02; k-DPP and facility location maximise something else
    and lose more on J: that is what the gap is for.
    """
    gaps: dict[str, list[float]] = {"mmr": [], "kdpp": [], "facility": []}
    for seed in SEEDS:
        found = compared(made_up_scores, seed, num_layers=count)
        assert found["exhaustive"].objective_gap == 0
        for name, outcome in found.items():
            assert outcome.objective_gap is not None
            assert outcome.objective_gap >= 0
            gap = found["exhaustive"].objective - outcome.objective
            assert outcome.objective_gap == pytest.approx(gap, abs=1e-12)
            if name in gaps:
                gaps[name].append(outcome.objective_gap)
    mean = {name: sum(values) / len(values) for name, values in gaps.items()}
    assert mean["mmr"] < 0.02
    assert mean["mmr"] <= min(mean["kdpp"], mean["facility"])
    assert max(mean.values()) > 0, "a gap that is always zero is not measured"


@pytest.mark.parametrize("count", [1, 3, 5])
def test_facility_location_keeps_its_guarantee_against_the_best_coverage(
    made_up_scores: MakeScores, count: int
) -> None:
    for seed in SEEDS:
        outcome = compared(made_up_scores, seed, num_layers=count)["facility"]
        similar = similarity(made_up_scores(13, seed=seed).cka())
        best = max(
            float(similar[:, list(s)].max(dim=1).values.sum()) for s in combinations(range(1, 14), count)
        )
        assert outcome.criterion_best == pytest.approx(best, abs=1e-9)
        assert outcome.guaranteed_ratio == GREEDY_GUARANTEE
        assert GREEDY_GUARANTEE * best <= outcome.criterion_value <= best + 1e-9


def test_facility_location_states_no_guarantee_under_constraints_that_void_it(
    made_up_scores: MakeScores,
) -> None:
    assert compared(made_up_scores, 0, min_gap=2)["facility"].guaranteed_ratio is None
    assert compared(made_up_scores, 0, forced=(4,))["facility"].guaranteed_ratio is None


def test_greedy_coverage_equals_the_naive_greedy(made_up_scores: MakeScores) -> None:
    for seed in SEEDS:
        similar = similarity(made_up_scores(13, seed=seed).cka())
        sets = Feasible(num_layers=13, count=4, allowed=tuple(range(1, 14)))
        naive: list[int] = []
        for _ in range(4):
            left = [b for b in sets.allowed if b not in naive]
            naive.append(max(left, key=lambda b: float(similar[:, [*naive, b]].max(dim=1).values.sum())))
        assert greedy_coverage(similar, sets) == sorted(naive)


def test_greedy_dpp_by_factors_equals_the_naive_greedy_by_determinants(made_up_scores: MakeScores) -> None:
    """Catches a wrong Cholesky update, which picks plausible sets."""
    for seed in SEEDS:
        scores = made_up_scores(13, seed=seed)
        kernel = dpp_kernel(scores.informativeness("matrix_entropy"), scores.cka(), 1.0)
        sets = Feasible(num_layers=13, count=5, allowed=tuple(range(1, 14)))
        naive: list[int] = []
        for _ in range(5):
            left = [b for b in sets.allowed if b not in naive]
            naive.append(max(left, key=lambda b: float(log_dets(kernel, torch.tensor([[*naive, b]]))[0])))
        assert greedy_map(kernel, sets) == sorted(naive)


def test_log_dets_are_those_of_numpy_and_the_best_set_is_at_least_greedys(made_up_scores: MakeScores) -> None:
    import numpy as np

    scores = made_up_scores(9)
    kernel = dpp_kernel(scores.informativeness("matrix_entropy"), scores.cka(), 2.0)
    sets = Feasible(num_layers=9, count=3, allowed=tuple(range(1, 10)))
    everything = sets.candidates()
    found = log_dets(kernel, everything)
    for row, value in zip(everything.tolist(), found.tolist(), strict=True):
        sign, expected = np.linalg.slogdet(kernel.numpy()[np.ix_(row, row)])
        assert sign > 0
        assert value == pytest.approx(expected, abs=1e-6)
    greedy = log_dets(kernel, torch.tensor([greedy_map(kernel, sets)]))[0]
    assert float(greedy) <= float(found.max()) + 1e-9


def test_a_kernel_that_is_not_psd_is_projected_and_dependent_sets_stay_finite() -> None:
    matrix = torch.tensor([[1.0, 1.2, 0.1], [1.2, 1.0, 0.2], [0.1, 0.2, 1.0]], dtype=torch.float64)
    projected = project_psd(matrix)
    assert torch.linalg.eigvalsh(matrix).min() < 0
    assert torch.linalg.eigvalsh(projected).min() > -1e-12
    same = torch.ones(4, 4, dtype=torch.float64)
    values = log_dets(dpp_kernel(torch.zeros(4, dtype=torch.float64), same, 1.0), torch.tensor([[0, 1, 2]]))
    assert torch.isfinite(values).all()
    sets = Feasible(num_layers=3, count=3, allowed=(0, 1, 2, 3))
    assert len(set(greedy_map(dpp_kernel(torch.zeros(4, dtype=torch.float64), same, 1.0), sets))) == 3


def test_the_largest_theta_takes_the_richest_and_stays_finite(made_up_scores: MakeScores) -> None:
    scores = made_up_scores(12)
    richness = z_scores(scores.informativeness("matrix_entropy"))
    kernel = dpp_kernel(richness, scores.cka(), MAX_DPP_WEIGHT)
    sets = Feasible(num_layers=12, count=4, allowed=tuple(range(1, 13)))
    chosen = greedy_map(kernel, sets)
    assert chosen == sorted(sorted(sets.allowed, key=lambda b: -float(richness[b]))[:4])
    assert torch.isfinite(log_dets(kernel, sets.candidates())).all()


def test_theta_zero_ignores_informativeness(made_up_scores: MakeScores) -> None:
    scores = made_up_scores(8)
    richness = scores.informativeness("matrix_entropy")
    assert torch.equal(dpp_kernel(richness, scores.cka(), 0.0), project_psd(scores.cka()))


def test_the_climb_ends_where_no_swap_is_better_and_never_below_its_start(made_up_scores: MakeScores) -> None:
    for seed in SEEDS:
        config = ChooseConfig(num_layers=5, min_gap=2, resamples=0)
        sets = feasible_sets(14, config)
        objective = Chooser(made_up_scores(14, seed=seed), config, sets, None).objective()
        start = greedy_mmr(objective, sets)
        ranked = climb(objective, sets, start)
        values = objective.values(torch.tensor(ranked)).tolist()
        assert values == sorted(values, reverse=True)
        assert values[0] >= float(objective.values(torch.tensor([start]))[0])
        assert len(ranked) == len(sets.swaps(ranked[0]))


@pytest.mark.parametrize("requested", [5, 6, 8])
def test_greedy_search_fills_tight_gaps(made_up_scores: MakeScores, requested: int) -> None:
    """Catches a greedy pick that leaves no room: 15 boundaries at gap 2 hold exactly 8."""
    for search in ("mmr", "kdpp", "facility"):
        config = ChooseConfig(num_layers=requested, min_gap=2, search=search, resamples=0)
        selection = choose_layers(made_up_scores(15), config)
        assert selection.search == search
        assert len(selection.boundaries) == requested


def test_too_many_sets_turn_auto_into_mmr_and_exhaustive_into_an_error(
    made_up_scores: MakeScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.layer_select import search

    monkeypatch.setattr(search, "EXHAUSTIVE_LIMIT", 100)
    scores = made_up_scores(12)
    selection = choose_layers(scores, ChooseConfig(num_layers=4, resamples=0))
    assert selection.search == "mmr"
    assert selection.landscape.sampled
    assert all(outcome.objective_gap is None for outcome in selection.compared)
    with pytest.raises(SpecdecError, match=r"would rank 495 sets, 100 is the limit"):
        choose_layers(scores, ChooseConfig(num_layers=4, search="exhaustive", resamples=0))
