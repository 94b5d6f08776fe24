"""The price of a lossy rule: the speculative implementation beside three ways of direct sampling.

*strict target*: draws from p. *truncated target*: draws from p cut to the set that a truncation-based rule
allows; what people think such a rule gives. *collaborative law*: draws every token from the law that the rule
emits from p and q; what it gives without the undrafted tokens between. *speculative*: the rule itself. All
four through the same engine, on the same tasks, with the same seeds (protocol of arXiv 2607.26627).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specdec.audit.parity import Answer, Task, score_table, scores
from specdec.audit.pricing import LawAt, Prices, emitted_by
from specdec.audit.recording import recording
from specdec.config import SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.random_streams import Purpose, UniformSource
from specdec.requests import result_of
from specdec.sampling import as_law, sample
from specdec.sampling_params import SamplingParams
from specdec.stats import SpecStats
from specdec.tree import DraftTree
from specdec.verification.gates import fallback_law
from specdec.verification.laws import Law, one_hot
from specdec.verification.result import ProbRows, VerifyResult
from specdec.verification.rules import BoundRule, DraftGuarantee, Knobs, Rule, RuleKind, bind
from specdec.verification.walk import draft_row

STRICT, TRUNCATED = "strict-target", "truncated-target"
COLLABORATIVE, SPECULATIVE = "collaborative-law", "speculative"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """One way of sampling the tasks' answers.

    Attributes:
        name: which of the four.
        sentence: what it draws from.
        answers: one a task.
        stats: of all of them.
        prices: TV, KL and overshoot along its own texts.
    """

    name: str
    sentence: str
    answers: list[Answer]
    stats: SpecStats
    prices: dict[str, Any]

    def to_dict(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """Figures for the report."""
        right = scores(tasks, self.answers)
        return {
            "baseline": self.name,
            "sentence": self.sentence,
            "tokens": sum(len(answer.token_ids) for answer in self.answers),
            "acceptance_length": self.stats.acceptance_length,
            "acceptance_rate": self.stats.acceptance_rate,
            "right": sum(right),
            "tasks": len(tasks),
            "scores": score_table(tasks, right),
            **self.prices,
        }


def truncated_law(rule: BoundRule, p: Law) -> Law | None:
    """P cut to the tokens a rule allows, p itself where it allows none; None: the rule is no such set."""
    if rule.rule.allowed is None:
        return None
    return fallback_law("truncated", p, None, rule.rule.allowed(p, rule.knobs))


def direct_rules(rule: BoundRule) -> list[Rule]:
    """The ways of direct sampling a rule is compared with, as rules an engine can be given.

    Each accepts nothing and draws every token from its law.
    """
    rules = [_direct(STRICT, "lossless", "any", "every token is drawn from the target's law p", _strict)]
    if rule.rule.allowed is not None:
        cut: LawAt = lambda p, q: truncated_law(rule, p)
        sentence = "every token is drawn from p cut to the tokens the rule allows"
        rules.append(_direct(TRUNCATED, "truncation-based", "any", sentence, cut))
    if rule.rule.emitted_law is not None:
        draft: DraftGuarantee = "any" if rule.rule.draft in ("any", "deterministic") else "sampled"
        sentence = "every token is drawn from the law the rule emits from p and q"
        rules.append(_direct(COLLABORATIVE, "collaborative", draft, sentence, emitted_by(rule)))
    return rules


def _strict(p: Law, q: Law | None) -> Law:
    return p


def _direct(name: str, kind: RuleKind, draft: DraftGuarantee, sentence: str, law_at: LawAt) -> Rule:
    def verify(
        tree: DraftTree, target_probs: ProbRows, stream: UniformSource, position: int, knobs: Knobs
    ) -> VerifyResult:
        p = as_law(target_probs[0])
        law = law_at(p, root_law(tree, len(p)))
        assert law is not None, "only declared laws are drawn from"
        (u,) = stream.uniform(position, Purpose.BONUS)
        return VerifyResult(
            accepted_nodes=[],
            next_token_id=sample(law, u),
            next_kind="recovered" if tree.num_drafted else "bonus",
        )

    def emitted(p: Law, q: Law, knobs: Knobs) -> Law:
        law = law_at(p, q)
        assert law is not None, "only declared laws are drawn from"
        return law

    def bonus(p: Law, knobs: Knobs) -> Law:
        law = law_at(p, None)
        assert law is not None, "only declared laws are drawn from"
        return law

    return Rule(
        name=name,
        kind=kind,
        topology="tree",
        draft=draft,
        emitted_law=emitted,
        bonus_law=bonus,
        overshoot_bound=lambda knobs: None,
        sentence=sentence,
        verify=verify,
    )


def given_knobs(rule: BoundRule) -> dict[str, float | str]:
    """A rule's knobs as requests write them."""
    return {
        knob.name: knob.choices[int(rule.knobs[knob.name])] if knob.choices else rule.knobs[knob.name]
        for knob in rule.rule.knobs
    }


def root_law(tree: DraftTree, vocab: int) -> Law | None:
    """The draft's law after the root, one-hot for a deterministic child; None without a draft."""
    if not tree.children[0]:
        return None
    drawn = draft_row(tree, 0)
    return one_hot(tree.token_ids[tree.children[0][0]], vocab) if drawn is None else drawn


def decode_by(
    engine: Engine,
    rule: BoundRule,
    tasks: Sequence[Task],
    params: SamplingParams,
    *,
    name: str,
    sentence: str,
    batch_size: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Baseline:
    """Answer the tasks and price the law along the texts.

    Args:
        engine: with the drafter, if any; it must know the rule.
        rule: what requests name.
        tasks: the questions.
        params: the rest of the request; the seed of each task is this one and its number.
        name: of this way.
        sentence: what it draws from.
        batch_size: requests decoded at once.
        on_progress: told how many answers there are.

    Raises:
        SpecdecError: an answer failed.
    """
    request = replace(params, rule=rule.rule.name, rule_knobs=given_knobs(rule))
    prices = Prices(law_at=emitted_by(rule), params=params, bound=rule.overshoot_bound)
    answers: list[Answer] = []
    total = SpecStats()
    for start in range(0, len(tasks), batch_size):
        batch = tasks[start : start + batch_size]
        sequences = [
            engine.add(task.token_ids, replace(request, seed=(params.seed or 0) + start + number))
            for number, task in enumerate(batch)
        ]
        with recording(engine) as steps:
            while not all(seq.is_finished for seq in sequences):
                engine.step()
            prices.take(steps, share=(start + len(batch)) / len(tasks))
        for task, seq in zip(batch, sequences, strict=True):
            result = result_of(seq)
            if result.error:
                raise SpecdecError(f"task {task.id}: {result.error}")
            answers.append(Answer(text=result.text, token_ids=result.token_ids))
            total.add(result.stats)
        on_progress(len(answers))
    return Baseline(name=name, sentence=sentence, answers=answers, stats=total, prices=prices.to_dict())


def four_baselines(
    plain: Engine,
    drafting: Engine,
    rule: BoundRule,
    tasks: Sequence[Task],
    params: SamplingParams,
    *,
    one_ahead: SpecConfig,
    batch_size: int,
    on_progress: Callable[[str, int], None] = lambda name, done: None,
) -> list[Baseline]:
    """Answer the tasks in the four ways; one that the rule has no law for is left out.

    Args:
        plain: without drafter; both engines were given `direct_rules`.
        drafting: with the drafter and the shape that is audited.
        rule: the lossy rule.
        tasks: the questions.
        params: temperature, filters, limits and seed.
        one_ahead: speculation of one token, for drawing from a law of p and q.
        batch_size: requests decoded at once.
        on_progress: told which baseline has how many answers.
    """
    ways = [(bind(direct, {}), direct.name, direct.sentence) for direct in direct_rules(rule)]
    ways.append((rule, SPECULATIVE, f"the rule itself, {rule.label}"))
    return [
        decode_by(
            drafting if name in (COLLABORATIVE, SPECULATIVE) else plain,
            bound,
            tasks,
            replace(params, spec=one_ahead) if name == COLLABORATIVE else params,
            name=name,
            sentence=sentence,
            batch_size=batch_size,
            on_progress=partial(on_progress, name),
        )
        for bound, name, sentence in ways
    ]
