"""The measures of what a lossy rule costs, against values worked out by hand."""

import numpy as np
import pytest

from specdec.divergence import (
    entropy,
    front_gap,
    js_divergence,
    kl_divergence,
    overlap,
    overshoot,
    total_variation,
)

P = np.array([0.5, 0.5, 0.0])
Q = np.array([0.25, 0.25, 0.5])


def test_the_measures_of_a_pair_are_those_of_the_textbook() -> None:
    assert total_variation(P, Q) == pytest.approx(0.5)
    assert overlap(P, Q) == pytest.approx(0.5)
    assert kl_divergence(P, Q) == pytest.approx(np.log(2.0))
    middle = np.array([0.375, 0.375, 0.25])
    expected = (np.log(0.5 / 0.375) + 0.5 * np.log(0.25 / 0.375) + 0.5 * np.log(0.5 / 0.25)) / 2.0
    assert js_divergence(P, Q) == pytest.approx(expected) == pytest.approx(js_divergence(Q, P))
    assert js_divergence(P, Q) == pytest.approx(entropy(middle) - (entropy(P) + entropy(Q)) / 2.0)
    assert entropy(Q) == pytest.approx(1.5 * np.log(2.0))
    assert overshoot(P, Q) == pytest.approx(2.0)


def test_mass_where_the_target_has_none_costs_without_limit() -> None:
    assert kl_divergence(Q, P) == np.inf
    assert overshoot(Q, P) == np.inf
    assert js_divergence(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(np.log(2.0))


@pytest.mark.parametrize("law", [P, Q, np.array([1.0, 0.0, 0.0])])
def test_a_law_is_at_no_distance_from_itself(law: np.ndarray) -> None:
    assert total_variation(law, law) == kl_divergence(law, law) == js_divergence(law, law) == 0.0
    assert overlap(law, law) == overshoot(law, law) == 1.0
    assert str(entropy(np.array([1.0, 0.0]))) == "0.0"


def test_token_rejection_and_the_draft_itself_end_the_front() -> None:
    """Exact: all the distance is paid in rejections. Everything accepted: all of it in fidelity."""
    assert front_gap(total_variation(P, Q), P, P, Q) == pytest.approx(0.0)
    assert front_gap(0.0, Q, P, Q) == pytest.approx(0.0)
    assert front_gap(1.0, Q, P, Q) == pytest.approx(1.0)
