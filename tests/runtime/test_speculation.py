"""When a sequence speculates: what the policy makes of costs, batch and acceptance; where costs come from."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import cost_model
from specdec.config import EngineConfig, SpecConfig
from specdec.cost_model import ROWS, cost_key, engine_costs, measure_costs, target_costs
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.live_costs import LiveCosts
from specdec.provenance import cache_home
from specdec.sequence import SamplingParams
from specdec.speculation import (
    CONTEXT,
    EXPECTED_ACCEPTANCE,
    FIXED_COSTS,
    PROBE_EVERY,
    RANK_RATIOS,
    Acceptance,
    CostTable,
    SpeculationController,
    grown_depth,
)

CHAIN = SpecConfig(max_depth=4, top_k=1, max_nodes=4)
TREE = SpecConfig(max_depth=4, top_k=4, max_nodes=12)
FREE = CostTable(((1, 1.0), (64, 1.1)))
LINEAR = CostTable(((1, 1.0), (2, 2.0), (64, 64.0)))
# eight rows cost little more than one, thirty-two three times as much: what a small target does
STEEP = CostTable(((1, 1.0), (8, 1.4), (16, 2.3), (32, 4.2), (64, 8.0)))


def alone_policy(costs: CostTable, draft_cost: float = 0.2, **settings: Any) -> SpeculationController:
    return SpeculationController(adaptive=True, draft_cost=draft_cost, costs=costs, **settings)


def test_costs_between_the_points_lie_on_a_line_and_beyond_them_go_on() -> None:
    table = CostTable(((1, 1.0), (4, 1.3), (8, 2.1)))
    assert [table.of(rows) for rows in (0, 1, 4, 8)] == [1.0, 1.0, 1.3, 2.1]
    assert table.of(6) == pytest.approx(1.7)
    assert table.of(2.5) == pytest.approx(1.15)
    assert table.of(12) == pytest.approx(2.9)
    assert table.of(2000) == pytest.approx(2.1 + 0.2 * 1992)


def test_rows_that_no_walk_visits_do_without_the_head() -> None:
    table = CostTable(((1, 1.0), (8, 2.0)), head_share=0.25)
    assert table.worth(8, 8) == 8
    assert table.worth(8, 2) == 8 - 0.25 * 6


def test_acceptance_is_learned_from_what_was_expected() -> None:
    shared = Acceptance()
    own = Acceptance(shared)
    assert own.first == own.later == EXPECTED_ACCEPTANCE
    for _ in range(60):
        shared.learn([1, 1], 0)
    assert own.first == shared.first < 0.2, "nothing of its own was seen yet"
    assert own.later == EXPECTED_ACCEPTANCE, "a second token was never reached"
    for _ in range(60):
        own.learn([1, 1], 2)
    assert own.first > 0.75 > own.later - 0.2
    assert shared.first < 0.2


def test_wide_trees_do_not_make_first_children_look_better() -> None:
    """One of four children holds oftener than the first of them; the estimate is of the first."""
    wide, narrow = Acceptance(), Acceptance()
    for step in range(400):
        # the first child holds half of the time, one of four oftener by the known ratio
        narrow.learn([1], step % 2)
        wide.learn([4], int((step * 0.5 * sum(RANK_RATIOS)) % 1 < 0.5 * sum(RANK_RATIOS)))
    assert wide.first == pytest.approx(narrow.first, abs=0.08)


def test_nodes_come_best_first_and_parents_before_children() -> None:
    gains = Acceptance.like(0.5).gains(TREE)
    assert len(gains) == TREE.max_nodes
    assert [chance for chance, _ in gains] == sorted((chance for chance, _ in gains), reverse=True)
    assert gains[0] == (pytest.approx(0.5), 1)
    assert Acceptance.like(0.5).gains(CHAIN) == tuple((pytest.approx(0.5**d), d) for d in range(1, 5))


def test_cut_trees_are_grown_less_deep() -> None:
    depths = [grown_depth(TREE, nodes) for nodes in range(TREE.max_nodes + 1)]
    assert depths[0] == 0
    assert depths[1] == 1
    assert depths[-1] == TREE.max_depth
    assert depths == sorted(depths)
    assert [grown_depth(CHAIN, nodes) for nodes in range(5)] == [0, 1, 2, 3, 4]


def test_free_rows_make_long_chains_and_dear_rows_none() -> None:
    assert alone_policy(FREE, 0.1).max_nodes(CHAIN) == 4
    assert alone_policy(LINEAR).max_nodes(CHAIN) == 0


def test_refused_drafts_stop_a_sequence_and_accepted_ones_bring_it_back() -> None:
    policy = alone_policy(FREE, 0.4)
    for _ in range(60):
        policy.record([1, 1, 1, 1], 0)
    assert policy.max_nodes(CHAIN) == 0
    for _ in range(PROBE_EVERY - 1):
        policy.record([], 0)
    assert policy.max_nodes(CHAIN) == 1, "a probe drafts as little as it can"
    for _ in range(12):
        policy.record([1], 1)
    assert policy.max_nodes(CHAIN) > 0


def test_probes_that_do_not_pay_become_rarer_and_one_that_does_resets_them() -> None:
    policy = alone_policy(STEEP, 0.3)
    for _ in range(40):
        policy.record([1, 1, 1, 1], 0)
    waits = []
    for _ in range(5):
        steps = 1
        while policy.max_nodes(CHAIN) == 0:
            policy.record([], 0)
            steps += 1
        waits.append(steps)
        policy.record([1], 0)
    assert waits == [PROBE_EVERY * factor for factor in (1, 2, 4, 8, 8)]
    for _ in range(waits[-1] - 1):
        policy.record([], 0)
    policy.record([1], 1)
    assert policy.wait == PROBE_EVERY


def test_trees_whose_shape_is_the_text_are_drafted_whole_or_not_at_all() -> None:
    policy = alone_policy(STEEP, 0.3, whole=True)
    assert policy.max_nodes(TREE) == 12
    for _ in range(60):
        policy.record([4, 4, 4], 0)
    assert policy.max_nodes(TREE) == 0


def test_a_policy_that_is_alone_learns_from_nobody_else() -> None:
    """Rules whose text depends on drafts: who else is served must not matter."""
    policy = alone_policy(FREE)
    assert not policy.pooled
    assert policy.shared is None


def test_a_policy_that_is_not_adaptive_always_drafts_all() -> None:
    policy = SpeculationController(adaptive=False, draft_cost=9.0, costs=LINEAR)
    assert policy.max_nodes(TREE) == 12
    assert not policy.pooled


def test_costs_are_measured_once_and_kept(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Engine(tiny_llama, config=EngineConfig(kv_tokens=64)).decoder
    table = target_costs(decoder, tiny_llama)
    costs = [cost for _, cost in table.points]
    assert [rows for rows, _ in table.points] == list(ROWS)
    assert costs[0] == 1.0
    assert costs == sorted(costs)
    assert min(table.per_context, table.per_sequence, table.sequence_context) >= 0
    assert 0 < table.head_share < 1
    monkeypatch.setattr(cost_model, "measure_costs", lambda decoder: pytest.fail("measured twice"))
    assert target_costs(decoder, tiny_llama) == table


def test_noise_makes_no_pass_free(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stalls while long contexts are measured: short texts still take time, one or many."""
    decoder = Engine(tiny_llama, config=EngineConfig(kv_tokens=64)).decoder

    def seconds(decoder: Any, cache: Any, rows: int, sequences: int = 1, *, context: int = CONTEXT) -> float:
        return 1.0 + 0.1 * rows + (50.0 if context > CONTEXT else 0.0)

    monkeypatch.setattr(cost_model, "_seconds", seconds)
    table = measure_costs(decoder)
    assert table is not None
    for sequences in (1, 2, 16, 64):
        beside = table.beside([(1, 1)] * sequences)
        assert table.of(sequences) + beside > 0.4 * table.of(1)


def test_old_and_damaged_tables_are_measured_anew(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Engine(tiny_llama, config=EngineConfig(kv_tokens=64)).decoder
    monkeypatch.setattr(cost_model, "measure_costs", lambda decoder: LINEAR)
    monkeypatch.setattr(cost_model, "cost_key", lambda decoder, fingerprint: "one")
    path = cache_home() / "costs" / "one.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = dataclasses.asdict(STEEP)
    old = [{"time": 0, **kept}, {"time": 1e12, **kept}, {"time": time.time(), "points": STEEP.points}]
    for text in ("{", "{}", *map(json.dumps, old)):
        path.write_text(text)
        assert target_costs(decoder, tiny_llama) == LINEAR
    path.write_text(json.dumps({"time": time.time(), **kept}))
    assert target_costs(decoder, tiny_llama) == STEEP


def test_where_nothing_can_be_kept_or_measured_the_engine_still_starts(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decoder = Engine(tiny_llama, config=EngineConfig(kv_tokens=64)).decoder
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cost_model, "cache_home", lambda: tmp_path / "file")
    monkeypatch.setattr(cost_model, "measure_costs", lambda decoder: LINEAR)
    assert target_costs(decoder, tiny_llama) == LINEAR
    monkeypatch.setattr(cost_model, "measure_costs", lambda decoder: None)
    assert target_costs(decoder, tiny_llama) == FIXED_COSTS
    assert measure_costs(decoder, budget=0.0) is None


def test_the_key_tells_threads_and_storage_apart(tiny_llama: Path) -> None:
    decoder = Engine(tiny_llama, config=EngineConfig(kv_tokens=64)).decoder
    key = cost_key(decoder, "a")
    assert key != cost_key(decoder, "b")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert cost_key(decoder, "a") != key
    finally:
        torch.set_num_threads(threads)


def test_costs_are_asked_for_only_where_something_drafts(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=64))
    assert engine.budget.costs.table == FIXED_COSTS
    fixed = EngineConfig(pass_costs="fixed")
    costs = engine_costs(fixed, engine.decoder, tiny_llama, drafts=True)
    costs.saw_pass(8, 1.0)
    assert (costs.table, costs.steps) == (FIXED_COSTS, 0), "fixed costs are not corrected"
    with pytest.raises(SpecdecError, match=r"pass_costs \('guessed'\)"):
        EngineConfig(pass_costs="guessed")


def test_the_batch_changes_how_much_is_drafted_and_no_token(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4, index] for index in range(8)]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    fixed = LiveCosts(STEEP, learns=False)
    monkeypatch.setattr("specdec.engine.engine_costs", lambda *args, **options: fixed)
    config = EngineConfig(kv_tokens=2048, spec=SpecConfig(max_depth=4, top_k=1, max_nodes=4))
    engine = Engine(tiny_llama, draft="ngram", config=config)
    alone = [engine.generate([prompt], greedy)[0] for prompt in prompts]
    together = engine.generate(prompts, greedy)
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert sum(r.stats.drafted for r in together) < sum(r.stats.drafted for r in alone)


def test_the_start_says_what_it_took(tiny_llama: Path) -> None:
    seconds = Engine(tiny_llama, draft="ngram", config=EngineConfig(kv_tokens=64)).startup.seconds
    assert list(seconds) == ["target", "tokenizer", "draft", "pool and costs"]
    assert all(value >= 0 for value in seconds.values())
