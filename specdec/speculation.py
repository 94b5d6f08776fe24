"""When speculation pays: a per-sequence policy on counts, never on clocks.

The decision reads only what this sequence drafted and what was accepted, and a fixed table of
relative costs. It is therefore the same in every run, whatever the machine's load: sampled text
stays a function of the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config import SpecConfig

# relative time of a target pass over this many rows of one sequence, one row = 1; measured on
# 2 AVX-512 cores with packed fp16 weights (SmolLM2-135M) by `specdec bench --verify-cost`; see results/LOG.md
VERIFY_COST = ((4, 1.04), (8, 1.32), (12, 1.58), (16, 2.08), (24, 2.58), (32, 3.31))
EMA_WEIGHT = 0.15  # about the last dozen steps
PROBE_EVERY = 24  # steps without speculation before one step tries again
WARM_UP_STEPS = 4  # steps before the policy may switch off


def verify_cost(rows: int) -> float:
    """Relative time of one target pass over `rows` rows (1.0 for one row)."""
    if rows <= 1:
        return 1.0
    for limit, cost in VERIFY_COST:
        if rows <= limit:
            return cost
    last_rows, last_cost = VERIFY_COST[-1]
    return last_cost * rows / last_rows


@dataclass
class SpeculationController:
    """Decides for one sequence how many nodes the next step may draft.

    `committed` is a moving average of tokens committed by the steps that drafted, `cost` of their
    relative time. While committed < cost the sequence decodes plainly, and every `PROBE_EVERY`
    steps one step drafts again.
    """

    adaptive: bool
    draft_cost: float
    committed: float = 2.0
    cost: float = 1.0
    steps: int = 0
    idle: int = 0

    def max_nodes(self, spec: SpecConfig) -> int:
        """Nodes for the next step; asking changes nothing, since a step may be planned and not run."""
        if not self.adaptive or self.steps < WARM_UP_STEPS or self.committed >= self.cost:
            return spec.max_nodes
        # once due, a probe stays due until a step has really drafted (a lookup may find nothing)
        return spec.max_nodes if self.idle + 1 >= PROBE_EVERY else 0

    def record(self, drafted: int, committed: int) -> None:
        """Record a step: `drafted` nodes verified, `committed` tokens gained. Plain ones make a probe due."""
        if drafted == 0:
            self.idle += 1
            return
        self.steps += 1
        self.idle = 0
        cost = verify_cost(1 + drafted) + self.draft_cost
        self.committed += EMA_WEIGHT * (committed - self.committed)
        self.cost += EMA_WEIGHT * (cost - self.cost)
