"""Entropy-windowed greedy verification, after FLy (arXiv 2511.22972).

Owns the rule: the text is greedy, but a drafted token that is not the target's choice stands where the target
itself is undecided and agrees with the draft again right after. Undecided: entropy of p over ln vocab above
theta. Agrees: each of the next `window` drafted tokens is the target's choice at its place; a window that
reaches beyond the draft is not met. It looks at later tokens before it accepts an earlier one, so no law of
p and q alone describes what comes out.
"""

from __future__ import annotations

import numpy as np

from specdec.divergence import entropy
from specdec.random_streams import UniformSource
from specdec.sampling import as_law
from specdec.tree import DraftTree
from specdec.verification.laws import Law, argmax_law
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import Knob, Rule


def normalised_entropy(p: Law) -> float:
    """Entropy over that of the uniform law, in [0, 1]."""
    return min(1.0, entropy(p) / float(np.log(p.size))) if p.size > 1 else 0.0


def verify_windowed(
    tree: DraftTree,
    target_probs: ProbRows,
    stream: UniformSource,
    position: int,
    theta: float,
    window: int,
) -> VerifyResult:
    """Follow a chain as long as its tokens are the target's choices, or are forgiven.

    Args:
        tree: a chain.
        target_probs: law after each node.
        stream: not used, nothing is drawn.
        position: not used.
        theta: normalised entropy above which a mismatch may be forgiven.
        window: how many tokens after it must be the target's choices.
    """
    assert tree.is_chain, "this rule looks ahead along one path; whoever binds it refuses trees"
    num_drafted = tree.num_drafted
    # rows stand for the token after them, so row i decides node i + 1
    laws = [as_law(target_probs[node]) for node in range(tree.num_nodes)]
    choices = [int(np.argmax(p)) for p in laws]
    matches = [tree.token_ids[node + 1] == choices[node] for node in range(num_drafted)]
    length = 0
    while length < num_drafted:
        ahead = matches[length + 1 : length + 1 + window]
        p = laws[length] / laws[length].sum()
        forgiven = (
            normalised_entropy(p) > theta
            and p[tree.token_ids[length + 1]] > 0.0
            and len(ahead) == window
            and all(ahead)
        )
        if not matches[length] and not forgiven:
            break
        length += 1
    return VerifyResult(
        accepted_nodes=list(range(1, length + 1)),
        next_token_id=choices[length],
        next_kind="bonus" if length == num_drafted else "recovered",
    )


WINDOWED = Rule(
    name="windowed",
    kind="truncation-based",
    topology="chain",
    draft="any",
    knobs=(
        Knob(
            name="theta",
            default=0.3,
            low=0.0,
            high=1.0,
            meaning="entropy of p over ln vocab above which a mismatch may stand; 1 is greedy",
        ),
        Knob(
            name="window",
            default=6.0,
            low=1.0,
            high=1000.0,
            integral=True,
            meaning="how many drafted tokens after a mismatch must be the target's choices",
        ),
    ),
    emitted_law=None,
    bonus_law=lambda p, knobs: argmax_law(p),
    overshoot_bound=lambda knobs: None,
    neutral={"theta": 1.0},
    sentence="The text is greedy, but a drafted token stands where the target is undecided and goes on as "
    "drafted for the whole window.",
    verify=lambda tree, target_probs, stream, position, knobs: verify_windowed(
        tree, target_probs, stream, position, knobs["theta"], int(knobs["window"])
    ),
)
