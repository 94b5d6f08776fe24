"""The choice is the best of all sets, small targets are handled (fault B02), requests are obeyed."""

from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.layer_select.choose import choose_layers
from specdec.layer_select.config import ChooseConfig
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.objective import z_scores

MakeScores = Callable[..., LayerScores]


def objective(
    scores: LayerScores, subset: tuple[int, ...], weight: float, estimator: str = "matrix_entropy"
) -> float:
    """J(S) in plain Python, z-scored over boundaries 1..N."""
    values = scores.informativeness(estimator).tolist()[1:]
    mean = sum(values) / len(values)
    spread = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
    cka = scores.cka()
    richness = sum((values[b - 1] - mean) / spread for b in subset) / len(subset)
    pairs = list(combinations(subset, 2))
    return richness - weight * (sum(cka[i, j].item() for i, j in pairs) / len(pairs) if pairs else 0.0)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("weight", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("min_gap", [1, 2])
def test_exhaustive_search_equals_brute_force_with_its_runners_up(
    made_up_scores: MakeScores, num_layers: int, weight: float, min_gap: int
) -> None:
    scores = made_up_scores(11)
    config = ChooseConfig(num_layers=num_layers, diversity_weight=weight, min_gap=min_gap, resamples=0)
    selection = choose_layers(scores, config)
    legal = [
        s for s in combinations(range(1, 12), num_layers) if all(b - a >= min_gap for a, b in pairwise(s))
    ]
    ranked = sorted(legal, key=lambda s: -objective(scores, s, weight))
    found = [selection.best, *selection.runners_up]
    assert selection.search == "exhaustive"
    assert [s.boundaries for s in found] == ranked[: len(found)]
    assert len(found) == min(len(ranked), config.num_runners_up + 1)
    for subset in found:
        assert subset.objective == pytest.approx(objective(scores, subset.boundaries, weight), abs=1e-9)
    assert selection.landscape.sets == len(legal)
    assert sum(selection.landscape.counts) == len(legal)
    mean = sum(objective(scores, s, weight) for s in legal) / len(legal)
    assert selection.landscape.mean == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("search", ["auto", "mmr", "kdpp", "facility"])
@pytest.mark.parametrize("num_layers", range(1, 13))
def test_any_small_target_gives_distinct_sorted_boundaries_or_says_it_is_too_small(
    made_up_scores: MakeScores, num_layers: int, search: str
) -> None:
    """Catches B02: default formulas give negative or duplicate ids on shallow targets."""
    scores = made_up_scores(num_layers)
    for requested in range(1, 6):
        for min_gap in (1, 2, 3):
            config = ChooseConfig(num_layers=requested, min_gap=min_gap, search=search, resamples=0)
            if requested > num_layers:
                with pytest.raises(SpecdecError, match=f"target has {num_layers} layers, {requested}"):
                    choose_layers(scores, config)
            elif (requested - 1) * min_gap + 1 > num_layers:
                with pytest.raises(SpecdecError, match=f"with min_gap {min_gap} hold at most"):
                    choose_layers(scores, config)
            else:
                chosen = choose_layers(scores, config).boundaries
                assert len(chosen) == requested
                assert all(b - a >= min_gap for a, b in pairwise(chosen))
                assert all(1 <= b <= num_layers for b in chosen)


def test_only_allowed_boundaries_are_chosen_and_zero_only_when_asked(made_up_scores: MakeScores) -> None:
    config = ChooseConfig(allowed=(0, 5, 9, 12), resamples=0)
    selection = choose_layers(made_up_scores(12), config)
    assert {b for s in [selection.best, *selection.runners_up] for b in s.boundaries} == {0, 5, 9, 12}


@pytest.mark.parametrize("search", ["exhaustive", "mmr", "kdpp", "facility"])
def test_forced_boundaries_are_in_every_choice_and_forbidden_in_none(
    made_up_scores: MakeScores, search: str
) -> None:
    config = ChooseConfig(
        num_layers=4, forced=(3, 12), forbidden=(7, 8), min_gap=2, search=search, resamples=5
    )
    selection = choose_layers(made_up_scores(12), config)
    for subset in [selection.best, *selection.runners_up]:
        assert {3, 12} <= set(subset.boundaries)
        assert not {7, 8} & set(subset.boundaries)
    assert selection.stability is not None
    assert selection.stability.boundary_frequency[3] == selection.stability.boundary_frequency[12] == 1


def test_an_engine_limits_the_choice(made_up_scores: MakeScores) -> None:
    config = ChooseConfig(num_layers=2, engine="sglang", resamples=0)
    selection = choose_layers(made_up_scores(4), config, model_type="llama")
    assert set(selection.boundaries) <= {1, 2, 3}


def test_several_estimators_in_an_objective_are_averaged_by_weight(made_up_scores: MakeScores) -> None:
    scores = made_up_scores(9)
    config = ChooseConfig(objective="entropy+cka=3,effective_rank+cka=1", diversity_weight=0.7, resamples=0)
    best = choose_layers(scores, config).best
    mixed = {
        s: 0.75 * objective(scores, s, 0.7) + 0.25 * objective(scores, s, 0.7, "effective_rank")
        for s in combinations(range(1, 10), 3)
    }
    assert best.boundaries == max(mixed, key=lambda s: mixed[s])
    assert best.objective == pytest.approx(mixed[best.boundaries], abs=1e-9)


def test_an_estimator_that_was_not_measured_or_does_not_exist_is_refused(made_up_scores: MakeScores) -> None:
    with pytest.raises(SpecdecError, match="must be one of matrix_entropy"):
        choose_layers(made_up_scores(5), ChooseConfig(estimator="surprise"))
    with pytest.raises(SpecdecError, match="was not measured"):
        choose_layers(made_up_scores(5), ChooseConfig(objective="gaussian_entropy+cka"))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_layers": 0}, {"min_gap": 0}, {"diversity_weight": -1.0}, {"diversity_weight": float("nan")},
        {"dpp_weight": -1.0}, {"dpp_weight": float("inf")}, {"search": "lucky"}, {"resamples": -1},
        {"size_draws": 0}, {"num_runners_up": -1}, {"engine": "tgi"}, {"objective": "luck"},
        {"diversity_weight": 1e300}, {"dpp_weight": 1e5}, {"seed": -1}, {"seed": 2**70},
    ],
)  # fmt: skip
def test_settings_outside_their_range_are_refused_naming_the_field(settings: dict[str, float]) -> None:
    with pytest.raises(SpecdecError, match=next(iter(settings))):
        ChooseConfig(**settings)  # type: ignore[arg-type]


def test_equal_scores_are_ranked_by_cka_alone_without_nan(made_up_scores: MakeScores) -> None:
    assert z_scores(torch.full((5,), 0.3, dtype=torch.float64)).tolist() == [0.0] * 5
    scores = made_up_scores(6)
    scores.text_values["matrix_entropy"].fill_(0.3)
    selection = choose_layers(scores, ChooseConfig(resamples=0))
    assert selection.best.informativeness == 0.0
    least = min(
        combinations(range(1, 7), 3), key=lambda s: sum(scores.cka()[i, j] for i, j in combinations(s, 2))
    )
    assert selection.boundaries == least
    names = selection.agreement.names
    assert selection.agreement.tau[names.index("matrix_entropy")][names.index("effective_rank")] is None


def test_references_are_valued_like_any_set_and_ranked_among_all(made_up_scores: MakeScores) -> None:
    scores = made_up_scores(12)
    landscape = choose_layers(scores, ChooseConfig(resamples=0)).landscape
    everything = [objective(scores, s, 2.0) for s in combinations(range(1, 13), 3)]
    found = {reference.name: reference for reference in landscape.references}
    assert set(found) == {"default", "uniform", "last_third"}
    assert found["default"].subset.boundaries == (2, 6, 9)
    for reference in found.values():
        value = objective(scores, reference.subset.boundaries, 2.0)
        assert reference.subset.objective == pytest.approx(value, abs=1e-9)
        better = sum(each > value + 1e-9 for each in everything) / len(everything)
        assert reference.better == pytest.approx(better, abs=1e-12)


def test_a_reference_outside_the_constraints_is_still_valued(made_up_scores: MakeScores) -> None:
    config = ChooseConfig(num_layers=1, forbidden=(12,), resamples=0)
    landscape = choose_layers(made_up_scores(12), config).landscape
    assert {r.name: r.subset.boundaries for r in landscape.references}["last"] == (12,)
