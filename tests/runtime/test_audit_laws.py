"""Laws in an audit of a tiny target: draws through the engine (C1), the four baselines of lossy rules."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.audit.baselines import (
    direct_rules,
    four_baselines,
    given_knobs,
    truncated_law,
)
from specdec.audit.levels import LevelResult
from specdec.audit.parity import Task
from specdec.audit.plan import AuditPlan
from specdec.audit.run import Audit
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.runner import ModelRunner, StepOutput
from specdec.sampling_params import SamplingParams
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree, chain_tree
from specdec.verification.registry import rule_named

NARROW_PROMPTS = [("p", [3, 4, 2]), ("q", [5, 5, 7, 8])]
CHAIN = SpecConfig(max_depth=3, top_k=1, max_nodes=3, adaptive=False)


def no_cost(self: Any, spec: SpecConfig) -> Any:
    return 0


class DrawsFromLaws:
    """Draws chains from a law of its own that depends on the last token."""

    name = "laws"
    boundaries: tuple[int, ...] = ()
    can_sample = True
    relative_cost = scratch_rows = no_cost

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def makes_chains(self, spec: SpecConfig) -> bool:
        return True

    def release(self, seq_id: int) -> None:
        return None

    def law(self, token: int) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(str(token).encode()))
        return rng.dirichlet(np.full(self.vocab, 0.4))

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._chain(request) for request in requests]

    def _chain(self, request: DraftRequest) -> DraftTree:
        seq = request.seq
        rng = np.random.default_rng((seq.stream.seed, len(seq.token_ids)))
        tokens, rows = [seq.token_ids[-1]], []
        for _ in range(request.max_depth):
            rows.append(self.law(tokens[-1]))
            tokens.append(int(rng.choice(self.vocab, p=rows[-1])))
        rows.append(self.law(tokens[-1]))
        laws = torch.from_numpy(np.array(rows)) if request.mode == "without_replacement" else None
        return chain_tree(tokens[0], tokens[1:], draft_probs=laws)


def plan_of(folder: Path, **settings: Any) -> AuditPlan:
    values: dict[str, Any] = {
        "target": str(folder),
        "draft": "ngram",
        "spec": CHAIN,
        "dtype": "float32",
        "batch_size": 3,
        "levels": ("C1",),
        "rule": None,
        "prompts": NARROW_PROMPTS,
        "tasks": (),
        "max_tokens": 24,
        "task_tokens": 16,
        "draws": 100,
        "engine_draws": 0,
        "temperature": 1.0,
        "seed": 0,
        **settings,
    }
    return AuditPlan(**values)


def levels_of(audit: Audit) -> dict[str, LevelResult]:
    return {level.level: level for level in audit.run().levels}


@pytest.fixture(scope="module")
def narrow(tiny_model_factory: Callable[..., Path]) -> Path:
    """A target of 12 tokens, so that laws are small."""
    return tiny_model_factory("llama", vocab_size=12, bos_token_id=0, eos_token_id=1, pad_token_id=0)


def narrow_draws(folder: Path) -> AuditPlan:
    return plan_of(
        folder,
        levels=("C1",),
        rule=rule_named("block"),
        spec=CHAIN,
        prompts=NARROW_PROMPTS,
        engine_draws=600,
        batch_size=32,
    )


def test_draws_through_the_engine_follow_the_target(narrow: Path) -> None:
    plan = plan_of(
        narrow, levels=("C1",), rule=rule_named("block"), spec=CHAIN, engine_draws=600, batch_size=32
    )
    audit = Audit(replace(plan, prompts=[("p", [3, 4, 2])]))
    laws = DrawsFromLaws(12)
    audit.drafting = Engine(audit.plain, draft=lambda view: laws, config=audit.drafting.config)
    level = levels_of(audit)["C1"]
    assert level.passed, level.to_dict()
    assert sum(figure.name.startswith("engine") for figure in level.figures) == 4
    assert all(figure.values["impossible"] == 0 for figure in level.figures)


def test_a_wrong_law_through_the_engine_is_seen(narrow: Path) -> None:
    """The logits of drafted rows belong to another temperature: greedy text would not show it."""
    plan = plan_of(
        narrow, levels=("C1",), rule=rule_named("block"), spec=CHAIN, engine_draws=600, batch_size=32
    )
    audit = Audit(replace(plan, prompts=[("p", [3, 4, 2])]))

    class Cooler(ModelRunner):
        def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
            output = super().run(plan, trees)
            for tree, start in zip(trees, output.logits_start, strict=True):
                if tree.num_drafted and start >= 0:
                    output.logits[start : start + tree.num_nodes] *= 2.0
            return output

    laws = DrawsFromLaws(12)
    audit.drafting = Engine(audit.plain, draft=lambda view: laws, config=audit.drafting.config)
    inner = audit.drafting.runner
    audit.drafting.runner = Cooler(inner.decoder, inner.cache, inner.boundaries)
    assert levels_of(audit)["C1"].passed is False


def easy_tasks(count: int = 6) -> list[Task]:
    return [
        Task(
            id=str(index),
            category=("one", "two")[index % 2],
            difficulty=index % 2,
            token_ids=[3, 4, 2 + index],
            is_right=lambda text: True,
        )
        for index in range(count)
    ]


def test_the_four_baselines_of_a_lossy_rule(narrow: Path) -> None:
    """Strict sampling costs nothing; a truncation is p cut; the rule's own law is what the rule emits."""
    plan = plan_of(narrow, levels=("C4",), rule=rule_named("min-p-gate", {"min_p": 0.3}), spec=CHAIN)
    audit = Audit(replace(plan, prompts=NARROW_PROMPTS, tasks=easy_tasks()))
    rules = direct_rules(rule_named("min-p-gate", {"min_p": 0.3}))
    audit.drafting = Engine(
        audit.plain, draft=lambda view: DrawsFromLaws(12), config=audit.drafting.config, rules=rules
    )
    record = audit.run()
    assert record.passed
    strict, truncated, collaborative, speculative = record.baselines
    assert [one.name for one in record.baselines] == [
        "strict-target",
        "truncated-target",
        "collaborative-law",
        "speculative",
    ]
    assert strict.prices["total_variation"] == 0.0
    assert strict.prices["largest_overshoot"] == pytest.approx(1.0)
    assert truncated.prices["total_variation"] > 0.0
    assert collaborative.stats.acceptance_length == 1.0
    assert speculative.stats.acceptance_length is not None
    assert speculative.stats.acceptance_length > 1.0
    assert speculative.prices["excluded_tokens"] == 0
    assert "min-p-gate(min_p=0.3" in speculative.sentence
    assert speculative.to_dict(easy_tasks())["scores"]["one"] == {"tasks": 3, "right": 3, "score": 1.0}


def test_a_bounded_rule_is_held_to_its_bound_on_the_target(narrow: Path) -> None:
    rule = rule_named("lenience", {"lenience": 0.5})
    config = EngineConfig(max_num_seqs=4, kv_tokens=512, allow_lossy=True, spec=CHAIN)
    plain = Engine(narrow, config=config, rules=direct_rules(rule))
    drafting = Engine(plain, draft=lambda view: DrawsFromLaws(12), config=config, rules=direct_rules(rule))
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=1)
    found = four_baselines(
        plain, drafting, rule, easy_tasks(4), params, one_ahead=replace(CHAIN, max_depth=1), batch_size=4
    )
    speculative = found[-1]
    assert [one.name for one in found] == ["strict-target", "collaborative-law", "speculative"]
    assert 1.0 < speculative.prices["largest_overshoot"] <= 2.0 + 1e-6
    assert speculative.prices["above_bound"] == 0
    drafted = speculative.prices["total_variation_drafted"]
    assert (
        0.0 < speculative.prices["total_variation"] <= drafted < speculative.prices["draft_total_variation"]
    )


def test_a_rule_without_a_law_is_not_priced(narrow: Path) -> None:
    """The bonus tokens alone would make it look cheap, or dear."""
    rule = rule_named("windowed")
    config = EngineConfig(max_num_seqs=4, kv_tokens=512, allow_lossy=True, spec=CHAIN)
    plain = Engine(narrow, config=config, rules=direct_rules(rule))
    drafting = Engine(plain, draft=lambda view: DrawsFromLaws(12), config=config, rules=direct_rules(rule))
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=1)
    found = four_baselines(plain, drafting, rule, easy_tasks(4), params, one_ahead=CHAIN, batch_size=4)
    assert [one.name for one in found] == ["strict-target", "speculative"]
    assert found[-1].prices["total_variation"] is None
    assert found[-1].prices["largest_overshoot"] is None
    assert found[-1].prices["excluded_tokens"] == 0
    assert found[-1].stats.acceptance_length is not None


def test_truncated_laws_are_the_allowed_tokens_of_p() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    gate = truncated_law(rule_named("top-k-gate", {"k": 2}), p)
    assert gate is not None
    np.testing.assert_allclose(gate, [0.625, 0.375, 0, 0, 0])
    relaxed = truncated_law(rule_named("relaxed", {"top_n": 3, "delta": 0.25}), p)
    assert relaxed is not None
    np.testing.assert_allclose(relaxed, [0.625, 0.375, 0, 0, 0])
    for name in ("thresholds", "lenience", "windowed", "mentored"):
        knobs: dict[str, float | str] = {"threshold_acc": 0.5} if name == "thresholds" else {}
        assert truncated_law(rule_named(name, knobs), p) is None


def test_a_truncated_law_has_every_allowed_token() -> None:
    """Wide sets, sets cut by probability, and an empty one, which leaves p; nothing is cut by a count."""
    p = np.linspace(2.0, 1.0, 300)
    p[280:] = 0.0
    p /= p.sum()
    wide = truncated_law(rule_named("relaxed", {"top_n": 100, "delta": 1.0}), p)
    assert wide is not None
    assert np.flatnonzero(wide).tolist() == list(range(100))
    np.testing.assert_allclose(wide[:100], p[:100] / p[:100].sum())
    everything = truncated_law(rule_named("relaxed", {"top_n": 1000, "delta": 1.0}), p)
    assert everything is not None
    np.testing.assert_allclose(everything, p)
    nothing = truncated_law(rule_named("typical", {"epsilon": 1.0, "delta": 1e9}), p)
    assert nothing is not None
    np.testing.assert_array_equal(nothing, p)
    for fallback in ("target", "truncated", "argmax", "draft"):
        gate = truncated_law(rule_named("top-k-gate", {"k": 120, "fallback": fallback}), p)
        assert gate is not None
        assert np.count_nonzero(gate) == 120


def test_knobs_are_given_as_requests_write_them() -> None:
    assert given_knobs(rule_named("top-k-gate", {"k": 2})) == {"k": 2.0, "fallback": "truncated"}
