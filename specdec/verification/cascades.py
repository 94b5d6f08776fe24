"""Speculative cascades: the draft's own token stands until a test defers to the target.

Owns the tests and the declarations (Narasimhan et al., arXiv 2405.19261). Position cascades decide for a
whole position, from p and q alone; token cascades decide for each token. q is confined to the target's
support before any test (see `lossy_laws`). alpha prices a deferral: the larger, the more of the text is the
draft's; -2 defers every time, so that the text has the target's law.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specdec.divergence import total_variation
from specdec.verification.laws import Law
from specdec.verification.lossy_laws import confined
from specdec.verification.replaced import collaborative_rule
from specdec.verification.rules import Knob, Rule

_NEUTRAL = {"alpha": -2.0}


def position_cascade(p: Law, q: Law, defers: Callable[[Law, Law], bool]) -> Law:
    """Return p where the position is deferred to the target, else the draft's law.

    Args:
        p: the target's law.
        q: the draft's law.
        defers: (p, confined q) -> whether the target decides.
    """
    draft = confined(q, p)
    return p if defers(p, draft) else draft


def token_cascade(p: Law, q: Law, deferred: Callable[[Law, Law], NDArray[np.bool_]]) -> Law:
    """Return q(v) where v stands, and p in proportion to the draft's mass on the tokens that do not.

    Args:
        p: the target's law.
        q: the draft's law.
        deferred: (p, confined q) -> bool `[vocab]`, the tokens that do not stand.
    """
    draft = confined(q, p)
    handed_over = deferred(p, draft)
    return np.where(handed_over, 0.0, draft) + p * draft[handed_over].sum()


def _alpha(default: float, meaning: str) -> tuple[Knob, ...]:
    return (
        Knob(
            name="alpha",
            default=default,
            low=-2.0,
            high=1.0,
            meaning=f"{meaning}; -2 always defers",
        ),
    )


def _position(
    name: str, default: float, meaning: str, when: str, defers: Callable[[Law, Law, float], bool]
) -> Rule:
    return collaborative_rule(
        name=name,
        law=lambda p, q, knobs: position_cascade(p, q, lambda p, q: defers(p, q, knobs["alpha"])),
        knobs=_alpha(default, meaning),
        neutral=_NEUTRAL,
        sentence=f"Each token is the draft's own, except that the target decides {when}.",
    )


def _token(
    name: str, default: float, when: str, deferred: Callable[[Law, Law, float], NDArray[np.bool_]]
) -> Rule:
    return collaborative_rule(
        name=name,
        law=lambda p, q, knobs: token_cascade(p, q, lambda p, q: deferred(p, q, knobs["alpha"])),
        knobs=_alpha(default, "how far below the target's best probability still stands"),
        neutral=_NEUTRAL,
        sentence=f"A token of the draft stands unless {when}; the target then draws another in its place.",
    )


CASCADES: tuple[Rule, ...] = (
    _position(
        "cascade-chow",
        0.3,
        "how unsure the draft may be and still decide",
        "where the draft is not sure, max q < 1 - alpha",
        lambda p, q, alpha: bool(q.max() < 1.0 - alpha),
    ),
    _position(
        "cascade-diff",
        0.1,
        "by how much the target may be surer without deciding",
        "where it is surer than the draft by more than alpha, max q < max p - alpha",
        lambda p, q, alpha: bool(q.max() < p.max() - alpha),
    ),
    _position(
        "cascade-opt",
        0.3,
        "price of a rejection, in gained confidence",
        "where it is surer by more than alpha times the rejections that costs, max q < max p - alpha TV",
        lambda p, q, alpha: bool(q.max() < p.max() - alpha * total_variation(p, q)),
    ),
    _token(
        "cascade-token-v1",
        0.1,
        "the draft itself gives it too little, q < max p - alpha",
        lambda p, q, alpha: q < p.max() - alpha,
    ),
    _token(
        "cascade-token-v2",
        0.1,
        "the target gives it too little, p < max p - alpha",
        lambda p, q, alpha: p < p.max() - alpha,
    ),
    _token(
        "cascade-token-v3",
        0.5,
        "the target gives it too small a share of its best, p < (1 - alpha) max p",
        lambda p, q, alpha: p < (1.0 - alpha) * p.max(),
    ),
)
