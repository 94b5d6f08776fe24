"""When a sequence speculates: what the policy makes of costs, batch and acceptance; where costs come from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from specdec import cost_model
from specdec.config import EngineConfig, SpecConfig
from specdec.cost_model import ROWS, cost_key, engine_costs, measure_costs, target_costs
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.provenance import cache_home
from specdec.sequence import SamplingParams
from specdec.speculation import FIXED_COSTS, PROBE_EVERY, CostTable, SpeculationController

CHAIN = SpecConfig(max_depth=4, top_k=1, max_nodes=4)
TREE = SpecConfig(max_depth=4, top_k=4, max_nodes=12)
FREE = CostTable(((1, 1.0), (64, 1.1)))
LINEAR = CostTable(((1, 1.0), (2, 2.0), (64, 64.0)))
# eight rows cost little more than one, thirty-two three times as much: what a small target does
STEEP = CostTable(((1, 1.0), (8, 1.4), (16, 2.3), (32, 4.2), (64, 8.0)))


def chain_policy(costs: CostTable, draft_cost: float = 0.2) -> SpeculationController:
    return SpeculationController(
        adaptive=True, draft_cost=draft_cost, costs=costs, makes_chains=True, alone=False
    )


def test_costs_between_the_points_lie_on_a_line_and_beyond_them_go_on() -> None:
    table = CostTable(((1, 1.0), (4, 1.3), (8, 2.1)))
    assert [table.of(rows) for rows in (0, 1, 4, 8)] == [1.0, 1.0, 1.3, 2.1]
    assert table.of(6) == pytest.approx(1.7)
    assert table.of(2.5) == pytest.approx(1.15)
    assert table.of(12) == pytest.approx(2.9)


def test_free_rows_make_long_chains_and_dear_rows_none() -> None:
    assert chain_policy(FREE, 0.1).max_nodes(CHAIN) == 4
    assert chain_policy(LINEAR).max_nodes(CHAIN) == 0


def test_a_batch_shortens_chains_and_then_stops_them() -> None:
    policy = chain_policy(STEEP, 0.1)
    nodes = [policy.max_nodes(CHAIN, batch) for batch in (1, 2, 3, 4, 8)]
    assert nodes[0] >= 3
    assert nodes == sorted(nodes, reverse=True)
    assert len(set(nodes)) > 2, "chains get shorter before they stop"
    assert nodes[-1] == 0


def test_a_batch_of_well_drafted_texts_still_speculates() -> None:
    policy = chain_policy(STEEP, 0.1)
    for _ in range(60):
        policy.record(4, 5)
    assert policy.max_nodes(CHAIN, 8) > 0


def test_refused_drafts_stop_a_sequence_and_accepted_ones_bring_it_back() -> None:
    policy = chain_policy(FREE, 0.3)
    for _ in range(40):
        policy.record(4, 1)
    assert policy.max_nodes(CHAIN) == 0
    for _ in range(PROBE_EVERY - 1):
        policy.record(0, 1)
    assert policy.max_nodes(CHAIN) == 1, "a probe drafts as little as it can"
    for _ in range(12):
        policy.record(1, 2)
    assert policy.max_nodes(CHAIN) > 0


def test_probes_that_do_not_pay_become_rarer_and_one_that_does_resets_them() -> None:
    policy = chain_policy(STEEP, 0.3)
    for _ in range(40):
        policy.record(4, 1)
    waits = []
    for _ in range(5):
        steps = 1
        while policy.max_nodes(CHAIN) == 0:
            policy.record(0, 1)
            steps += 1
        waits.append(steps)
        policy.record(1, 1)
    assert waits == [PROBE_EVERY * factor for factor in (1, 2, 4, 8, 8)]
    for _ in range(waits[-1] - 1):
        policy.record(0, 1)
    policy.record(1, 2)
    assert policy.wait == PROBE_EVERY


def test_no_probe_is_made_where_full_acceptance_would_not_pay() -> None:
    policy = chain_policy(LINEAR)
    for _ in range(5 * PROBE_EVERY):
        policy.record(0, 1)
    assert policy.max_nodes(CHAIN, 8) == 0


def test_trees_are_drafted_whole_or_not_at_all() -> None:
    policy = SpeculationController(adaptive=True, draft_cost=0.3, costs=STEEP)
    assert policy.max_nodes(TREE) == 12
    for _ in range(30):
        policy.record(12, 1)
    assert policy.max_nodes(TREE) == 0


def test_a_policy_that_is_alone_does_not_see_the_batch() -> None:
    """Rules whose text depends on drafts: who else is served must not matter."""
    policy = SpeculationController(adaptive=True, draft_cost=0.1, costs=STEEP, makes_chains=True)
    assert policy.max_nodes(CHAIN, 64) == policy.max_nodes(CHAIN, 1) > 0


def test_a_policy_that_is_not_adaptive_always_drafts_all() -> None:
    policy = SpeculationController(adaptive=False, draft_cost=9.0, costs=LINEAR)
    assert policy.max_nodes(TREE, 64) == 12


def test_costs_are_measured_once_and_kept(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Engine(tiny_llama, config=EngineConfig(kv_tokens=64)).decoder
    table = target_costs(decoder, tiny_llama)
    costs = [cost for _, cost in table.points]
    assert [rows for rows, _ in table.points] == list(ROWS)
    assert costs[0] == 1.0
    assert costs == sorted(costs)
    monkeypatch.setattr(cost_model, "measure_costs", lambda decoder: pytest.fail("measured twice"))
    assert target_costs(decoder, tiny_llama) == table


def test_old_and_damaged_tables_are_measured_anew(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Engine(tiny_llama, config=EngineConfig(kv_tokens=64)).decoder
    monkeypatch.setattr(cost_model, "measure_costs", lambda decoder: LINEAR)
    monkeypatch.setattr(cost_model, "cost_key", lambda decoder, fingerprint: "one")
    path = cache_home() / "costs" / "one.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for text in ("{", "{}", json.dumps({"time": 0, "points": STEEP.points}), '{"time": 1e12, "points": []}'):
        path.write_text(text)
        assert target_costs(decoder, tiny_llama) == LINEAR
    path.write_text(json.dumps({"time": time.time(), "points": STEEP.points}))
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
    assert engine.admission.costs == FIXED_COSTS
    fixed = EngineConfig(pass_costs="fixed")
    assert engine_costs(fixed, engine.decoder, tiny_llama, drafts=True) == FIXED_COSTS
    with pytest.raises(SpecdecError, match=r"pass_costs \('guessed'\)"):
        EngineConfig(pass_costs="guessed")


def test_the_batch_changes_how_much_is_drafted_and_no_token(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3, 4, 5, 3, 4, 5, 3, 4, index] for index in range(8)]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    monkeypatch.setattr("specdec.engine.engine_costs", lambda *args, **options: STEEP)
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
