"""Objectives are read as spelled; the probe part is measured where it decides."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch

from specdec.errors import SpecdecError
from specdec.layer_select.choose import choose_layers
from specdec.layer_select.config import ChooseConfig
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.probe_table import ProbeTable
from specdec.layer_select.terms import Term, parse_objective

MakeScores = Callable[..., LayerScores]
MakeProbe = Callable[..., Any]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("entropy+cka", [("matrix_entropy+cka", 1.0)]),
        ("probe", [("probe", 1.0)]),
        ("entropy+cka=0.5,probe=0.5", [("matrix_entropy+cka", 0.5), ("probe", 0.5)]),
        ("entropy+cka=3, probe = 1", [("matrix_entropy+cka", 0.75), ("probe", 0.25)]),
        ("effective_rank+cka,entropy+cka", [("effective_rank+cka", 0.5), ("matrix_entropy+cka", 0.5)]),
    ],
)
def test_an_objective_is_read_as_spelled_with_weights_that_sum_to_one(
    text: str, expected: list[tuple[str, float]]
) -> None:
    terms = parse_objective(text, "matrix_entropy")
    assert [(term.name, term.weight) for term in terms] == expected
    assert terms[0] == Term(estimator=terms[0].estimator, weight=expected[0][1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty term must be probe"),
        ("luck", "luck must be probe"),
        ("+cka", "must be probe"),
        ("entropy", "entropy must be probe"),
        ("probe=0", r"weight \(0\) of probe must be a number above 0"),
        ("probe=-1", "above 0"),
        ("probe=inf", "above 0"),
        ("probe=much", r"weight \(much\)"),
        ("probe,probe", "names probe twice"),
        ("entropy+cka,matrix_entropy+cka", r"names matrix_entropy\+cka twice"),
    ],
)
def test_an_objective_that_cannot_be_read_says_which_part(text: str, message: str) -> None:
    with pytest.raises(SpecdecError, match=message):
        ChooseConfig(objective=text)


def test_the_probe_objective_finds_the_set_of_highest_overlap(
    made_up_scores: MakeScores, made_up_probe: MakeProbe
) -> None:
    probe = made_up_probe(10)
    selection = choose_layers(made_up_scores(10), ChooseConfig(objective="probe", resamples=3), probe=probe)
    best = max(combinations(range(1, 11), 3), key=probe.overlap)
    assert selection.boundaries == best
    assert selection.best.objective == pytest.approx(probe.overlap(best))
    assert selection.best.probe is not None
    assert selection.sweep is None
    assert selection.estimators[-1].name == "probe"
    assert selection.estimators[-1].boundaries == best
    assert selection.landscape.probe_correlation == pytest.approx(1.0)
    # the head is applied to few of the 120 sets.
    assert len(set(probe.asked)) < 60


def test_measured_overlap_overrules_the_line_at_the_top(
    made_up_scores: MakeScores, made_up_probe: MakeProbe
) -> None:
    """Catches a choice that rests on a predicted value where a rival was measured to be better."""
    for seed in range(5):
        probe = made_up_probe(10, seed=seed, wobble=0.004)
        config = ChooseConfig(objective="probe", resamples=0)
        selection = choose_layers(made_up_scores(10), config, probe=probe)
        assert selection.boundaries in probe.asked
        assert selection.best.objective == pytest.approx(probe.overlap(selection.boundaries))
        assert all(
            probe.overlap(s) <= selection.best.objective + 1e-12 for s in set(probe.asked) if len(s) == 3
        )


def test_a_mix_standardises_both_parts_over_all_sets(
    made_up_scores: MakeScores, made_up_probe: MakeProbe
) -> None:
    scores, probe = made_up_scores(8), made_up_probe(8)
    everything = list(combinations(range(1, 9), 2))
    config = ChooseConfig(num_layers=2, objective="entropy+cka=1,probe=3", resamples=4)
    selection = choose_layers(scores, config, probe=probe)
    alone = choose_layers(scores, ChooseConfig(num_layers=2, num_runners_up=100, resamples=0))
    evidence = {s.boundaries: s.objective for s in [alone.best, *alone.runners_up]}
    overlap = {s: probe.overlap(s) for s in everything}

    def standard(values: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
        numbers = torch.tensor(list(values.values()), dtype=torch.float64)
        return {s: (v - float(numbers.mean())) / float(numbers.std(correction=0)) for s, v in values.items()}

    first, second = standard(evidence), standard(overlap)
    mixed = {s: 0.25 * first[s] + 0.75 * second[s] for s in everything}
    best = max(mixed, key=lambda s: mixed[s])
    assert selection.boundaries == best
    assert selection.best.objective == pytest.approx(mixed[best], abs=1e-6)
    assert selection.stability is not None
    assert selection.sweep is not None
    assert not selection.sweep.exact


def test_a_choice_by_probe_alone_is_resampled_on_its_held_out_rows(
    made_up_scores: MakeScores, made_up_probe: MakeProbe
) -> None:
    """Catches a certainty of 100 % that comes from resampling what the choice does not rest on."""
    probe = made_up_probe(10)
    scores = made_up_scores(10, domains=("prose",) * 3 + ("code",) * 3)
    config = ChooseConfig(objective="probe", forbidden=(1,), resamples=50)
    selection = choose_layers(scores, config, probe=probe)
    assert selection.sizes == selection.domains == ()
    stability = selection.stability
    assert stability is not None
    assert stability.units == 60
    assert "held-out positions" in stability.unit
    assert stability.boundary_frequency[1] == 0
    assert 0 < stability.subset_frequency < 1
    keys = sorted({s for s in probe.asked if len(s) == 3})
    legal = [s for s in keys if 1 not in s]
    rows = probe.overlap_by_row(keys)[[keys.index(s) for s in legal]]
    generator = torch.Generator().manual_seed(0)
    wins = 0
    for _ in range(50):
        drawn = torch.randint(60, (60,), generator=generator)
        wins += legal[int(rows[:, drawn].mean(dim=1).argmax())] == selection.boundaries
    assert stability.subset_frequency == wins / 50


def test_an_objective_with_a_probe_part_needs_a_probe(made_up_scores: MakeScores) -> None:
    with pytest.raises(SpecdecError, match=r"objective \(probe\) needs the ridge probe"):
        choose_layers(made_up_scores(5), ChooseConfig(objective="probe"))


def test_a_probe_beside_another_objective_is_reported_and_decides_nothing(
    made_up_scores: MakeScores, made_up_probe: MakeProbe
) -> None:
    scores = made_up_scores(10)
    config = ChooseConfig(resamples=0)
    without, beside = choose_layers(scores, config), choose_layers(scores, config, probe=made_up_probe(10))
    assert without.boundaries == beside.boundaries
    assert without.best.probe is None
    assert beside.best.probe is not None
    assert all(reference.subset.probe is not None for reference in beside.landscape.references)
    assert beside.agreement.names[-1] == "probe"
    assert "probe" not in [choice.name for choice in beside.estimators]
    assert -1 <= (beside.landscape.probe_correlation or 0) <= 1


def test_the_line_never_falls_and_a_set_is_measured_once(made_up_probe: MakeProbe) -> None:
    probe = made_up_probe(6)
    table = ProbeTable(probe)
    sets = torch.combinations(torch.arange(1, 7), 2)
    table.draw_line(sets)
    predicted = table.values(sets)
    explained = table.explained(sets)
    order = explained.argsort()
    assert (predicted[order].diff() >= -1e-9).all()
    table.measure(sets)
    assert len(probe.asked) == len(set(probe.asked)) == len(sets)
    assert table.values(sets).tolist() == pytest.approx([probe.overlap(tuple(s)) for s in sets.tolist()])
