"""Counts of speculation in, rates out: one meaning for every report, metric and log line.

Owns the arithmetic and its definitions (`DEFINITIONS`, printed beside the numbers). Counts what was observed,
never what was configured. Does not know time, prompts or intervals. A rate without a denominator is None,
so that JSON stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DEFINITIONS: dict[str, str] = {
    "verify_steps": "target passes, one per sequence and tree",
    "drafted": "proposed nodes, the root not counted",
    "accepted": "drafted nodes the rule accepted, before end tokens and limits cut the step",
    "committed": "tokens the verify steps really added to the output",
    "acceptance_length": "committed / verify_steps, recovered and bonus tokens included; "
    "1.0 is no speculation",
    "acceptance_rate": "accepted / depths drafted (a step whose tree reaches depth D counts D)",
    "acceptance_rate_per_node": "accepted / drafted; equal to acceptance_rate for chains",
    "acceptance_per_depth": "unconditional: steps that accepted at depth d / steps that drafted depth d",
    "acceptance_per_depth_conditional": "steps that accepted at depth d / those that accepted at depth d-1 "
    "and drafted depth d",
}


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _grow(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))


@dataclass(kw_only=True)
class SpecStats:
    """Counters of one sequence, or of many added up.

    Attributes:
        verify_steps: see `DEFINITIONS`, as for `drafted`, `accepted` and `committed`.
        drafted: proposed nodes.
        accepted: accepted nodes.
        committed: tokens added to the output.
        nodes_per_depth: nodes proposed at depth 1, 2, ...
        steps_per_depth: steps whose tree had a node at that depth.
        reached_per_depth: those of them that had accepted the depth above.
        accepted_per_depth: steps that accepted a node at that depth.
    """

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    nodes_per_depth: list[int] = field(default_factory=list)
    steps_per_depth: list[int] = field(default_factory=list)
    reached_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)

    def record_step(
        self, drafted_per_depth: Sequence[int], drafted: int, accepted: int, committed: int
    ) -> None:
        """Count one verify step.

        Args:
            drafted_per_depth: nodes proposed at depth 1, 2, ... (`DraftTree.drafted_per_depth`).
            drafted: nodes proposed.
            accepted: length of the accepted path, the next token not counted.
            committed: tokens really added to the output.
        """
        depth = len(drafted_per_depth)
        assert drafted == sum(drafted_per_depth), f"{drafted} drafted, by depth {list(drafted_per_depth)}"
        assert 0 <= accepted <= depth, f"{accepted} accepted of {depth} depths"
        assert 0 <= committed <= accepted + 1, f"{committed} committed of {accepted} accepted and the next"
        self.verify_steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.committed += committed
        for counts in self._depth_counts():
            _grow(counts, depth)
        for index, nodes in enumerate(drafted_per_depth):
            self.nodes_per_depth[index] += nodes
            self.steps_per_depth[index] += 1
            self.reached_per_depth[index] += accepted >= index
            self.accepted_per_depth[index] += accepted > index

    def add(self, other: SpecStats) -> None:
        """Add another's counts to these."""
        self.verify_steps += other.verify_steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.committed += other.committed
        for mine, theirs in zip(self._depth_counts(), other._depth_counts(), strict=True):
            _grow(mine, len(theirs))
            for index, value in enumerate(theirs):
                mine[index] += value

    @property
    def acceptance_length(self) -> float | None:
        """Committed tokens per verify step."""
        return _ratio(self.committed, self.verify_steps)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted nodes per depth drafted."""
        return _ratio(self.accepted, sum(self.steps_per_depth))

    @property
    def acceptance_rate_per_node(self) -> float | None:
        """Accepted nodes per node drafted."""
        return _ratio(self.accepted, self.drafted)

    @property
    def acceptance_per_depth(self) -> list[float | None]:
        """Unconditional rates at depth 1, 2, ..."""
        return [_ratio(*pair) for pair in zip(self.accepted_per_depth, self.steps_per_depth, strict=True)]

    @property
    def acceptance_per_depth_conditional(self) -> list[float | None]:
        """Rates at depth 1, 2, ... given that the depth above was accepted."""
        return [_ratio(*pair) for pair in zip(self.accepted_per_depth, self.reached_per_depth, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates under the names of `DEFINITIONS`, fit for JSON."""
        return {
            "verify_steps": self.verify_steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "committed": self.committed,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_per_node": self.acceptance_rate_per_node,
            "acceptance_per_depth": self.acceptance_per_depth,
            "acceptance_per_depth_conditional": self.acceptance_per_depth_conditional,
            "nodes_per_depth": list(self.nodes_per_depth),
            "steps_per_depth": list(self.steps_per_depth),
            "accepted_per_depth": list(self.accepted_per_depth),
        }

    def _depth_counts(self) -> tuple[list[int], list[int], list[int], list[int]]:
        return self.nodes_per_depth, self.steps_per_depth, self.reached_per_depth, self.accepted_per_depth
