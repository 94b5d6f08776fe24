"""A row no token can be chosen from, behind a draft: what comes before it must keep the target's law."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import binomtest

from specdec.acceptance import _verify
from specdec.errors import BadLogitsError
from specdec.random_streams import RandomStream
from specdec.sampling_params import SamplingParams
from specdec.step_logits import StepLogits, TreeLogits
from specdec.tree import DraftTree, chain_tree
from specdec.verification.registry import EXACT_RULES, RULES
from specdec.verification.rules import bind

VOCAB = 5
SEEDS = 250
# they weigh a child by the rows below it, so one seed may take another child there: the law is the same
LOOK_BELOW = ("block", "traversal")
SAMPLED = [rule.name for rule in EXACT_RULES if rule.name != "greedy"]


def _logits(num_nodes: int) -> torch.Tensor:
    return torch.randn(num_nodes, VOCAB, generator=torch.Generator().manual_seed(3))


def _tokens(rule: str, tree: DraftTree, logits: torch.Tensor, seed: int) -> list[int]:
    """What one step commits; empty when the root itself leaves nothing."""
    seq: Any = SimpleNamespace(
        params=SamplingParams(temperature=0.0 if rule == "greedy" else 1.0),
        processor=None,
        rule=bind(RULES[rule], {}),
        stream=RandomStream(seed),
        token_ids=[0, 1],
    )
    result = _verify(seq, tree, TreeLogits(StepLogits.of(logits), 0, tree))
    return [*tree.tokens_of(result.accepted_nodes), result.next_token_id]


@pytest.mark.parametrize("rule", SAMPLED)
@pytest.mark.parametrize("shape", ["chain", "siblings"])
def test_a_draft_before_a_bad_row_is_taken_as_often_as_before_a_good_one(rule: str, shape: str) -> None:
    """Catches a second draw for the root where the row behind an accepted child is bad: p(x)^2, not p(x)."""
    if shape == "chain" or RULES[rule].topology == "chain":
        tree = chain_tree(1, [3, 2])
    else:
        tree = DraftTree(token_ids=[1, 3, 2, 4], parents=[-1, 0, 0, 1])
    good = _logits(tree.num_nodes)
    broken = good.clone()
    broken[1] = -torch.inf
    cut = [_tokens(rule, tree, broken, seed) for seed in range(SEEDS)]
    # nothing is drawn from the bad row itself
    assert all(len(tokens) == 1 for tokens in cut if tokens[0] == 3)
    hits = sum(tokens[0] == 3 for tokens in cut)
    if rule in LOOK_BELOW:
        assert binomtest(hits, SEEDS, float(good[0].softmax(-1)[3])).pvalue > 1e-4
    else:
        assert hits > 0
        assert [tokens[0] for tokens in cut] == [_tokens(rule, tree, good, seed)[0] for seed in range(SEEDS)]


def test_greedy_text_ends_before_a_bad_row() -> None:
    logits = _logits(3)
    tree = chain_tree(1, [int(logits[0].argmax()), int(logits[1].argmax())])
    whole = _tokens("greedy", tree, logits, 0)
    logits[1] = torch.nan
    assert _tokens("greedy", tree, logits, 0) == whole[:1]


@pytest.mark.parametrize("rule", ["greedy", *SAMPLED])
def test_a_bad_root_ends_the_request(rule: str) -> None:
    logits = _logits(2)
    logits[0] = -torch.inf
    with pytest.raises(BadLogitsError):
        _tokens(rule, chain_tree(1, [3]), logits, 0)
