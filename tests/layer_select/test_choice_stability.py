"""How sure a choice is: deterministic by seed, exact in lambda, honest about single batches and domains."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch

from specdec.layer_select.agreement import rank_agreement
from specdec.layer_select.choose import LayerSelection, choose_layers
from specdec.layer_select.config import ChooseConfig
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.sweep import GRID

MakeScores = Callable[..., LayerScores]


def test_stability_counts_resamples_of_batches_and_repeats_by_seed(made_up_scores: MakeScores) -> None:
    scores = made_up_scores(10)
    selection = choose_layers(scores, ChooseConfig(resamples=40))
    stability = selection.stability
    assert stability is not None
    assert (stability.resamples, stability.units) == (40, 6)
    assert stability.unit == "calibration batches"
    assert sum(stability.boundary_frequency) == pytest.approx(3)
    assert stability.boundary_frequency[0] == 0
    assert 0 <= stability.subset_frequency <= stability.most_frequent[0][1] <= 1
    shared = sum(stability.boundary_frequency[b] for b in selection.boundaries) / 3
    assert stability.mean_overlap == pytest.approx(shared)
    again = choose_layers(scores, ChooseConfig(resamples=40))
    assert again == selection
    other = choose_layers(scores, ChooseConfig(resamples=40, seed=1))
    assert other.best == selection.best
    assert other.stability != selection.stability


def test_identical_batches_make_the_choice_certain_and_one_batch_leaves_it_open(
    made_up_scores: MakeScores,
) -> None:
    scores = made_up_scores(10, num_batches=1)
    assert choose_layers(scores).stability is None
    same = LayerScores(
        num_layers=10,
        hidden_size=12,
        text_values={name: v.repeat(4, 1) for name, v in scores.text_values.items()},
        batch_of_text=torch.arange(4).repeat_interleave(2),
        hsic=scores.hsic.repeat(4, 1, 1),
        rows=scores.rows.repeat(4),
        tokens=400,
        seconds=0.0,
    )
    selection = choose_layers(same, ChooseConfig(resamples=20))
    assert selection.stability is not None
    assert selection.stability.subset_frequency == 1.0
    assert all(size.sample.subset_frequency == 1.0 for size in selection.sizes)


def test_sizes_are_parts_of_the_batches_and_all_of_them_give_the_choice(made_up_scores: MakeScores) -> None:
    selection = choose_layers(made_up_scores(10, num_batches=16), ChooseConfig(resamples=5, size_draws=7))
    assert [size.fraction for size in selection.sizes] == [0.125, 0.25, 0.5, 1.0]
    assert [size.tokens for size in selection.sizes] == [200, 400, 800, 1600]
    assert [size.sample.resamples for size in selection.sizes] == [7, 7, 7, 1]
    assert selection.sizes[-1].sample.subset_frequency == 1.0


def test_sizes_that_round_to_the_same_number_of_batches_are_given_once(made_up_scores: MakeScores) -> None:
    selection = choose_layers(made_up_scores(6, num_batches=2), ChooseConfig(resamples=5))
    assert [size.fraction for size in selection.sizes] == [0.5, 1.0]


def test_a_domain_is_chosen_from_its_own_batches(made_up_scores: MakeScores) -> None:
    domains = ("prose", "prose", "code", "code", "maths", "chat")
    scores = made_up_scores(9, domains=domains)
    selection = choose_layers(scores, ChooseConfig(resamples=5))
    assert [choice.name for choice in selection.domains] == ["prose", "code", "maths", "chat"]
    assert [choice.tokens for choice in selection.domains] == [200, 200, 100, 100]
    code = LayerScores(
        num_layers=9,
        hidden_size=12,
        text_values={name: values[4:8] for name, values in scores.text_values.items()},
        batch_of_text=torch.tensor([0, 0, 1, 1]),
        hsic=scores.hsic[2:4],
        rows=scores.rows[2:4],
        tokens=200,
        seconds=0.0,
    )
    alone = choose_layers(code, ChooseConfig(resamples=0))
    assert selection.domains[1].boundaries == alone.boundaries
    assert selection.domains[1].overlap == len(set(alone.boundaries) & set(selection.boundaries)) / 3


def test_texts_of_one_domain_have_nothing_to_compare(made_up_scores: MakeScores) -> None:
    assert choose_layers(made_up_scores(6, domains=("",) * 6), ChooseConfig(resamples=2)).domains == ()


def test_each_estimator_chooses_what_it_would_as_the_objective(made_up_scores: MakeScores) -> None:
    scores = made_up_scores(9)
    selection = choose_layers(scores, ChooseConfig(resamples=0))
    assert [choice.name for choice in selection.estimators] == ["matrix_entropy", "effective_rank"]
    assert selection.estimators[0].boundaries == selection.boundaries
    other = choose_layers(scores, ChooseConfig(estimator="effective_rank", resamples=0))
    assert selection.estimators[1].boundaries == other.boundaries


def choice_at(make: MakeScores, seed: int, weight: float) -> LayerSelection:
    return choose_layers(make(9, seed=seed), ChooseConfig(diversity_weight=weight, resamples=0))


@pytest.mark.parametrize("seed", range(6))
def test_the_stable_region_ends_exactly_where_the_choice_changes(
    made_up_scores: MakeScores, seed: int
) -> None:
    """Catches an interval read off the wrong side of a crossing."""
    selection = choice_at(made_up_scores, seed, 1.0)
    sweep = selection.sweep
    assert sweep is not None
    assert sweep.exact
    assert sweep.stable_low <= 1.0
    top = 50.0 if sweep.stable_high is None else sweep.stable_high
    for inside in (sweep.stable_low + 1e-6, 0.5 * (sweep.stable_low + top), top - 1e-6):
        assert choice_at(made_up_scores, seed, inside).boundaries == selection.boundaries
    if sweep.stable_low > 0:
        assert choice_at(made_up_scores, seed, sweep.stable_low - 1e-6).boundaries != selection.boundaries
    if sweep.stable_high is not None:
        assert choice_at(made_up_scores, seed, top + 1e-6).boundaries != selection.boundaries


def test_the_sweep_covers_its_grid_in_order_and_agrees_with_single_choices(
    made_up_scores: MakeScores,
) -> None:
    sweep = choice_at(made_up_scores, 3, 2.0).sweep
    assert sweep is not None
    assert sweep.segments[0].low == GRID[0]
    assert sweep.segments[-1].high == GRID[-1]
    for first, second in zip(sweep.segments, sweep.segments[1:], strict=False):
        assert first.high < second.low
        assert first.boundaries != second.boundaries
    for segment in sweep.segments:
        assert choice_at(made_up_scores, 3, segment.low).boundaries == segment.boundaries
        assert choice_at(made_up_scores, 3, segment.high).boundaries == segment.boundaries


@pytest.mark.parametrize("search", ["kdpp", "facility"])
def test_searches_without_lambda_are_not_swept(made_up_scores: MakeScores, search: str) -> None:
    assert choose_layers(made_up_scores(7), ChooseConfig(search=search, resamples=0)).sweep is None


def test_a_search_that_is_not_exhaustive_reads_the_region_off_its_grid(made_up_scores: MakeScores) -> None:
    sweep = choose_layers(made_up_scores(9), ChooseConfig(search="mmr", resamples=0)).sweep
    assert sweep is not None
    assert not sweep.exact
    assert sweep.stable_low <= sweep.used


def test_agreement_is_kendalls_tau_by_counting_pairs() -> None:
    rankings = {"a": [9.0, 1.0, 2.0, 3.0, 4.0], "b": [0.0, 2.0, 1.0, 3.0, 5.0], "flat": [1.0] * 5}
    agreement = rank_agreement(rankings, [1, 2, 3, 4])
    pairs = list(combinations([1, 2, 3, 4], 2))

    def side(name: str, i: int, j: int) -> int:
        difference = rankings[name][i] - rankings[name][j]
        return (difference > 0) - (difference < 0)

    expected = sum(side("a", i, j) * side("b", i, j) for i, j in pairs) / len(pairs)
    assert agreement.names == ("a", "b", "flat")
    assert agreement.tau[0][1] == agreement.tau[1][0] == pytest.approx(expected)
    assert agreement.tau[0][0] == pytest.approx(1.0)
    assert agreement.tau[2] == (None, None, None)
