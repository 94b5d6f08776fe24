"""The adaptive policy's numbers as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from specdec.live_costs import LiveCosts
from specdec.node_budget import NodeBudget
from specdec.server.speculation_gauges import speculation_gauges
from specdec.speculation import CostTable


def test_costs_acceptance_and_decisions_are_read() -> None:
    budget = NodeBudget(LiveCosts(CostTable(((1, 1.0), (8, 1.5)))))
    budget.shared.learn([1, 1], 2)
    budget.costs.saw_pass(1, 0.01)
    for _ in range(20):
        budget.costs.saw_pass(8, 0.02)

    class Collected:
        def collect(self):  # type: ignore[no-untyped-def]  # prometheus_client has no stubs for this
            return speculation_gauges(budget)

    registry = CollectorRegistry()
    registry.register(Collected())
    text = generate_latest(registry).decode()
    assert 'specdec:speculation_pass_cost{rows="1"} 1.0' in text
    assert f'specdec:speculation_pass_cost{{rows="8"}} {budget.costs.table.of(8)}' in text
    assert budget.costs.table.of(8) > 1.5
    assert f'specdec:speculation_expected_acceptance{{token="first"}} {budget.shared.first}' in text
    for name in ("expected_gain", "planned_nodes", "draft_cost_factor", "probes_total", "cost_updates_total"):
        assert f"specdec:speculation_{name} " in text
