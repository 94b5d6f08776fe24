"""Constraints leave exactly the sets they should, and contradictions are named (fault B02)."""

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine_limits import ENGINES, default_taps, engine_limit
from specdec.errors import SpecdecError
from specdec.layer_select.config import ChooseConfig
from specdec.layer_select.constraints import Feasible, feasible_sets
from specdec.layer_select.references import last_third_taps, reference_subsets, uniform_taps


def brute_force(
    allowed: list[int], count: int, gap: int, forced: list[int], forbidden: list[int]
) -> list[tuple[int, ...]]:
    """Every legal set, by looking at all of them."""
    pool = sorted(set(allowed) - set(forbidden))
    return [
        s
        for s in combinations(pool, count)
        if set(forced) <= set(s) and all(b - a >= gap for a, b in pairwise(s))
    ]


@settings(max_examples=150, deadline=None)
@given(
    num_layers=st.integers(1, 12),
    count=st.integers(1, 5),
    gap=st.integers(1, 4),
    forced=st.lists(st.integers(0, 12), max_size=3, unique=True),
    forbidden=st.lists(st.integers(0, 12), max_size=4, unique=True),
)
def test_candidates_are_exactly_the_legal_sets_or_the_request_is_refused(
    num_layers: int, count: int, gap: int, forced: list[int], forbidden: list[int]
) -> None:
    """Catches B02 on every small target: no duplicate, negative or missing set for any N, K and gap."""
    config = ChooseConfig(
        num_layers=count, min_gap=gap, forced=tuple(forced), forbidden=tuple(forbidden), resamples=0
    )
    possible = (
        brute_force([*range(1, num_layers + 1), *forced], count, gap, forced, forbidden)
        if count <= num_layers and all(b <= num_layers for b in [*forced, *forbidden])
        else []
    )
    if not possible or set(forced) & set(forbidden):
        with pytest.raises(SpecdecError):
            feasible_sets(num_layers, config)
        return
    sets = feasible_sets(num_layers, config)
    assert [tuple(row) for row in sets.candidates().tolist()] == possible
    drawn = sets.sample(20, seed=1).tolist()
    assert {tuple(row) for row in drawn} <= set(possible)
    assert drawn == sets.sample(20, seed=1).tolist()
    start = possible[len(possible) // 2]
    neighbours = [tuple(row) for row in sets.swaps(start).tolist()]
    assert neighbours[0] == start
    assert sorted(neighbours[1:]) == sorted(s for s in possible if len(set(s) - set(start)) == 1)


@settings(max_examples=100, deadline=None)
@given(
    allowed=st.lists(st.integers(0, 12), min_size=1, max_size=9, unique=True),
    count=st.integers(1, 4),
    gap=st.integers(1, 4),
    data=st.data(),
)
def test_room_is_left_exactly_when_some_legal_set_contains_the_chosen(
    allowed: list[int], count: int, gap: int, data: st.DataObject
) -> None:
    """Catches a greedy search that walks into a corner where K no longer fit."""
    chosen = data.draw(st.lists(st.sampled_from(allowed), max_size=count, unique=True))
    sets = Feasible(num_layers=12, count=count, allowed=tuple(sorted(allowed)), min_gap=gap)
    possible = brute_force(allowed, count, gap, chosen, [])
    assert sets.leaves_room(chosen) == bool(possible)
    assert sets.holds(chosen) == (tuple(sorted(chosen)) in possible)


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"allowed": (3, 13)}, r"allowed boundary \(13\) must be in 0\.\.12"),
        ({"forced": (13,)}, r"forced boundary \(13\) must be in 0\.\.12"),
        ({"forbidden": (-1,)}, r"forbidden boundary \(-1\) must be in 0\.\.12"),
        ({"allowed": (3, 4)}, "2 allowed boundaries"),
        ({"min_gap": 7}, "min_gap 7 hold at most 2, 3 requested"),
        ({"forced": (5,), "forbidden": (5,)}, r"boundary \(5\) is both forced and forbidden"),
        ({"forced": (5,), "allowed": (1, 2, 3)}, r"forced boundary \(5\) is not among the allowed"),
        ({"forced": (1, 2, 3, 4)}, "4 boundaries are forced, 3 requested"),
        ({"forced": (4, 5), "min_gap": 2}, r"forced boundaries 4 and 5 are closer than min_gap \(2\)"),
        ({"forced": (6,), "min_gap": 6, "num_layers": 4}, "hold at most 2, 4 requested"),
        ({"forbidden": tuple(range(3, 13))}, "hold at most 2, 3 requested"),
        ({"engine": "sglang", "forced": (12,)}, r"forced boundary \(12\) cannot be captured by sglang"),
        ({"engine": "eagle", "num_layers": 2}, r"engine \(eagle\) serves 3 boundaries, 2 requested"),
        ({"engine": "speculators", "num_layers": 4}, r"engine \(speculators\) serves 3 boundaries, 4"),
        ({"engine": "eagle", "forbidden": (6,)}, "engine eagle"),
        ({"num_layers": 13}, "target has 12 layers, 13 requested"),
    ],
)
def test_a_request_that_no_set_can_meet_says_which_part_of_it(
    given_settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecdecError, match=message):
        feasible_sets(12, ChooseConfig(**given_settings), model_type="llama")


@pytest.mark.parametrize(
    ("engine", "model_type", "expected"),
    [
        ("specdec", "llama", list(range(13))),
        ("vllm", "llama", list(range(13))),
        ("sglang", "llama", list(range(1, 12))),
        ("sglang", "qwen3", list(range(1, 12))),
        ("sglang", "gpt_oss", list(range(1, 13))),
        ("sglang", "deepseek_v3", list(range(2, 12))),
        ("sglang", "glm4_moe_lite", list(range(2, 12))),
        ("speculators", "llama", list(range(12))),
        ("eagle", "llama", [2, 6, 9]),
    ],
)
def test_an_engine_captures_what_its_code_was_read_to_capture(
    engine: str, model_type: str, expected: list[int]
) -> None:
    assert list(engine_limit(engine, 12, model_type).boundaries) == expected


def test_engines_that_are_not_in_the_table_are_refused_with_those_that_are() -> None:
    with pytest.raises(SpecdecError, match=r"engine \(tgi\) must be one of specdec, vllm, sglang"):
        ChooseConfig(engine="tgi")
    with pytest.raises(SpecdecError, match="model_type must be known"):
        engine_limit("sglang", 12, None)
    with pytest.raises(SpecdecError, match="no three boundaries of 5 layers"):
        engine_limit("eagle", 5, "llama")


@pytest.mark.parametrize("num_layers", range(1, 13))
@pytest.mark.parametrize("engine", ENGINES)
def test_any_engine_on_any_small_target_gives_legal_sets_or_one_error(engine: str, num_layers: int) -> None:
    for count in range(1, 6):
        config = ChooseConfig(num_layers=count, engine=engine, resamples=0)
        try:
            sets = feasible_sets(num_layers, config, model_type="llama")
        except SpecdecError:
            continue
        found = sets.candidates()
        assert found.shape[0] > 0
        assert set(found.flatten().tolist()) <= set(engine_limit(engine, num_layers, "llama").boundaries)


def test_an_engine_narrows_the_allowed_boundaries_and_is_recorded() -> None:
    sets = feasible_sets(8, ChooseConfig(engine="sglang", allowed=(0, 2, 5, 7, 8)), model_type="llama")
    assert sets.allowed == (2, 5, 7)
    assert sets.engine is not None
    assert "embedding output" in sets.engine.reason


def test_a_forced_boundary_need_not_be_allowed_by_name() -> None:
    sets = feasible_sets(6, ChooseConfig(num_layers=2, forced=(0,)))
    assert sets.candidates().tolist() == [[0, b] for b in range(1, 7)]


def test_reference_rules_give_the_published_taps() -> None:
    """DFlash on 36 layers reads boundaries 2, 10, 18, 26, 34; NVIDIA's gpt-oss head reads 24, 30, 36."""
    assert default_taps(32) == (2, 16, 29)
    assert uniform_taps(36, 5) == (2, 10, 18, 26, 34)
    assert last_third_taps(36, 3) == (24, 30, 36)


@pytest.mark.parametrize("num_layers", range(1, 13))
@pytest.mark.parametrize("count", range(1, 6))
def test_reference_sets_of_small_targets_are_sound_or_left_out(num_layers: int, count: int) -> None:
    for taps in reference_subsets(num_layers, count).values():
        assert len(taps) == count
        assert list(taps) == sorted(set(taps))
        assert all(0 <= b <= num_layers for b in taps)
