"""Which drafted tokens are committed: pure functions of (tree, p, q, random numbers).

Glossary. p: the target's law after a node, q: the draft's law its children were drawn from (letters as in
Leviathan et al., arXiv 2211.17192), both after temperature and filters. *drafted*: a node of the tree, root
not counted. *accepted*: a drafted node on the path the rule commits. *recovered*: the token drawn after
every child of the last accepted node was rejected. *bonus*: the token drawn after a path accepted to a
leaf. *committed*: tokens really added to the output, after end tokens and limits cut the step (the engine's
business, not known here). *acceptance length*: committed tokens per verify step, recovered and bonus
included.

Owns the rules and their registry. Every rule here is lossless: whatever the tree, the emitted tokens have the
target's law. Sources: token rejection: 2211.17192, 2302.01318; recursive rejection without replacement: RSD
2402.14160, Sequoia 2402.12374, EAGLE-2 2406.16858; deterministic children: the same with q one-hot.

Numbers: ACCEPT number i belongs to node i; one RESIDUAL or one BONUS number ends the step; all at the
position of the step's root, so no number decides twice. `verify_coupled` alone draws a BONUS number per
level, at the position of the token it follows: the number plain decoding draws there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.random_streams import Coin, Purpose, UniformSource
from specdec.sampling import as_law, sample
from specdec.tree import DraftTree

Law = NDArray[np.float64]
NextKind = Literal["bonus", "recovered"]
RuleKind = Literal["lossless", "truncation-based", "collaborative"]


class ProbRows(Protocol):
    """The target's law after each node: a Tensor `[nodes, vocab]`, or rows made on demand (`LazyProbs`)."""

    def __getitem__(self, node: int, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """What one verify step commits.

    Attributes:
        accepted_nodes: the accepted path, root not included, from shallow to deep.
        next_token_id: the token after it.
        next_kind: whether that token is the bonus or the recovered one.
    """

    accepted_nodes: list[int]
    next_token_id: int
    next_kind: NextKind


def verify_greedy(tree: DraftTree, target_argmax: Sequence[int]) -> VerifyResult:
    """Follow the target's own choices down the tree (rule 2.9).

    Args:
        tree: the proposals.
        target_argmax: the target's greedy token after each node (lowest id among equals).
    """
    node, wanted, has_children = 0, target_argmax[0], False
    accepted: list[int] = []
    token_ids, parents = tree.token_ids, tree.parents
    # children stand after their parent, so one sweep is the whole walk
    for child in range(1, len(parents)):
        if parents[child] != node:
            continue
        if token_ids[child] == wanted:
            accepted.append(child)
            node, wanted, has_children = child, target_argmax[child], False
        else:
            has_children = True
    return VerifyResult(
        accepted_nodes=accepted,
        next_token_id=int(wanted),
        next_kind="recovered" if has_children else "bonus",
    )


def verify_deterministic(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Take the children one by one with the probability p gives them (rule 2.2 on trees).

    Exact for every tree, however it was made, as long as making it did not use the numbers drawn here.

    Args:
        tree: the proposals; `draft_probs` is not looked at.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    return _walk(tree, None, target_probs, stream, position)


def verify_rejection(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Take a child with probability min(1, p/q), then go on with what q left of p (rules 2.1 and 2.5).

    Token rejection on a chain; recursive rejection without replacement on a tree, siblings in draw order
    and the whole of q subtracted. Nodes whose row of `draft_probs` is zero have deterministic children
    (rule 2.2).

    Args:
        tree: the proposals with their draft laws.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    return _walk(tree, tree.draft_probs, target_probs, stream, position)


def verify_coupled(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Draw the target's own token after each node and follow it while it was drafted.

    The number of a draw depends on the absolute position of its token alone, so the text is what plain
    decoding draws with the same seed, whatever was drafted. A child y is accepted with probability p(y), as
    by `verify_deterministic`. Exact for every tree whose making did not use BONUS numbers.

    Args:
        tree: the proposals; `draft_probs` is not looked at.
        target_probs: law after each node.
        stream: the request's random numbers.
        position: absolute position of the tree's root.
    """
    accepted: list[int] = []
    node = 0
    while True:
        (u,) = stream.uniform(position + len(accepted), Purpose.BONUS)
        token = sample(target_probs[node], u)
        children = tree.children[node]
        child = next((child for child in children if tree.token_ids[child] == token), None)
        if child is None:
            next_kind: NextKind = "recovered" if children else "bonus"
            return VerifyResult(accepted_nodes=accepted, next_token_id=token, next_kind=next_kind)
        accepted.append(child)
        node = child


def _walk(
    tree: DraftTree,
    draft_probs: Tensor | None,
    target_probs: ProbRows,
    stream: UniformSource,
    position: int,
) -> VerifyResult:
    """Descend while a child is accepted, then draw the next token from what is left of p."""
    coins = stream.uniform(position, Purpose.ACCEPT, count=tree.num_nodes)
    accepted: list[int] = []
    node = 0
    while children := tree.children[node]:
        p = as_law(target_probs[node])
        q = None if draft_probs is None else as_law(draft_probs[node])
        if q is None or not q.any():
            child, p = _choose_deterministic(tree, children, p, coins)
        else:
            child, p = _choose_sampled(tree, children, p, q, coins)
        if child is None:
            (u,) = stream.uniform(position, Purpose.RESIDUAL)
            return VerifyResult(accepted_nodes=accepted, next_token_id=sample(p, u), next_kind="recovered")
        accepted.append(child)
        node = child
    (u,) = stream.uniform(position, Purpose.BONUS)
    next_token_id = sample(target_probs[node], u)
    return VerifyResult(accepted_nodes=accepted, next_token_id=next_token_id, next_kind="bonus")


def _choose_deterministic(
    tree: DraftTree, children: list[int], p: Law, coins: Sequence[Coin]
) -> tuple[int | None, Law]:
    """Pick a child, or none and the rest of p.

    A rejected token leaves p; what stays is renormalised by its own sum rather than by a difference, so that
    p = 0 is never accepted and the last id with mass always is.
    """
    rest = p.copy()
    mass = rest.sum()
    for child in children:
        token = tree.token_ids[child]
        if coins[child] < rest[token] / mass:
            return child, rest
        rest, mass = _without(rest, token)
    return None, rest


def _choose_sampled(
    tree: DraftTree, children: list[int], p: Law, q: Law, coins: Sequence[Coin]
) -> tuple[int | None, Law]:
    """Pick a child, or none and the residual of p.

    A second copy of a drawn token has no probability left in q: it tells nothing and is passed over.
    """
    p = p / p.sum()
    drawn_from = q / q.sum()
    for child in children:
        token = tree.token_ids[child]
        assert q[token] > 0.0, f"node {child} holds a token its draft law gives no probability"
        if drawn_from[token] == 0.0:
            continue
        if coins[child] < p[token] / drawn_from[token]:
            return child, p
        p, drawn_from = _after_rejection(p, drawn_from, token)
    return None, p


def _after_rejection(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    """Return what is left to emit, and the law of the next sibling (all zero when q is used up)."""
    rest, mass = _without(q, token)
    return _residual(p, q), rest / mass if mass > 0.0 else rest


def _without(law: Law, token: int) -> tuple[Law, float]:
    """Remove a token; return the rest, not normalised, and its mass."""
    rest = law.copy()
    rest[token] = 0.0
    return rest, float(rest.sum())


def _residual(p: Law, q: Law) -> Law:
    """Return norm((p - q)+), the law of the token when a draw from q was rejected.

    It is empty only where p and q agree to the last bits; a rejection there has a probability of that
    order, and p itself is the answer that keeps ids without probability out.
    """
    rest = np.maximum(p - q, 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0.0 else p


def _greedy_from_probs(
    tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int
) -> VerifyResult:
    """Give `verify_greedy` the signature of the registry; the numbers are not used."""
    choices = [int(np.argmax(as_law(target_probs[node]))) for node in range(tree.num_nodes)]
    return verify_greedy(tree, choices)


def _law_of_target(p: Law) -> Law:
    """Emit p itself."""
    return p


def _law_of_argmax(p: Law) -> Law:
    """Emit the most probable id, the lowest among equals."""
    law = np.zeros_like(p)
    law[np.argmax(p)] = 1.0
    return law


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way to verify.

    Attributes:
        name: what users write.
        kind: lossless rules emit the law of plain decoding; the others do not.
        uses_draft_probs: whether it needs `DraftTree.draft_probs` to be more than the deterministic rule.
        emitted_law: law of each emitted token given the tokens before it, from the target's law there.
        verify: (tree, target_probs, stream, position of the root) -> result.
    """

    name: str
    kind: RuleKind
    uses_draft_probs: bool
    emitted_law: Callable[[Law], Law]
    verify: Callable[[DraftTree, ProbRows, UniformSource, int], VerifyResult]


RULES: dict[str, Rule] = {
    "greedy": Rule(
        name="greedy",
        kind="lossless",
        uses_draft_probs=False,
        emitted_law=_law_of_argmax,
        verify=_greedy_from_probs,
    ),
    "deterministic": Rule(
        name="deterministic",
        kind="lossless",
        uses_draft_probs=False,
        emitted_law=_law_of_target,
        verify=verify_deterministic,
    ),
    "coupled": Rule(
        name="coupled",
        kind="lossless",
        uses_draft_probs=False,
        emitted_law=_law_of_target,
        verify=verify_coupled,
    ),
    "rejection": Rule(
        name="rejection",
        kind="lossless",
        uses_draft_probs=True,
        emitted_law=_law_of_target,
        verify=verify_rejection,
    ),
}
