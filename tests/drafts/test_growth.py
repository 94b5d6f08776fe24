"""How trees grow, without a head: shapes fixed by ranks, children with q's law, races that meet the target's.

The growth that serves draws from toy laws here, and the emitted joint law of every exact rule that asks for
drawn children is enumerated over its trees, alone and merged with a lookup's chain.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from specdec.drafter import DraftMode, DraftRequest
from specdec.drafts.growth import TreeGrowth, ranked_shape, start_growth
from specdec.drafts.vocab import DraftVocab
from specdec.processors import RequestProcessor
from specdec.random_streams import RandomStream, UniformSource
from specdec.rule_choice import draft_mode
from specdec.sampling import process_logits
from specdec.sampling_params import SamplingParams
from specdec.tree import DraftTree, chain_tree, merge_trees, path_to
from specdec.verification.enumeration import (
    POSITION,
    Model,
    declared_law,
    law_error,
    step_law,
    target_rows,
    toy_models,
)
from specdec.verification.laws import Law
from specdec.verification.registry import EXACT_RULES, rule_named

LAW_TOLERANCE = 1e-12
DRAWING_RULES = [rule.name for rule in EXACT_RULES if rule.uses_draft_probs]
DRAWING_TREE_RULES = [rule.name for rule in EXACT_RULES if rule.uses_draft_probs and rule.topology == "tree"]
SAMPLED = SamplingParams(temperature=1.0)


def processor_of(params: SamplingParams) -> RequestProcessor | None:
    if not params.changes_logits:
        return None
    words = [tuple(word) for word in params.bad_words if not isinstance(word, str)]
    return RequestProcessor(params, prompt_len=POSITION + 1, stop_ids=frozenset(), bad_words=words)


def request(
    stream: Any, shape: tuple[int, int, int], mode: DraftMode, params: SamplingParams = SAMPLED
) -> DraftRequest:
    depth, top_k, nodes = shape
    seq: Any = SimpleNamespace(
        token_ids=[0] * (POSITION + 1), params=params, stream=stream, processor=processor_of(params)
    )
    return DraftRequest(seq=seq, max_nodes=nodes, max_depth=depth, top_k=top_k, mode=mode)


def grown(wanted: DraftRequest, draft: Model, vocab: DraftVocab) -> tuple[DraftTree, TreeGrowth]:
    """Grow a tree whose head says log q of the context."""
    growth = start_growth(wanted, vocab, vocab.ids.tolist())
    while growth.frontier:
        contexts = [
            tuple(growth.tokens[node] for node in path_to(growth.parents, front)[1:])
            for front in growth.frontier
        ]
        rows = torch.tensor(np.array([draft(context) for context in contexts]))
        growth.expand(rows[:, vocab.ids].log())
    return growth.tree(), growth


@pytest.mark.parametrize("kind", ["plain", "zeros", "exhausted", "ties"])
@pytest.mark.parametrize("name", DRAWING_RULES)
def test_drawn_trees_of_the_head_emit_the_targets_law(name: str, kind: str) -> None:
    """Exactly: drafting and verification enumerated together, shapes and draw numbers those that serve."""
    rule = rule_named(name)
    shape = (2, 1, 2) if rule.rule.topology == "chain" else (2, 2, 3)
    target, draft = toy_models(kind, 3)

    def make(stream: UniformSource) -> DraftTree:
        return grown(request(stream, shape, draft_mode(rule)), draft, DraftVocab.full(3))[0]

    assert law_error(step_law(make, rule, target), declared_law(rule, target, draft, 0), 3) < LAW_TOLERANCE


@pytest.mark.parametrize("lookup", [[1], [1, 2], [0, 0]])
@pytest.mark.parametrize("name", DRAWING_TREE_RULES)
def test_a_lookup_beside_drawn_nodes_leaves_the_law_exact(name: str, lookup: list[int]) -> None:
    """Also where the budget cuts the merged tree, and where draws repeat the lookup's tokens."""
    rule = rule_named(name)
    target, draft = toy_models("plain", 3)

    def make(stream: UniformSource) -> DraftTree:
        tree, _ = grown(request(stream, (2, 2, 3), draft_mode(rule)), draft, DraftVocab.full(3))
        return merge_trees(chain_tree(0, lookup), tree, 5)

    assert law_error(step_law(make, rule, target), declared_law(rule, target, draft, 0), 3) < LAW_TOLERANCE


@pytest.mark.parametrize("mode", ["without_replacement", "iid"])
def test_siblings_have_the_law_they_were_asked_for(mode: DraftMode) -> None:
    q = np.array([0.5, 0.25, 0.15, 0.1])
    vocab = DraftVocab(torch.tensor([1, 4, 6, 7]), 9)
    wide = np.zeros(9)
    wide[vocab.ids] = q
    draws = 4000
    pairs: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        tree, _ = grown(request(RandomStream(seed), (1, 2, 2), mode), lambda context: wide, vocab)
        assert tree.draft_probs is not None
        assert np.allclose(tree.draft_probs[0], wide, atol=1e-15)
        pairs[tuple(tree.token_ids[1:])] += 1
    statistic, cells = 0.0, 0
    for first in range(4):
        for second in range(4):
            share = q[first] * q[second]
            if mode == "without_replacement":
                share = 0.0 if first == second else share / (1 - q[first])
            count = pairs[int(vocab.ids[first]), int(vocab.ids[second])]
            if share == 0.0:
                assert count == 0
                continue
            statistic += (count - draws * share) ** 2 / (draws * share)
            cells += 1
    assert chi2.sf(statistic, cells - 1) > 0.001


def test_the_shape_of_drawn_trees_is_fixed_by_ranks() -> None:
    """A shape that followed the drawn tokens would bias the rules that look at whole paths."""
    _, draft = toy_models("plain", 6)
    shapes = set()
    for seed in range(40):
        wanted = request(RandomStream(seed), (3, 3, 9), "without_replacement")
        tree, _ = grown(wanted, draft, DraftVocab.full(6))
        shapes.add(tuple(tree.parents))
    assert len(shapes) == 1
    assert tree.num_drafted == 9


@pytest.mark.parametrize("shape", [(4, 1, 4), (4, 4, 16), (3, 2, 5), (1, 3, 3), (32, 32, 64)])
def test_ranked_shapes_are_trees_within_their_limits(shape: tuple[int, int, int]) -> None:
    depth, top_k, nodes = shape
    counts = ranked_shape(depth, top_k, nodes)
    reached = [(*ranks, rank) for ranks, count in counts.items() for rank in range(count)]
    assert len(reached) == len(set(reached)) == nodes
    assert max(len(ranks) for ranks in reached) <= depth
    assert max(counts.values()) <= top_k
    assert all(ranks[:-1] == () or ranks[:-1] in reached for ranks in reached)


def test_only_nodes_with_children_carry_a_law() -> None:
    _, draft = toy_models("plain", 5)
    vocab = DraftVocab(torch.tensor([0, 2, 3, 4]), 8)
    tree, _ = grown(request(RandomStream(1), (3, 2, 6), "iid"), lambda c: np.resize(draft(c), 8), vocab)
    assert tree.draft_probs is not None
    for node, below in enumerate(tree.children):
        row = tree.draft_probs[node]
        assert bool(row.any()) == bool(below)
        assert not row[[1, 5, 6, 7]].any()
        if below:
            assert float(row.sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=3),
        SamplingParams(temperature=0.9, top_p=0.8, min_p=0.05),
    ],
)
def test_q_has_the_requests_temperature_and_filters(params: SamplingParams) -> None:
    _, draft = toy_models("plain", 8)
    wanted = request(RandomStream(3), (1, 2, 2), "without_replacement", params)
    tree, _ = grown(wanted, draft, DraftVocab.full(8))
    expected = process_logits(torch.tensor(np.log(draft(())))[None], params)[0]
    assert tree.draft_probs is not None
    assert torch.allclose(tree.draft_probs[0], expected, atol=1e-14)
    assert all(expected[token] > 0 for token in tree.token_ids[1:])


@pytest.mark.parametrize("mode", ["deterministic", "without_replacement", "iid", "coupled"])
def test_what_a_request_forbids_is_not_drafted(mode: DraftMode) -> None:
    """Each node with its own path as history: a frequency penalty spares what the path does not have."""
    _, draft = toy_models("plain", 8)
    params = SamplingParams(
        temperature=1.0, allowed_token_ids=(1, 2, 6, 7), bad_words=((7, 6),), frequency_penalty=2.0
    )
    for seed in range(20):
        tree, _ = grown(request(RandomStream(seed), (3, 3, 9), mode, params), draft, DraftVocab.full(8))
        assert tree.num_drafted > 2
        assert set(tree.token_ids[1:]) <= {1, 2, 6, 7}
        assert all(
            (tree.token_ids[parent], token) != (7, 6)
            for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True)
            if parent > 0
        )
    wanted = request(
        RandomStream(0), (2, 2, 3), mode, SamplingParams(temperature=1.0, allowed_token_ids=(4,))
    )
    nothing, _ = grown(wanted, draft, DraftVocab(torch.tensor([0, 1, 2, 3]), 8))
    assert nothing.num_drafted == 0, "the head does not know the only token that is allowed"


def test_a_coupled_draft_that_knows_p_proposes_what_the_target_draws() -> None:
    """Every node of a chain is the target's own token, whatever the seed."""
    target, _ = toy_models("plain", 7)
    rule = rule_named("coupled")
    for seed in range(50):
        stream = RandomStream(seed)
        tree, _ = grown(request(stream, (3, 1, 3), "coupled"), target, DraftVocab.full(7))
        result = rule.verify(tree, target_rows(tree, target), stream, POSITION)
        assert result.accepted_nodes == [1, 2, 3]


def test_coupled_siblings_are_the_first_arrivals() -> None:
    _, draft = toy_models("plain", 12)
    for seed in range(30):
        stream = RandomStream(seed)
        tree, _ = grown(request(stream, (1, 4, 4), "coupled"), draft, DraftVocab.full(12))
        assert tree.token_ids[1:] == stream.race(POSITION, draft(()), count=4)


def test_coupled_drafts_agree_more_often_than_the_most_probable_tokens() -> None:
    target, draft = toy_models("plain", 12)

    def mixed(context: tuple[int, ...]) -> Law:
        return 0.7 * target(context) + 0.3 * draft(context)

    rule = rule_named("coupled")
    accepted = {"coupled": 0, "deterministic": 0}
    for seed in range(200):
        stream = RandomStream(seed)
        for mode in accepted:
            tree, _ = grown(request(stream, (3, 1, 3), mode), mixed, DraftVocab.full(12))  # type: ignore[arg-type]
            result = rule.verify(tree, target_rows(tree, target), stream, POSITION)
            accepted[mode] += len(result.accepted_nodes)
    assert accepted["coupled"] > 1.3 * accepted["deterministic"]


def test_a_head_that_computes_nan_draws_nothing() -> None:
    def broken(context: tuple[int, ...]) -> Any:
        return np.full(5, np.nan)

    for mode in ("iid", "without_replacement"):
        tree, _ = grown(request(RandomStream(0), (2, 2, 3), mode), broken, DraftVocab.full(5))  # type: ignore[arg-type]
        assert tree.num_drafted == 0


def test_equal_draws_stay_apart_when_trees_merge() -> None:
    """Independent siblings may repeat; leaving the repetition out would leave the law of rule 2.4."""
    law = torch.ones(4, 5, dtype=torch.float64) / 5
    head = DraftTree(token_ids=[0, 3, 3, 1], parents=[-1, 0, 0, 0], draft_probs=law)
    alone = merge_trees(chain_tree(0, []), head, 8)
    assert alone.token_ids == [0, 3, 3, 1]
    beside = merge_trees(chain_tree(0, [3, 2]), head, 8)
    assert beside.token_ids == [0, 3, 2, 1]
    assert beside.draft_probs is not None
    assert not beside.draft_probs[0].any(), "both have children there, so they are deterministic"
