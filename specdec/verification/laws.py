"""What verification does to laws: take a token out, subtract, renormalise.

Owns the only definitions of the residual and of a law without a token. A law is float64 `[vocab]`, host
memory, non-negative. Does not know trees or random numbers.
"""

from __future__ import annotations

import numpy as np

from specdec.divergence import Law


def without(law: Law, token: int) -> tuple[Law, float]:
    """Remove a token; return the rest, not normalised, and its mass."""
    rest = law.copy()
    rest[token] = 0.0
    return rest, float(rest.sum())


def residual(p: Law, q: Law) -> Law:
    """Return norm((p - q)+), the law of the token when a draw from q was rejected.

    It is empty only where p and q agree to the last bits; a rejection there has a probability of that
    order, and p itself is the answer that keeps ids without probability out.
    """
    rest = np.maximum(p - q, 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0.0 else p


def after_rejection(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    """Return what is left to emit, and the law of the next sibling drawn without replacement.

    Siblings drawn in order, the whole conditional q subtracted; the second law is all zero when q is used
    up.
    """
    rest, mass = without(q, token)
    return residual(p, q), rest / mass if mass > 0.0 else rest


def one_hot(token: int, vocab: int) -> Law:
    """Return the law that is sure of a token."""
    law = np.zeros(vocab)
    law[token] = 1.0
    return law


def argmax_law(p: Law) -> Law:
    """Return the law of the most probable id, the lowest among equals."""
    return one_hot(int(np.argmax(p)), len(p))
