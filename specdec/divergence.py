"""How far one law is from another, and what a lossy rule costs on it.

Owns the measures that audits, sweeps and the laws of lossy rules share: total variation, Kullback-Leibler and
Jensen-Shannon divergence, entropy, overshoot, overlap, and the linear front. Laws are float64 rows `[vocab]`
that sum to 1; logarithms are natural. Does not know rules or trees. Letters: p the target's law, q the
draft's, pi the law a rule emits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Law = NDArray[np.float64]


def total_variation(first: Law, second: Law) -> float:
    """Half the sum of the absolute differences: the largest difference of any event's probability."""
    return float(np.abs(first - second).sum() / 2.0)


def overlap(first: Law, second: Law) -> float:
    """Sum of the minima, 1 - total variation: the most that one draft can be accepted with."""
    return float(np.minimum(first, second).sum())


def entropy(law: Law) -> float:
    """Entropy in nats; ids without probability count nothing."""
    mass = law[law > 0.0]
    # a law with all its mass on one id has entropy 0, not -0
    return max(0.0, -float((mass * np.log(mass)).sum()))


def kl_divergence(first: Law, second: Law) -> float:
    """KL(first || second) in nats; infinite where `first` has mass that `second` has not.

    What a rule's law costs is KL(pi || p) of the emitted law to the target's.
    """
    inside = first > 0.0
    if (second[inside] == 0.0).any():
        return float("inf")
    ratio = np.log(first[inside]) - np.log(second[inside])
    return max(0.0, float((first[inside] * ratio).sum()))


def js_divergence(first: Law, second: Law) -> float:
    """Jensen-Shannon divergence in nats: symmetric, at most ln 2."""
    middle = (first + second) / 2.0
    return (kl_divergence(first, middle) + kl_divergence(second, middle)) / 2.0


def overshoot(emitted: Law, target: Law) -> float:
    """The largest pi(x) / p(x): how much more often than the target the rule says some token.

    Infinite where the target never says it.
    """
    inside = emitted > 0.0
    if (target[inside] == 0.0).any():
        return float("inf")
    return float((emitted[inside] / target[inside]).max())


def front_gap(rejection: float, emitted: Law, target: Law, draft: Law) -> float:
    """How far a rule lies above the linear front: rejection + TV(pi, p) - TV(p, q).

    No rule that emits pi from one draw of q has less than 0: it accepts at most overlap(pi, q), and the
    triangle inequality does the rest. 0: nothing that is given away in fidelity is wasted.

    Args:
        rejection: probability that the drafted token is not accepted.
        emitted: pi.
        target: p.
        draft: q.
    """
    return rejection + total_variation(emitted, target) - total_variation(target, draft)
