"""Laws made from logits, and draws from them, against independent references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec.exact_law import exact_law
from specdec.random_streams import Purpose, RandomStream
from specdec.sampling import (
    LazyProbs,
    bad_rows,
    draw_without_replacement,
    greedy_tokens,
    process_logits,
    sample,
)
from specdec.sequence import SamplingParams

# both sides are float64; the order of the filters' renormalisations differs
LAW_TOLERANCE = 1e-12
LARGEST_COINS = (1 - 2.0**-24, 1 - 2.0**-53)


def huggingface_law(logits: Tensor, params: SamplingParams) -> Tensor:
    scores = logits.double()
    if params.temperature != 1.0:
        scores = TemperatureLogitsWarper(params.temperature)(None, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.typical_p < 1.0:
        scores = TypicalLogitsWarper(params.typical_p)(None, scores)
    return torch.softmax(scores, dim=-1)


@pytest.mark.parametrize("top_k", [0, -1, 1, 40, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_filters_equal_those_of_transformers(top_k: int, top_p: float, min_p: float, scale: float) -> None:
    """Flat and peaked rows: the flat ones need top-p to look far beyond its first prefix."""
    params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.randn(3, 3000) * scale
    error = (process_logits(logits, params) - huggingface_law(logits, params)).abs().max()
    assert error < LAW_TOLERANCE


@pytest.mark.parametrize("typical_p", [0.95, 0.5, 0.05])
@pytest.mark.parametrize("before", [{}, {"top_k": 50, "min_p": 0.01}, {"top_p": 0.3}])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_typical_p_equals_that_of_transformers(typical_p: float, before: dict, scale: float) -> None:
    """Flat rows keep nearly all; peaked ones may drop the best token, which is their point."""
    params = SamplingParams(temperature=0.8, typical_p=typical_p, **before)
    logits = torch.randn(4, 600) * scale
    law = process_logits(logits, params)
    assert (law - huggingface_law(logits, params)).abs().max() < LAW_TOLERANCE
    assert torch.allclose(law.sum(-1), torch.ones(4, dtype=torch.float64))


def test_typical_p_breaks_ties_by_the_lowest_id() -> None:
    """Four equal ids: half the mass is the first two."""
    law = process_logits(torch.zeros(1, 4), SamplingParams(temperature=1.0, typical_p=0.5))[0]
    assert law.tolist() == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_logits_are_not_written_to(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 10).to(dtype)
    before = logits.clone()
    process_logits(logits, SamplingParams(temperature=0.5, top_k=4, top_p=0.8, min_p=0.1))
    assert torch.equal(logits, before)


def test_top_p_keeps_the_token_that_crosses_the_mass() -> None:
    """B41: [.5, .3, .15, .05] at 0.75 keeps ids 0 and 1, renormalised to .625 and .375."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    law = process_logits(logits, SamplingParams(temperature=1.0, top_p=0.75))[0]
    assert torch.allclose(law, torch.tensor([0.625, 0.375, 0, 0], dtype=torch.float64), atol=1e-7)
    assert law[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), [1, 2]),
        (SamplingParams(temperature=1.0, top_k=3), [1, 2, 3]),
        (SamplingParams(temperature=1.0, top_p=0.4), [1, 2]),
        (SamplingParams(temperature=0.0), [1]),
    ],
)
def test_ties_at_a_border_go_to_the_lowest_ids(params: SamplingParams, kept: list[int]) -> None:
    """B43 and rule 2.9: four equal logits in a row of six."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 2.0, -1.0]])
    assert process_logits(logits, params)[0].nonzero().flatten().tolist() == kept


def test_greedy_choice_takes_the_first_of_equals_and_marks_bad_rows() -> None:
    """B44: a NaN row is reported, and no id reaches the vocabulary size."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[1.0, 3.0, 3.0], [nan, nan, nan], [0.0, nan, 9.0], [-inf, -inf, -inf], [0, inf, 1], [-inf, 2, -inf]]
    )
    ids, bad = greedy_tokens(logits)
    assert ids[0] == 1
    assert ids[5] == 1
    assert all(0 <= token < 3 for token in ids)
    assert bad == [False, True, True, True, True, False]
    assert bad_rows(logits).tolist() == bad


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_cannot_be_drawn_from(temperature: float) -> None:
    """B44: a poisoned row becomes an error at the draw, never an id; its neighbours are untouched."""
    logits = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [0.0, 1.0]])
    params = SamplingParams(temperature=temperature)
    laws = process_logits(logits, params)
    with pytest.raises(AssertionError, match="mass nan"):
        sample(laws[1], 0.5)
    assert torch.equal(laws[0], laws[2])
    assert torch.isfinite(laws[0]).all()


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1e-5, 1.1e-5, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    """B43: the peak is subtracted before the division; 1e4 logits do not overflow."""
    logits = torch.tensor([[10.0, 9.99, 0.0, -5.0], [1e4, -1e4, 0.0, 1e4]])
    laws = process_logits(logits, SamplingParams(temperature=temperature))
    assert torch.isfinite(laws).all()
    assert torch.allclose(laws.sum(-1), torch.ones(2, dtype=torch.float64))
    if temperature <= 1e-5:
        assert laws.argmax(-1).tolist() == [0, 0]
        assert laws.max(-1).values.tolist() == [1.0, 1.0]


def test_lazy_rows_equal_the_whole_matrix() -> None:
    logits = torch.randn(5, 700)
    params = SamplingParams(temperature=0.9, top_k=50, top_p=0.8)
    laws = process_logits(logits, params)
    lazy = LazyProbs(logits, params)
    assert all(torch.equal(lazy[node], laws[node]) for node in range(5))


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e3)), min_size=1, max_size=20),
    u=st.one_of(st.just(0.0), st.sampled_from(LARGEST_COINS), st.floats(0, 1, exclude_max=True)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=300, deadline=None)
def test_ids_of_zero_probability_never_come_out(weights: list[float], u: float, dtype: torch.dtype) -> None:
    """B45: at u = 0, at the largest u, and with zeros at either end of the row."""
    row = torch.tensor(weights, dtype=dtype)
    if row.sum() > 0:
        assert row[sample(row, u)] > 0


def test_a_draw_has_the_law_of_its_row() -> None:
    weights = np.array([0.0, 2.0, 1.0, 0.0, 5.0, 0.0])
    law = exact_law(lambda source: sample(weights, source.uniform(0, Purpose.BONUS)[0]))
    assert law.keys() == {1, 2, 4}
    assert all(abs(law[token] - weights[token] / 8) < LAW_TOLERANCE for token in law)


def test_draws_without_replacement_follow_plackett_luce() -> None:
    """The law of Gumbel-top-k: q(a) * q(b) / (1 - q(a)) * ..., in draw order."""
    q = np.array([0.4, 0.0, 0.3, 0.2, 0.1])
    law = exact_law(lambda source: tuple(draw_without_replacement(q, 3, source, 0, 0)))
    orders = list(itertools.permutations([0, 2, 3, 4], 3))
    assert law.keys() == set(orders)
    for order in orders:
        wanted, left = 1.0, 1.0
        for token in order:
            wanted *= q[token] / left
            left -= q[token]
        assert abs(law[order] - wanted) < LAW_TOLERANCE


def test_draws_without_replacement_stop_when_q_is_used_up() -> None:
    q = torch.tensor([0.0, 0.5, 0.0, 0.5])
    drawn = draw_without_replacement(q, 4, RandomStream(0), 3, 0)
    assert sorted(drawn) == [1, 3]
    assert q.tolist() == [0.0, 0.5, 0.0, 0.5]


def test_nodes_and_positions_draw_independently() -> None:
    """A number shared between nodes would make their children equal."""
    q = torch.full((50,), 0.02)
    stream = RandomStream(0)
    drawn = {
        (position, node): tuple(draw_without_replacement(q, 4, stream, position, node))
        for position in range(6)
        for node in range(6)
    }
    assert len(set(drawn.values())) == 36
    assert drawn[2, 3] == tuple(draw_without_replacement(q, 4, RandomStream(0), 2, 3))
    assert drawn[2, 3][:2] == tuple(draw_without_replacement(q, 2, stream, 2, 3))
