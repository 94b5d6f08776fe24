"""Simulated acceptance: the arithmetic, the draw, and that a step does its real work."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.random_streams import RandomStream
from specdec.sampling_params import GrammarSpec, SamplingParams
from specdec.simulated import SimulatedAcceptance, acceptance_rate_for, expected_length
from specdec.tree import DraftTree, chain_tree
from specdec.verification.result import VerifyResult

REJECTED = VerifyResult(accepted_nodes=[], next_token_id=9, next_kind="recovered")


@pytest.mark.parametrize(("length", "depth"), [(1.0, 3), (1.46, 3), (3.5, 4), (5.0, 4), (1.7, 1), (7.9, 32)])
def test_the_rate_gives_the_length_back(length: float, depth: int) -> None:
    """E[tau] = (1 - a^(g+1)) / (1 - a), solved for a."""
    rate = acceptance_rate_for(length, depth)
    assert 0.0 <= rate <= 1.0
    assert expected_length(rate, depth) == pytest.approx(length, abs=1e-9)


def test_the_rate_of_depth_one_is_by_hand() -> None:
    """A single draft accepted at a commits 1 + a."""
    assert acceptance_rate_for(1.25, 1) == pytest.approx(0.25)
    assert acceptance_rate_for(3.0, 1) == 1.0


def drawn(simulated: SimulatedAcceptance, tree: DraftTree, count: int) -> list[VerifyResult]:
    stream = RandomStream(5)
    return [simulated.replaced(tree, REJECTED, stream, step) for step in range(count)]


@pytest.mark.parametrize("length", [1.0, 2.2, 3.5, 5.0])
def test_drawn_lengths_have_the_asked_mean(length: float) -> None:
    tree = chain_tree(1, [2, 3, 4, 5])
    steps = drawn(SimulatedAcceptance(length), tree, 50)
    mean = sum(1 + len(step.accepted_nodes) for step in steps) / len(steps)
    # independent draws would have a standard error of 0.2
    assert mean == pytest.approx(length, abs=0.1)
    assert all(step.accepted_nodes == [1, 2, 3, 4][: len(step.accepted_nodes)] for step in steps)
    assert all((step.next_kind == "bonus") == (len(step.accepted_nodes) == 4) for step in steps)


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    """The number is one of the step alone."""
    tree = chain_tree(1, [2, 3, 4])
    simulated = SimulatedAcceptance(2.5)
    all_steps = drawn(simulated, tree, 40)
    alone = simulated.replaced(tree, REJECTED, RandomStream(5), 17)
    assert alone == all_steps[17]


def test_a_tree_is_walked_along_the_first_of_its_longest_paths() -> None:
    tree = DraftTree(token_ids=[0, 1, 2, 3, 4, 5, 6], parents=[-1, 0, 0, 2, 2, 4, 3])
    longest = [2, 4, 5]
    steps = drawn(SimulatedAcceptance(3.0), tree, 50)
    assert {tuple(step.accepted_nodes) for step in steps} == {tuple(longest[:n]) for n in range(4)}


def test_a_root_alone_commits_what_the_rule_said() -> None:
    assert drawn(SimulatedAcceptance(3.0), chain_tree(1, []), 1) == [REJECTED]


@pytest.mark.parametrize("length", [0.5, 4.01, float("nan"), float("inf")])
def test_a_length_out_of_reach_is_refused_with_the_range(length: float) -> None:
    with pytest.raises(SpecdecError, match=r"must be in 1\.\.4"):
        EngineConfig(spec=SpecConfig(max_depth=3), simulate_acceptance=length)


def engine(target: Path, draft: Path, shape: SpecConfig, length: float | None) -> Engine:
    config = EngineConfig(kv_tokens=2048, spec=shape, simulate_acceptance=length)
    return Engine(target, draft=draft, config=config)


@pytest.mark.parametrize("shape", [SpecConfig(max_depth=4, adaptive=False), SpecConfig(top_k=2, max_nodes=7)])
def test_the_engine_commits_the_asked_length(
    tiny_llama: Path, random_draft: object, tmp_path: Path, shape: SpecConfig
) -> None:
    """A random head's drafts are hardly ever right, yet 3 tokens a step come out; bookkeeping stays whole."""
    draft = random_draft(tiny_llama, tmp_path / "draft")  # type: ignore[operator]
    shape = SpecConfig(
        max_depth=shape.max_depth, top_k=shape.top_k, max_nodes=shape.max_nodes, adaptive=False
    )
    made = engine(tiny_llama, draft, shape, 3.0)
    params = [SamplingParams(max_tokens=200, ignore_eos=True, seed=seed) for seed in range(3)]
    results = made.generate([[5, 6, 7]] * 3, params)
    made.audit()
    for result in results:
        assert len(result.token_ids) == 200
        assert result.simulated
        assert not result.lossless
        assert result.rule == "simulated acceptance of 3"
    committed = sum(result.stats.committed for result in results)
    steps = sum(result.stats.verify_steps for result in results)
    assert committed / steps == pytest.approx(3.0, abs=0.05)
    alone = engine(tiny_llama, draft, shape, 3.0).generate([[5, 6, 7]], params[1])[0]
    assert alone.token_ids == results[1].token_ids


def test_without_the_setting_nothing_is_simulated(
    tiny_llama: Path, random_draft: object, tmp_path: Path
) -> None:
    draft = random_draft(tiny_llama, tmp_path / "draft")  # type: ignore[operator]
    result = engine(tiny_llama, draft, SpecConfig(), None).generate([[5, 6]], SamplingParams(max_tokens=9))[0]
    assert not result.simulated
    assert result.lossless


def test_grammars_and_deeper_requests_are_refused(
    tiny_llama: Path, random_draft: object, tmp_path: Path
) -> None:
    draft = random_draft(tiny_llama, tmp_path / "draft")  # type: ignore[operator]
    made = engine(tiny_llama, draft, SpecConfig(max_depth=4), 4.5)
    with pytest.raises(SpecdecError, match=r"must be in 1\.\.3"):
        made.add([5], SamplingParams(spec=SpecConfig(max_depth=2)))
    with pytest.raises(SpecdecError, match="grammar"):
        made.add([5], SamplingParams(grammar=GrammarSpec(regex="[ab]+")))
