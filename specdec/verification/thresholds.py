"""SGLang's thresholds: the target-only walk with probabilities counted for more than they are.

Owns the declared law; the walk is `target_only.py`'s. One child y drawn from q is taken with a(y), 1 where
p(y) >= threshold_single and else min(1, p(y) / threshold_acc), or replaced by a draw from p without y.
"""

from __future__ import annotations

import numpy as np

from specdec.verification.laws import Law
from specdec.verification.rules import Knob, Knobs, Rule
from specdec.verification.target_only import verify_target_only


def threshold_law(p: Law, q: Law, single: float, accumulated: float) -> Law:
    """Return what one child drawn from q emits.

    Args:
        p: the target's law.
        q: the draft's law, one-hot for a deterministic child.
        single: probability at which a child is taken for sure.
        accumulated: what probabilities are divided by, in (0, 1].
    """
    taken = np.where(p >= single, 1.0, np.minimum(1.0, p / accumulated))
    refused = q * (1.0 - taken)
    # a token is only refused where p(y) < 1, the others never come to the division
    others = np.where(refused > 0.0, 1.0 - p, 1.0)
    weight = refused / others
    return q * taken + p * (weight.sum() - weight)


def _bound(knobs: Knobs) -> float:
    # a(y) <= p(y) / the smaller threshold, and what is left to p never exceeds it
    return 1.0 / min(knobs["threshold_single"], knobs["threshold_acc"])


def _threshold(name: str, meaning: str) -> Knob:
    return Knob(name=name, default=1.0, low=0.0, high=1.0, low_open=True, meaning=meaning)


THRESHOLDS = Rule(
    name="thresholds",
    kind="truncation-based",
    topology="tree",
    draft="any",
    knobs=(
        _threshold("threshold_single", "probability at which a drafted token is taken for sure"),
        _threshold("threshold_acc", "what the siblings' probabilities are divided by before the test"),
    ),
    emitted_law=lambda p, q, knobs: threshold_law(p, q, knobs["threshold_single"], knobs["threshold_acc"]),
    overshoot_bound=_bound,
    neutral={"threshold_single": 1.0, "threshold_acc": 1.0},
    sentence="Drafted tokens are said more often than the target says them, at most 1/threshold times, and "
    "the others less; at 1 and 1, the defaults, the text has the target's law.",
    verify=lambda tree, target_probs, stream, position, knobs: verify_target_only(
        tree,
        target_probs,
        stream,
        position,
        threshold_single=knobs["threshold_single"],
        threshold_acc=knobs["threshold_acc"],
    ),
)
