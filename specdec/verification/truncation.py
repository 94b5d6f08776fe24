"""Truncation-based rules: which tokens the target's law allows.

Owns the allowed sets and their declarations; what is done with a set is in `gates.py`, SGLang's thresholds
in `thresholds.py`. Sets are functions of p alone. Sources: typical acceptance: Medusa 2401.10774 (natural
logarithm; vLLM's sampler falls back to the argmax, and so does the default here); eta: Hewitt et al.
2210.15191; relaxed: TensorRT-LLM's relaxed acceptance; margin: after MARS 2601.15498, whose test is on
logits and here on the logarithm of p, the same up to the temperature. At temperature 0 p has one token and
every gate is greedy decoding: the rules whose fallback is the argmax are meant for temperature 1, and give
greedy text except where they relax it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.divergence import entropy
from specdec.verification.gates import gate_rule
from specdec.verification.laws import Law, without
from specdec.verification.rules import Allowed, Knob, Rule


def _only(p: Law, ids: Sequence[int] | NDArray[np.intp]) -> Allowed:
    allowed = np.zeros(p.shape, dtype=np.bool_)
    allowed[ids] = True
    return allowed


def entropy_threshold(p: Law, epsilon: float, delta: float) -> float:
    """min(epsilon, delta exp(-entropy)): the flatter p is, the less a token needs."""
    return min(epsilon, delta * float(np.exp(-entropy(p))))


def at_least_share(p: Law, min_p: float) -> Allowed:
    """Tokens with at least this share of the best one's probability; at 1 the best alone."""
    return p >= min_p * p.max() if min_p < 1.0 else _only(p, [int(np.argmax(p))])


def top_k(p: Law, k: int) -> Allowed:
    """The k most probable tokens, lowest ids first among equals at the border."""
    if k >= p.size:
        return np.ones(p.shape, dtype=np.bool_)
    border = np.partition(p, -k)[-k]
    allowed = p > border
    # a partition is a tenth of a sort, and leaves only the ties to order
    ties = np.flatnonzero(p == border)[: k - int(allowed.sum())]
    allowed[ties] = True
    return allowed


def top_p(p: Law, mass: float) -> Allowed:
    """The fewest most probable tokens that reach the mass; at 0 the best alone."""
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order])[:-1] < mass * p.sum()
    return _only(p, order[: 1 + int(before.sum())])


def near_the_best(p: Law, top_n: int, delta: float) -> Allowed:
    """Those of the top n whose probability is within delta of the best one's."""
    return top_k(p, top_n) & (p >= p.max() - delta)


def best_or_close_second(p: Law, margin: float) -> Allowed:
    """The best token, and the second where ln p of the two differs by less than the margin."""
    first = int(np.argmax(p))
    second_best = int(np.argmax(without(p, first)[0]))
    is_close = p[second_best] > 0.0 and np.log(p[first]) - np.log(p[second_best]) < margin
    return _only(p, [first, second_best] if is_close else [first])


_EPSILON = Knob(name="epsilon", default=0.09, low=0.0, high=1.0, meaning="probability that is always enough")
_DELTA = Knob(
    name="delta",
    default=0.3,
    low=0.0,
    high=1e9,
    meaning="multiple of exp(-entropy of p) that is enough where p is flat",
)

TYPICAL = gate_rule(
    name="typical",
    gate=lambda p, knobs: p > entropy_threshold(p, knobs["epsilon"], knobs["delta"]),
    knobs=(_EPSILON, _DELTA),
    default_fallback="argmax",
    neutral={"epsilon": 1.0, "delta": 1e9, "fallback": "target"},
    sentence="A drafted token stands if the target finds it typical, p > min(epsilon, delta exp(-entropy)); "
    "among those the draft decides.",
)
ETA = gate_rule(
    name="eta",
    gate=lambda p, knobs: p >= entropy_threshold(p, knobs["epsilon"], knobs["delta"]),
    knobs=(_EPSILON, _DELTA),
    neutral={"epsilon": 1.0, "delta": 1e9, "fallback": "target"},
    sentence="A drafted token stands if eta-sampling would keep it, p >= min(epsilon, delta exp(-entropy)); "
    "among those the draft decides.",
)
MIN_P = gate_rule(
    name="min-p-gate",
    gate=lambda p, knobs: at_least_share(p, knobs["min_p"]),
    knobs=(
        Knob(
            name="min_p",
            default=0.1,
            low=0.0,
            high=1.0,
            meaning="share of the best token's probability that is enough; with fallback argmax, 1 is greedy",
        ),
    ),
    default_fallback="truncated",
    neutral={"min_p": 1.0, "fallback": "argmax"},
    sentence="A drafted token stands if min-p sampling would keep it; among those the draft decides, so that "
    "the text is not that of min-p sampling.",
)
TOP_K = gate_rule(
    name="top-k-gate",
    gate=lambda p, knobs: top_k(p, int(knobs["k"])),
    knobs=(
        Knob(
            name="k",
            default=5.0,
            low=1.0,
            high=1e9,
            integral=True,
            meaning="how many of the target's best stand; with fallback argmax, 1 is greedy",
        ),
    ),
    default_fallback="truncated",
    neutral={"k": 1, "fallback": "argmax"},
    sentence="A drafted token stands if it is among the target's k best; among those the draft decides, so "
    "that the text is not that of top-k sampling.",
)
TOP_P = gate_rule(
    name="top-p-gate",
    gate=lambda p, knobs: top_p(p, knobs["mass"]),
    knobs=(
        Knob(
            name="mass",
            default=0.9,
            low=0.0,
            high=1.0,
            meaning="probability the allowed tokens must reach; with fallback argmax, 0 is greedy",
        ),
    ),
    default_fallback="truncated",
    neutral={"mass": 0.0, "fallback": "argmax"},
    sentence="A drafted token stands if nucleus sampling would keep it; among those the draft decides, so "
    "that the text is not that of top-p sampling.",
)
RELAXED = gate_rule(
    name="relaxed",
    gate=lambda p, knobs: near_the_best(p, int(knobs["top_n"]), knobs["delta"]),
    knobs=(
        Knob(
            name="top_n",
            default=10.0,
            low=1.0,
            high=1e9,
            integral=True,
            meaning="how many of the target's best may stand; 1 is greedy",
        ),
        Knob(
            name="delta",
            default=0.6,
            low=0.0,
            high=1.0,
            meaning="how far below the best token's probability one may be",
        ),
    ),
    fallback="argmax",
    neutral={"top_n": 1},
    sentence="The text is greedy, but a drafted token stands if it is among the target's top n and at most "
    "delta less probable than the best; meant for thinking text only.",
)
MARGIN = gate_rule(
    name="margin",
    gate=lambda p, knobs: best_or_close_second(p, knobs["margin"]),
    knobs=(
        Knob(
            name="margin",
            default=0.5,
            low=0.0,
            high=100.0,
            meaning="difference of ln p below which the second best token is as good; 0 is greedy",
        ),
    ),
    fallback="argmax",
    neutral={"margin": 0.0},
    sentence="The text is greedy, but a drafted token also stands if it is the target's second choice by "
    "less than the margin.",
)

GATES: tuple[Rule, ...] = (TYPICAL, ETA, MIN_P, TOP_K, TOP_P, RELAXED, MARGIN)
