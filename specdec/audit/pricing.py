"""What a rule's law costs where it was used: TV, KL and overshoot against p, position by position.

From the recorded steps of a run: at every committed position the target's law p, the draft's q there (one-hot
for a deterministic child), and the law pi that the rule emits from them. Per-token figures add along a text:
TV of the text's law <= sum of E[TV] of its tokens. Overshoot sup pi/p is what the collaborative rules differ
by; it is taken over all tokens, not only over those that came out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.audit.recording import VerifiedStep
from specdec.divergence import kl_divergence, overshoot, total_variation
from specdec.sampling import process_logits
from specdec.sampling_params import SamplingParams
from specdec.verification.laws import Law, one_hot
from specdec.verification.rules import BoundRule
from specdec.verification.walk import draft_row

# (p, q or None where nothing was drafted) -> the law the token there had; None: it is not declared
LawAt = Callable[[Law, Law | None], Law | None]
# a law is float64 over the vocabulary: positions looked at are bounded, evenly over the run's batches
MAX_POSITIONS = 1500
# rounding of a law that sums to 1
SLACK = 1e-9


def emitted_by(rule: BoundRule) -> LawAt:
    """The law a rule emits at a position."""
    return lambda p, q: rule.bonus_law(p) if q is None else rule.emitted_law(p, q)


@dataclass
class Prices:
    """Running figures of one setting.

    Attributes:
        law_at: the law of a token, from p and q there.
        params: temperature and filters of the requests.
        bound: declared overshoot bound; None: none.
        limit: positions looked at in all.
    """

    law_at: LawAt
    params: SamplingParams
    bound: float | None = None
    limit: int = MAX_POSITIONS
    positions: int = 0
    drafted: int = 0
    undeclared: int = 0
    excluded_tokens: int = 0
    above_bound: int = 0
    largest_overshoot: float = 0.0
    variations: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    drafted_variations: list[float] = field(default_factory=list)
    draft_variations: list[float] = field(default_factory=list)

    def take(self, steps: list[VerifiedStep], *, share: float) -> None:
        """Price the steps of finished sequences and empty the list.

        Args:
            steps: of one batch.
            share: of the run that is done with this batch, at most 1. Only so much of the limit is used up:
                otherwise the first batches would take it all, and later ones never be priced.
        """
        limit = round(self.limit * share)
        for step in steps:
            self._take(step, limit)
        steps.clear()

    def _take(self, step: VerifiedStep, limit: int) -> None:
        text = step.seq.token_ids
        for row, node in enumerate(step.nodes):
            position = step.root_position + row
            if position + 1 >= len(text):
                return  # an end or a limit cut the step
            if self.positions >= limit:
                return
            p = process_logits(step.logits[row : row + 1], self.params)[0].numpy()
            self.positions += 1
            self.excluded_tokens += p[text[position + 1]] == 0.0
            self._price(p, *_draft_law(step, node, len(p)))

    def _price(self, p: Law, q: Law | None, drawn: bool) -> None:
        emitted = self.law_at(p, q)
        self.drafted += q is not None
        if q is not None and drawn:
            self.draft_variations.append(total_variation(p, q))
        if emitted is None:
            self.undeclared += 1
            return
        variation = total_variation(emitted, p)
        self.variations.append(variation)
        self.divergences.append(kl_divergence(emitted, p))
        if q is not None:
            self.drafted_variations.append(variation)
        over = overshoot(emitted, p)
        self.largest_overshoot = max(self.largest_overshoot, over)
        if self.bound is not None and over > self.bound * (1.0 + SLACK):
            self.above_bound += 1

    def to_dict(self) -> dict[str, Any]:
        """Means over positions, and what must not happen; None where the rule declares no law.

        `draft_total_variation` is that of the draft's law where children were drawn from it.
        """
        # of a text whose drafted tokens have no declared law, the others' figures would say nothing
        declared = self.undeclared == 0
        return {
            "positions": self.positions,
            "drafted_positions": self.drafted,
            "total_variation": _mean(self.variations) if declared else None,
            "total_variation_drafted": _mean(self.drafted_variations),
            "kl": _mean(self.divergences) if declared else None,
            "largest_overshoot": self.largest_overshoot if self.variations and declared else None,
            "overshoot_bound": self.bound,
            "above_bound": self.above_bound,
            "excluded_tokens": int(self.excluded_tokens),
            "draft_total_variation": _mean(self.draft_variations),
        }


def _mean(values: list[float]) -> float | None:
    if not values:
        return None
    mean = float(np.mean(values))
    assert np.isfinite(mean), "a rule never emits what the target excludes, so its divergence is finite"
    return mean


def _draft_law(step: VerifiedStep, node: int, vocab: int) -> tuple[Law | None, bool]:
    """Law of the draft below a node, and whether children were drawn from it.

    One-hot for deterministic children; None without any.
    """
    children = step.tree.children[node]
    if not children:
        return None, False
    drawn = draft_row(step.tree, node)
    if drawn is None:
        return one_hot(step.tree.token_ids[children[0]], vocab), False
    return drawn, True
