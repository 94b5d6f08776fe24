"""The laws that collaborative rules emit, as functions of the target's p and the draft's q.

Owns the formulas; `collaborative` turns them into rules by verifying the draft against them with the exact
rule, so that each law here is what comes out. Laws are float64 `[vocab]`, sum to 1, and every result is 0
where p is 0. Does not know trees, random numbers or the registry.

**No token that the target excludes.** The published interpolation, cascades and fuzzy rules emit q's mass
even where p is 0 (a filter, a bad word, a grammar). Here they are the published formula with q replaced by
`confined(q, p)`: q where p has mass, and the mass q has elsewhere spread like norm((p - q)+), the residual of
token rejection. It is what "accept whatever the target may say at all, else recover" emits, it is p itself
where the supports are disjoint, and since it lies between p and q everywhere, rules that are on the linear
front stay on it. Formulas that never exceed a multiple of p (lenience, mentored, Cactus) need no such cut.

Sources: lenience: 2211.17192 A.5; its floor variant: the "lossy speculative decoding" baseline of 2405.19261;
interpolation: CoS 2502.01662, 2604.07622; fuzzy: 2502.20704; mentored: 2609.30474; Cactus:
2604.04987. Cascades are in `cascades.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specdec.verification.laws import Law, residual

# q / p overflows where p is denormal; a ceiling must stay a number
_LARGEST_RATIO = 1e300


def confined(q: Law, p: Law) -> Law:
    """Hold q to the support of p; the mass it has elsewhere goes to norm((p - q)+)."""
    inside = np.where(p > 0.0, q, 0.0)
    lost = q[p == 0.0].sum()
    return inside + lost * residual(p, q) if lost > 0.0 else inside


def lenient(p: Law, q: Law, lenience: float) -> Law:
    """Accept with min(1, p / (lenience q)), recover from norm((p - q)+)."""
    accepted = np.minimum(q, p / lenience)
    return accepted + max(0.0, 1.0 - accepted.sum()) * residual(p, q)


def lenient_scaled(p: Law, q: Law, lenience: float) -> Law:
    """Accept with min(1, p / (lenience q)), recover from norm((p - lenience q)+)."""
    accepted = np.minimum(q, p / lenience)
    return accepted + max(0.0, 1.0 - accepted.sum()) * residual(p, lenience * q)


def lenient_floor(p: Law, q: Law, lenience: float) -> Law:
    """Accept with min(1, p / (lenience q)), recover so that clip(q, b p, p / lenience) comes out.

    b makes it a law: the recovered token lifts every id that q says too rarely to the same multiple of p. Of
    all laws with this ceiling and this acceptance it is the nearest to p in KL.
    """
    return _Clip(p, q).at(1.0 / lenience)


def interpolated(p: Law, q: Law, weight: float) -> Law:
    """Mix the two: weight p + (1 - weight) q, q confined."""
    return weight * p + (1.0 - weight) * confined(q, p)


def fuzzy(p: Law, q: Law, threshold: float, divergence: Callable[[Law, Law], float]) -> Law:
    """The draft's law, confined, where it is nearer to p than the threshold, else p."""
    draft = confined(q, p)
    return draft if divergence(draft, p) < threshold else p


def mentored(p: Law, q: Law, budget: float) -> Law:
    """Of all laws with KL(pi || p) <= budget, the one with the largest overlap with q.

    It is clip(q, b p, a p) with b <= 1 <= a, both set by the total mass and the budget.

    Args:
        p: the target's law.
        q: the draft's law.
        budget: nats; 0 gives p.
    """
    if budget == 0.0:
        return p
    clip = _Clip(p, q)
    low, high = 0.0, float(np.log(clip.largest_ratio))
    if clip.divergence(clip.largest_ratio) <= budget:
        return clip.at(clip.largest_ratio)
    # to the last bit
    while low < (middle := (low + high) / 2.0) < high:
        if clip.divergence(float(np.exp(middle))) <= budget:
            low = middle
        else:
            high = middle
    # the lower end keeps to the budget
    return clip.at(float(np.exp(low)))


class _Clip:
    """The laws clip(q, b p, a p) of one pair: for each ceiling a >= 1 there is one floor b <= 1.

    Ids stand in order of q/p, so that what a ceiling takes away and a floor adds are differences of running
    sums: one sort, then a few look-ups for each ceiling tried.

    Args:
        p: the target's law.
        q: the draft's law.
    """

    def __init__(self, p: Law, q: Law) -> None:
        self._p, self._q = p, q
        inside = p > 0.0
        with np.errstate(over="ignore"):
            ratio = np.minimum(q[inside] / p[inside], _LARGEST_RATIO)
        order = np.argsort(ratio, kind="stable")
        self._ratio = ratio[order]
        p_sorted, q_sorted = p[inside][order], q[inside][order]
        log_ratio = np.log(np.where(self._ratio > 0.0, self._ratio, 1.0))
        # sums over the ids before each place; those from it on are summed apart, since there a huge ratio
        # belongs to a tiny p that a difference would lose
        self._p_before, self._p_from = _sums(p_sorted)
        self._q_before, self._q_from = _sums(q_sorted)
        self._kl_before, _ = _sums(q_sorted * log_ratio)
        self._q_outside = float(q[~inside].sum())
        # what a floor at the ratio of each id adds
        self._added = self._ratio * self._p_before[1:] - self._q_before[1:]
        # beyond it the ceiling touches nothing
        self.largest_ratio = max(1.0, float(self._ratio[-1]))

    def at(self, ceiling: float) -> Law:
        """Return the law with this ceiling."""
        missing = float((self._q - np.minimum(self._q, ceiling * self._p)).sum())
        floor, _ = self._floor(missing)
        law = np.clip(self._q, floor * self._p, ceiling * self._p)
        return law / law.sum()

    def divergence(self, ceiling: float) -> float:
        """KL of the law with this ceiling to p, in nats; it grows with the ceiling."""
        above = int(np.searchsorted(self._ratio, ceiling, side="right"))
        capped = ceiling * self._p_from[above]
        floor, below = self._floor(self._q_outside + self._q_from[above] - capped)
        below = min(below, above)
        kl = np.log(ceiling) * capped + self._kl_before[above] - self._kl_before[below]
        return float(kl + (floor * np.log(floor) * self._p_before[below] if floor > 0.0 else 0.0))

    def _floor(self, mass: float) -> tuple[float, int]:
        """Find the b that adds this mass, sum (b p - q)+, and how many ids it lifts."""
        below = int(np.searchsorted(self._added, mass, side="right"))
        if below == 0:
            return 0.0, 0
        return min(1.0, float((mass + self._q_before[below]) / self._p_before[below])), below


def _sums(values: Law) -> tuple[Law, Law]:
    """Sums over the values before each place, and from each place on; one more of each than values."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    onward = np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])
    return before, onward


def cactus_proposal(p: Law, token: int, delta: float) -> Law:
    """Lift the drawn token to p + sqrt(2 delta p (1 - p)), at most 1, and scale the others down."""
    chance = float(p[token])
    # rounding may leave a sure token at 1 + 1e-16
    rest = max(0.0, 1.0 - chance)
    lifted = min(1.0, chance + float(np.sqrt(2.0 * delta * chance * rest)))
    law = p * ((1.0 - lifted) / rest) if rest > 0.0 else np.zeros_like(p)
    law[token] = lifted
    return law


def cactus(p: Law, q: Law, delta: float) -> Law:
    """What comes out when each drawn token is verified against a proposal of its own.

    No single law is verified against, so the draws are summed over: those accepted, and for each that can be
    rejected the residual of its own proposal. It lies between p and q, so the rule is on the linear front:
    every residual has a mass of at least all that is rejected, and lies below that of p.
    """
    lifted = np.minimum(1.0, p + np.sqrt(2.0 * delta * p * np.maximum(0.0, 1.0 - p)))
    law = np.minimum(q, lifted)
    for token in np.flatnonzero(q > lifted):
        proposal = cactus_proposal(p, int(token), delta)
        law = law + (q[token] - lifted[token]) * residual(proposal, q)
    return law
