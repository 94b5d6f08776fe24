"""Level C1: draws of the implementation against the law they should have.

Two families. *On tensors*: float32 logits of small laws through the sampling code, a freshly drawn tree, and
the rule, as in a verify step; every position of the joint text is tested, and the bonus apart. *Through the
engine*: whole requests on the real target, cut to its few best tokens so that the joint law of an answer is
a table, which plain passes compute. All p-values share one family-wise error rate.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from specdec.audit.goodness import Fit, Outcome, fit, holm_rejections
from specdec.audit.levels import Figure, LevelResult, level_result
from specdec.audit.reference import PlainReference
from specdec.engine import Engine
from specdec.random_streams import RandomStream
from specdec.sampling import LazyProbs, process_logits, sample
from specdec.sampling_params import SamplingParams
from specdec.verification.enumeration import (
    POSITION,
    Branching,
    Model,
    contexts_of,
    declared_law,
    draw_tree,
    toy_models,
)
from specdec.verification.laws import Law
from specdec.verification.rules import BoundRule

Number = TypeVar("Number", int, float)

# of all of C1's tests together
ALPHA = 0.01
VOCAB = 16
# tokens of a text on tensors: two drafted and the one after them
LENGTH = 3
CHAIN: Branching = (1, 1)
TREE: Branching = (2, 2)
# the engine: the first token comes from the prompt's pass, a step drafts two more and adds one
ENGINE_TOKENS = 4
ENGINE_TOP_K = 3


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One test of the family."""

    name: str
    found: Fit


def tensor_tests(rule: BoundRule, draws: int, seed: int = 0) -> list[Tested]:
    """Draw texts through logits, tree and rule, and test them.

    Args:
        rule: a rule that declares a law; lossy ones are tested on chains.
        draws: verify steps; each has a seed of its own.
        seed: of the laws and, with the draw's number, of the draws.
    """
    target, draft = toy_models("plain", VOCAB, seed)
    logits = _LogitTable(target)
    wide = rule.rule.topology == "tree" and rule.rule.is_lossless
    branching = TREE if wide else CHAIN
    law = declared_law(rule, target, draft, len(branching))
    params = SamplingParams(temperature=1.0)
    texts: Counter[Outcome] = Counter()
    bonus: Counter[Outcome] = Counter()
    expected_bonus: Counter[Outcome] = Counter()
    rest = np.random.default_rng(seed)
    for draw in range(draws):
        stream = RandomStream(seed * draws + draw)
        tree = draw_tree(stream, draft, branching, rule.rule.draft)
        rows = torch.stack([logits[context] for context in contexts_of(tree)])
        result = rule.verify(tree, LazyProbs(rows, params), stream, POSITION)
        text = [*tree.tokens_of(result.accepted_nodes), result.next_token_id]
        if result.next_kind == "bonus":
            bonus[(text[-1],)] += 1
            for token, share in enumerate(rule.bonus_law(target(tuple(text[:-1])))):
                expected_bonus[(token,)] += share
        while len(text) < LENGTH:
            text.append(sample(law(tuple(text)), rest.random()))
        texts[tuple(text[:LENGTH])] += 1
    joint = _joint(law, VOCAB, LENGTH)
    tests = [Tested(name=f"{rule.label}: joint of {LENGTH}", found=fit(texts, joint))]
    for position in range(LENGTH):
        tests.append(
            Tested(
                name=f"{rule.label}: token {position + 1}",
                found=fit(_marginal(texts, position), _marginal(joint, position)),
            )
        )
    if count := sum(bonus.values()):
        shares = {token: share / count for token, share in expected_bonus.items()}
        tests.append(Tested(name=f"{rule.label}: bonus", found=fit(bonus, shares)))
    return tests


class _LogitTable(dict[tuple[int, ...], torch.Tensor]):
    """Float32 logits of each context's law, made once."""

    def __init__(self, target: Model) -> None:
        super().__init__()
        self._target = target

    def __missing__(self, context: tuple[int, ...]) -> torch.Tensor:
        row = torch.from_numpy(np.log(self._target(context))).float()
        self[context] = row
        return row


def _joint(law: Callable[[tuple[int, ...]], Law], vocab: int, length: int) -> dict[Outcome, float]:
    texts: dict[Outcome, float] = {(): 1.0}
    for _ in range(length):
        texts = {
            (*text, token): probability * float(share)
            for text, probability in texts.items()
            for token, share in zip(range(vocab), law(text), strict=True)
            if share > 0.0
        }
    return texts


def _marginal(table: Mapping[Outcome, Number], position: int) -> dict[Outcome, Number]:
    sums: dict[Outcome, Number] = {}
    for text, value in table.items():
        key = (text[position],)
        sums[key] = sums[key] + value if key in sums else value
    return sums


def engine_tests(
    engine: Engine,
    reference: PlainReference,
    prompts: Sequence[tuple[str, list[int]]],
    params: SamplingParams,
    *,
    draws: int,
    batch_size: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[Tested]:
    """Test whole answers of the engine on its target.

    Args:
        engine: with drafter and rule.
        reference: plain passes in the engine's dtype.
        prompts: names and token ids of fixed contexts.
        params: the request; its law is cut to the best `ENGINE_TOP_K` tokens here.
        draws: answers for each prompt; each has a seed of its own.
        batch_size: requests decoded at once.
        on_progress: told how many answers are done.
    """
    request = replace(
        params,
        temperature=1.0,
        top_k=ENGINE_TOP_K,
        max_tokens=ENGINE_TOKENS,
        ignore_eos=True,
    )
    tests = []
    done = 0
    for name, prompt in prompts:
        joint = _target_law(reference, prompt, request)
        counts: Counter[Outcome] = Counter()
        for start in range(0, draws, batch_size):
            seeds = range(start, min(start + batch_size, draws))
            results = engine.generate([prompt] * len(seeds), [replace(request, seed=seed) for seed in seeds])
            counts.update(tuple(result.token_ids) for result in results)
            done += len(seeds)
            on_progress(done)
        tests.append(Tested(name=f"engine, {name}: joint of {ENGINE_TOKENS}", found=fit(counts, joint)))
        for position in range(1, ENGINE_TOKENS):
            tests.append(
                Tested(
                    name=f"engine, {name}: token {position + 1}",
                    found=fit(_marginal(counts, position), _marginal(joint, position)),
                )
            )
    return tests


def _target_law(reference: PlainReference, prompt: list[int], params: SamplingParams) -> dict[Outcome, float]:
    """Probability of every answer, from plain passes over every context."""
    laws: dict[Outcome, dict[int, float]] = {}
    level: list[Outcome] = [()]
    for depth in range(ENGINE_TOKENS):
        for context in level:
            text = [*prompt, *context]
            row = process_logits(reference.logits(text, len(text) - 1), params)[0]
            kept = row.nonzero()[:, 0].tolist()
            laws[context] = {token: float(row[token]) for token in kept}
        level = [(*context, token) for context in level for token in laws[context]]
        assert len(level) <= ENGINE_TOP_K ** (depth + 1), "top-k leaves this many tokens at most"
    return {
        text: float(np.prod([laws[text[:index]][token] for index, token in enumerate(text)]))
        for text in itertools.chain(level)
    }


def draws_result(tests: Sequence[Tested], notes: Sequence[str]) -> LevelResult:
    """Correct the family's p-values and collect the level."""
    rejected = holm_rejections([test.found.p_value for test in tests], ALPHA)
    figures = [
        Figure(
            name=test.name,
            values={
                "draws": test.found.draws,
                "chi_square": test.found.chi_square,
                "freedom": test.found.freedom,
                "p_value": test.found.p_value,
                "total_variation": test.found.total_variation,
                "expected_variation": test.found.expected_variation,
                "impossible": test.found.impossible,
            },
            passed=not bad,
        )
        for test, bad in zip(tests, rejected, strict=True)
    ]
    return level_result(
        "C1",
        figures,
        notes=(
            *notes,
            f"{len(tests)} tests, family-wise error rate {ALPHA:g} (Holm); cells with fewer than 5 expected "
            "draws are pooled; expected variation is what sampling noise alone gives",
        ),
    )
