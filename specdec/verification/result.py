"""What a verify step returns, and the words for it.

Glossary. p: the target's law after a node, q: the draft's law its children were drawn from (letters as in
Leviathan et al., arXiv 2211.17192), both after temperature and filters. *drafted*: a node of the tree, root
not counted. *accepted*: a drafted node on the path the rule commits. *recovered*: the token drawn after
every child of the last accepted node was rejected. *bonus*: the token drawn after a path accepted to a
leaf. *committed*: tokens really added to the output, after end tokens and limits cut the step (the engine's
business, not known here). *acceptance length*: committed tokens per verify step, recovered and bonus
included.

Numbers of every rule: ACCEPT number i belongs to node i (a rule with one number per level uses the one of
the level's parent); one RESIDUAL or one BONUS number ends the step; all at the position of the step's root,
so no number decides twice. `coupled` alone draws at the position of each token it decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

NextKind = Literal["bonus", "recovered"]
# how a committed token came; plain: the target's own, in a step that verified no drafts
TokenKind = Literal["accepted", "bonus", "recovered", "plain"]


class ProbRows(Protocol):
    """The target's law after each node: a Tensor `[nodes, vocab]`, or rows made on demand (`LazyProbs`)."""

    def __getitem__(self, node: int, /) -> Tensor: ...


class ChoiceRows(Protocol):
    """The target's greedy token after each node: a list, or choices made on demand (`LazyChoices`)."""

    def __getitem__(self, node: int, /) -> int: ...


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
