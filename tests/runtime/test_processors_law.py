"""Penalties and constraints under every exact rule: the emitted joint law, enumerated, is processed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specdec.exact_law import exact_law
from specdec.processors import NodeLogits, RequestProcessor
from specdec.random_streams import UniformSource
from specdec.sampling import LazyProbs, process_logits
from specdec.sampling_params import SamplingParams
from specdec.tree import DraftTree
from specdec.verification.enumeration import POSITION, contexts_of, draw_tree, law_error, toy_models
from specdec.verification.laws import Law
from specdec.verification.registry import EXACT_RULES, rule_named
from specdec.verification.rules import Rule

VOCAB = 4
STOP = frozenset({3})
PROMPT = [1, 0]  # the last is the root of every tree
# fp64 sums over a few thousand branches of fp32 logits that both sides process alike
LAW_TOLERANCE = 1e-12
RULES = [rule for rule in EXACT_RULES if rule.name != "greedy"]
PARAMS = SamplingParams(
    temperature=1.2,
    min_p=0.05,
    repetition_penalty=1.6,
    frequency_penalty=0.5,
    presence_penalty=0.3,
    logit_bias={1: 0.4},
    bad_words=((1, 2), (0, 0)),
    min_tokens=1,
)


def make_processor() -> RequestProcessor:
    bad_words = [word for word in PARAMS.bad_words if not isinstance(word, str)]
    return RequestProcessor(PARAMS, prompt_len=len(PROMPT), stop_ids=STOP, bad_words=bad_words)


def logits_after(context: tuple[int, ...]) -> Tensor:
    target, _ = toy_models("plain", VOCAB)
    return torch.tensor([math.log(p) for p in target(context)], dtype=torch.float32)


def processed(context: tuple[int, ...]) -> Law:
    """The law of plain decoding: a processor that has seen nothing before this text."""
    row = make_processor().process(logits_after(context), [*PROMPT, *context], [])
    if not STOP.isdisjoint(context):
        row = logits_after(context)  # behind the end, where nothing is ever written
    return process_logits(row[None], PARAMS)[0].numpy()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_exact_rule_emits_the_processed_law(rule: Rule) -> None:
    """B58, B59 in law: a penalty with a wrong history at any node, of p or of the bonus, moves the law."""
    bound = rule_named(rule.name)
    _, draft = toy_models("plain", VOCAB)
    branching = [1, 1] if bound.rule.topology == "chain" else [2, 1]
    # one processor for all trees: what rejected drafts leave behind in it would show
    processor = make_processor()
    laws: dict[tuple[int, ...], Tensor] = {}

    def laws_of(tree: DraftTree) -> Tensor:
        key = (*tree.token_ids, *tree.parents)
        if key not in laws:
            logits = torch.stack([logits_after(context) for context in contexts_of(tree)])
            lazy = LazyProbs(NodeLogits(logits, tree, PROMPT, processor), PARAMS)
            laws[key] = torch.stack([lazy[node] for node in reversed(range(tree.num_nodes))]).flip(0)
        return laws[key]

    def run(stream: UniformSource) -> tuple[int, ...]:
        tree = draw_tree(stream, draft, branching, bound.rule.draft)
        result = bound.verify(tree, laws_of(tree), stream, POSITION)
        return (*tree.tokens_of(result.accepted_nodes), result.next_token_id)

    step = exact_law(run)
    assert len(step) >= VOCAB
    assert law_error(step, processed, VOCAB) < LAW_TOLERANCE
