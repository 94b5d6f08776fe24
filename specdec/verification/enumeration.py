"""The exact joint law of the tokens a rule emits, drafting included, against the law it declares.

Owns toy models whose laws depend on the whole context, the drawing of a toy tree as a rule asks for it, and
the comparison: one step's tokens are continued by the declared law to a common length, so that steps of all
lengths fall into one table. The rule's own code runs on numbers that fork (`specdec.exact_law`). Meant for a
few tokens of vocabulary and a few nodes; level C0 of the audit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.exact_law import exact_law
from specdec.random_streams import Coin, Purpose, UniformSource
from specdec.tree import DraftTree
from specdec.verification.draws import draw_children
from specdec.verification.laws import Law, argmax_law
from specdec.verification.rules import BoundRule, DraftGuarantee

# context (the tokens after the root) -> law of the next token
Model = Callable[[tuple[int, ...]], Law]
MakeTree = Callable[[UniformSource], DraftTree]
# children below each node, by depth or by the draw ranks on the way to the node; none where it says nothing
Branching = Sequence[int] | Mapping[tuple[int, ...], int]
# what one step emits (accepted tokens and the next one) -> probability
StepLaw = dict[tuple[int, ...], float]

# the root's; any would do
POSITION = 11
# concentrations of a Dirichlet law below 1 make uneven laws
_CONCENTRATION = 0.7
_ALMOST_NOTHING = 1e-9

# what each kind makes of the two random laws
TOY_KINDS = (
    "plain",
    "equal",
    "zeros",
    "ties",
    "disjoint",
    "near one-hot",
    "exhausted",
    "reduced vocabulary",
)


def toy_models(kind: str, vocab: int, seed: int = 0) -> tuple[Model, Model]:
    """Target and draft; `kind` (one of `TOY_KINDS`) names the awkward case."""
    ids = np.arange(vocab)

    def law(name: str, context: tuple[int, ...]) -> Law:
        # the seed 0 is left out of the key
        key = repr((name, context) if seed == 0 else (name, context, seed))
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        return rng.dirichlet(np.full(vocab, _CONCENTRATION))

    @cache
    def target(context: tuple[int, ...]) -> Law:
        p = law("p", context)
        if kind == "zeros":
            p = p * (ids != len(context) % vocab)
        elif kind == "ties":
            p = np.ceil(p * 4)
        elif kind == "disjoint":
            p = p * (ids < vocab // 2)
        elif kind == "near one-hot":
            p = np.where(ids == len(context) % vocab, 1.0, _ALMOST_NOTHING)
        return p / p.sum()

    @cache
    def draft(context: tuple[int, ...]) -> Law:
        q = law("q", context)
        if kind == "equal":
            return target(context)
        if kind == "zeros":
            q = q * (ids != (len(context) + 1) % vocab)
        elif kind == "ties":
            q = np.ceil(q * 4)
        elif kind == "disjoint":
            q = q * (ids >= vocab // 2)
        elif kind == "near one-hot":
            q = np.where(ids == (len(context) + 1) % vocab, 1.0, _ALMOST_NOTHING)
        elif kind == "exhausted":
            q = np.where(ids == vocab - 1, 1.0, 0.0)
        elif kind == "reduced vocabulary":
            q = q * (ids % 2 == 0)
        return q / q.sum()

    return target, draft


def draw_tree(
    stream: UniformSource, draft: Model, branching: Branching, guarantee: DraftGuarantee
) -> DraftTree:
    """Draw a tree node by node; how many children a node gets depends on draw ranks, never on tokens."""
    token_ids, parents, rows = [0], [-1], []
    contexts: list[tuple[int, ...]] = [()]
    ranks: list[tuple[int, ...]] = [()]
    for node, context in enumerate(contexts):
        q = draft(context)
        if isinstance(branching, Mapping):
            count = branching.get(ranks[node], 0)
        else:
            count = branching[len(context)] if len(context) < len(branching) else 0
        drawn = draw_children(q, count, guarantee, stream, POSITION, node) if count else []
        for rank, token in enumerate(drawn):
            token_ids.append(token)
            parents.append(node)
            contexts.append((*context, token))
            ranks.append((*ranks[node], rank))
        rows.append(q)
    return DraftTree(token_ids=token_ids, parents=parents, draft_probs=torch.tensor(np.array(rows)))


def contexts_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Tokens from below the root to each node."""
    contexts: list[tuple[int, ...]] = [()]
    for node in range(1, tree.num_nodes):
        contexts.append((*contexts[tree.parents[node]], tree.token_ids[node]))
    return contexts


def target_rows(tree: DraftTree, target: Model) -> Tensor:
    """The target's law after each node, float64 `[nodes, vocab]`."""
    return torch.tensor(np.array([target(context) for context in contexts_of(tree)]))


class _Allowed:
    """The numbers of drafting, or the others, so that the two can be enumerated one after the other."""

    def __init__(self, stream: UniformSource, drafting: bool) -> None:
        self._stream = stream
        self._drafting = drafting

    def uniform(self, position: int, purpose: Purpose, count: int = 1, node: int = 0) -> Sequence[Coin]:
        used_twice = "verification must not look at a number that drafting looks at, nor the other way round"
        assert (purpose == Purpose.DRAFT) == self._drafting, used_twice
        return self._stream.uniform(position, purpose, count, node)

    def race(self, position: int, rates: Law, count: int = 1) -> list[int]:
        assert not self._drafting, "a tree drawn by races shares its noise; use `shared_noise_step_law`"
        return self._stream.race(position, rates, count)


def step_law(make_tree: MakeTree, rule: BoundRule, target: Model) -> StepLaw:
    """Enumerate what one step emits.

    The trees are enumerated first and each is then verified under every outcome of the other numbers; that
    the two use different numbers is asserted.

    Args:
        make_tree: drafts a tree from random numbers.
        rule: the rule.
        target: law of the next token.
    """
    trees: dict[tuple[tuple[int, ...], ...], DraftTree] = {}

    def draw(stream: UniformSource) -> tuple[tuple[int, ...], ...]:
        tree = make_tree(_Allowed(stream, drafting=True))
        shape = (tuple(tree.token_ids), tuple(tree.parents))
        trees[shape] = tree
        return shape

    emitted: StepLaw = {}
    for shape, probability in exact_law(draw).items():
        tree = trees[shape]
        rows = target_rows(tree, target)

        def verify(stream: UniformSource, tree: DraftTree = tree, rows: Tensor = rows) -> tuple[int, ...]:
            result = rule.verify(tree, rows, _Allowed(stream, drafting=False), POSITION)
            return (*tree.tokens_of(result.accepted_nodes), result.next_token_id)

        for tokens, conditional in exact_law(verify).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + probability * conditional
    return emitted


def shared_noise_step_law(make_tree: MakeTree, rule: BoundRule, target: Model) -> StepLaw:
    """Like `step_law` where drafting and verification look at the same numbers: one enumeration runs both."""

    def run(stream: UniformSource) -> tuple[int, ...]:
        tree = make_tree(stream)
        result = rule.verify(tree, target_rows(tree, target), stream, POSITION)
        return (*tree.tokens_of(result.accepted_nodes), result.next_token_id)

    return exact_law(run)


def declared_law(
    rule: BoundRule,
    target: Model,
    draft: Model,
    drafted_depth: int,
    guarantee: DraftGuarantee | None = None,
) -> Model:
    """The law a rule declares after a context: of drafted tokens down to a depth, then of undrafted ones.

    Args:
        rule: the rule.
        target: law of the next token.
        draft: law of a drafted token; where drafts are not drawn, the most probable one is it.
        drafted_depth: how many tokens have a draft.
        guarantee: how the tree was drawn; None: as the rule asks for.
    """
    is_drawn = (guarantee or rule.rule.draft) not in ("any", "deterministic")

    def next_law(context: tuple[int, ...]) -> Law:
        if len(context) >= drafted_depth:
            return rule.bonus_law(target(context))
        q = draft(context)
        law = rule.emitted_law(target(context), q if is_drawn else argmax_law(q))
        assert law is not None, f"rule {rule.rule.name} declares no law"
        return law

    return next_law


def joint_law(next_law: Model, vocab: int, length: int) -> NDArray[np.float64]:
    """Table `[vocab] * length` of the texts that drawing token by token gives."""
    return _continued({(): 1.0}, next_law, vocab, length)


def _continued(step: StepLaw, next_law: Model, vocab: int, length: int) -> NDArray[np.float64]:
    """Continue every text of a step to the common length."""
    table = np.zeros((vocab,) * length)
    level: StepLaw = {}
    by_length: dict[int, StepLaw] = {}
    for tokens, probability in step.items():
        by_length.setdefault(len(tokens), {})[tokens] = probability
    for depth in range(length):
        for tokens, probability in by_length.get(depth, {}).items():
            level[tokens] = level.get(tokens, 0.0) + probability
        grown: StepLaw = {}
        for tokens, probability in level.items():
            for token, share in enumerate(next_law(tokens)):
                if share > 0.0:
                    grown[(*tokens, token)] = probability * float(share)
        level = grown
    for tokens, probability in [*level.items(), *by_length.get(length, {}).items()]:
        table[tokens] += probability
    return table


def law_error(step: StepLaw, next_law: Model, vocab: int) -> float:
    """Largest difference between a step's joint law, continued, and the declared one; also of their total."""
    length = max(len(tokens) for tokens in step)
    difference = np.abs(_continued(step, next_law, vocab, length) - joint_law(next_law, vocab, length))
    return float(max(difference.max(), abs(sum(step.values()) - 1.0)))


def expected_length(step: StepLaw) -> float:
    """Expected tokens of one step, the bonus or recovered one included."""
    return float(sum(probability * len(tokens) for tokens, probability in step.items()))
