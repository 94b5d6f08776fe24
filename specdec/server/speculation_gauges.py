"""What the adaptive policy believes and decided, for Prometheus.

Reads single numbers of the engine's budget of nodes while its thread works.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specdec.node_budget import NodeBudget
from specdec.server.metrics import PREFIX


def speculation_gauges(budget: NodeBudget) -> Iterator[Metric]:
    """Costs, acceptance and the last plan."""
    costs = budget.costs
    passes = GaugeMetricFamily(
        f"{PREFIX}speculation_pass_cost", "Time of a pass by its rows, one row is 1.", labels=["rows"]
    )
    for rows, cost in costs.table.points:
        passes.add_metric([str(rows)], cost)
    yield passes
    acceptance = GaugeMetricFamily(
        f"{PREFIX}speculation_expected_acceptance",
        "Acceptance that new requests begin with.",
        labels=["token"],
    )
    acceptance.add_metric(["first"], budget.shared.first)
    acceptance.add_metric(["later"], budget.shared.later)
    yield acceptance
    for name, text, value in (
        ("speculation_draft_cost_factor", "Seen over assumed cost of proposals.", costs.drafting),
        ("speculation_expected_gain", "Tokens per time of the last plan over plain.", budget.expected_gain),
        ("speculation_planned_nodes", "Nodes of the last plan, of all requests.", budget.planned_nodes),
    ):
        yield GaugeMetricFamily(PREFIX + name, text, value=value)
    for name, text, value in (
        ("speculation_probes", "Steps that drafted a node to find out.", budget.probes),
        ("speculation_cost_updates", "Changes of the costs while serving.", costs.version),
    ):
        yield CounterMetricFamily(PREFIX + name, text, value=value)
