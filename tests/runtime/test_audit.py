"""Audits of a tiny target: sound speculation passes every level, planted faults are called bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.audit.levels import LevelResult, parse_levels
from specdec.audit.parity import Answer, Task, audit_parity
from specdec.audit.plan import AuditPlan, check_plan
from specdec.audit.recording import recording
from specdec.audit.reference import Noise, PlainReference
from specdec.audit.run import Audit
from specdec.audit.trajectory import Trajectories
from specdec.audit.triage import first_difference, triage_greedy, triage_race
from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.errors import UsageError
from specdec.hf import load_hf_model
from specdec.models.layers import Storage, packing_available
from specdec.runner import ModelRunner, StepOutput
from specdec.sampling_params import SamplingParams
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree, chain_tree, tree_from_paths
from specdec.verification.registry import rule_named

PROMPTS = [
    ("a", [7, 3, 9, 20, 5]),
    ("b", [40, 41]),
    ("c", list(range(2, 40))),
    ("d", [100, 3, 100, 3, 100, 3]),
    ("e", [8] * 9),
    ("f", [11, 12, 13, 12]),
]
TOKENS = 24
TREE = SpecConfig(max_depth=4, top_k=3, max_nodes=12, adaptive=False)
CHAIN = SpecConfig(max_depth=3, top_k=1, max_nodes=3, adaptive=False)


def no_cost(self: Any, spec: SpecConfig) -> Any:
    return 0


class KnowsTheText:
    """Proposes the right continuation of some prompts behind a wrong sibling."""

    name = "oracle"
    boundaries: tuple[int, ...] = ()
    can_sample = False
    relative_cost = scratch_rows = no_cost

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self.texts = texts

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False

    def release(self, seq_id: int) -> None:
        return None

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        trees = []
        for request in requests:
            seq = request.seq
            known = self.texts[tuple(seq.token_ids[: seq.prompt_len])]
            ahead = known[seq.num_output : seq.num_output + min(3, request.max_depth)]
            root = seq.token_ids[-1]
            if not ahead or request.max_depth < 2:
                trees.append(chain_tree(root, ahead))
            else:
                trees.append(tree_from_paths(root, [[ahead[0] ^ 1, 5], ahead]))
        return trees


class OffByOne(ModelRunner):
    """Gives drafted nodes a position one too far: the planted bug."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner.decoder, inner.cache, inner.boundaries)

    def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
        moved = [replace(tree) for tree in trees]
        for tree in moved:
            tree.__dict__["depths"] = [depth + (depth > 0) for depth in tree.depths]
        return super().run(plan, moved)


class SiblingsSeeEachOther(ModelRunner):
    """Lets every node attend to all nodes before it, as if the tree were a chain."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner.decoder, inner.cache, inner.boundaries)

    def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
        chained = []
        for tree in trees:
            other = replace(tree, parents=list(range(-1, tree.num_nodes - 1)))
            other.__dict__["depths"] = tree.depths
            chained.append(other)
        return super().run(plan, chained)


def plan_of(folder: Path, **settings: Any) -> AuditPlan:
    values: dict[str, Any] = {
        "target": str(folder),
        "draft": "ngram",
        "spec": TREE,
        "dtype": "float32",
        "batch_size": 3,
        "levels": ("C2", "C4"),
        "rule": None,
        "prompts": PROMPTS,
        "tasks": (),
        "max_tokens": TOKENS,
        "task_tokens": 16,
        "draws": 100,
        "engine_draws": 0,
        "temperature": 1.0,
        "seed": 0,
        **settings,
    }
    return AuditPlan(**values)


GREEDY = SamplingParams(max_tokens=TOKENS)
# what C3 asks for, a seed a prompt
COUPLED = [
    SamplingParams(temperature=1.0, max_tokens=TOKENS, rule="coupled", seed=row)
    for row in range(len(PROMPTS))
]


def audit_of(
    folder: Path,
    *,
    texts: SamplingParams | list[SamplingParams] = GREEDY,
    **settings: Any,
) -> Audit:
    """An audit whose drafter proposes the right text beside a wrong sibling, greedy text unless told."""
    audit = Audit(plan_of(folder, **settings))
    prompts = [ids for _, ids in PROMPTS]
    results = audit.plain.generate(prompts, texts)
    known = {tuple(ids): [*r.token_ids, 0, 0, 0, 0] for ids, r in zip(prompts, results, strict=True)}
    audit.drafting = Engine(audit.plain, draft=lambda view: KnowsTheText(known), config=audit.drafting.config)
    return audit


def levels_of(audit: Audit) -> dict[str, LevelResult]:
    return {level.level: level for level in audit.run().levels}


def test_the_plain_pass_has_the_logits_of_transformers(tiny_any_family: Path) -> None:
    """The reference of the audit is itself held to an independent one, in every cut."""
    text = [*range(3, 60), 7, 9]
    engine = Engine(tiny_any_family, config=EngineConfig(max_num_seqs=1, kv_tokens=64))
    reference = PlainReference(engine.decoder)
    expected = load_hf_model(tiny_any_family)(input_ids=torch.tensor([text])).logits[0]
    for first, chunk in ((0, 256), (5, 1), (40, 7), (len(text) - 1, 256)):
        found = reference.logits(text, first, chunk)
        torch.testing.assert_close(found, expected[first:], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sound_speculation_passes(tiny_llama: Path, dtype: str) -> None:
    audit = audit_of(tiny_llama, dtype=dtype, levels=("C2", "C3", "C4"))
    # the oracle knows greedy texts only
    coupled = Audit(plan_of(tiny_llama, dtype=dtype, levels=("C3",)))
    levels = levels_of(audit) if dtype == "bfloat16" else {**levels_of(audit), **levels_of(coupled)}
    for level in levels.values():
        assert level.passed, level.to_dict()
    figure = levels["C2"].figures[0].values
    assert figure["texts"] == len(PROMPTS)
    assert figure["bugs"] == 0
    if dtype == "float32":
        assert figure["identical"] == len(PROMPTS)
        assert figure["perplexity"] == pytest.approx(figure["plain_perplexity"])
    depths = levels["C4"].figures
    assert len(depths) >= 4, "the oracle's drafts are accepted, so that deep rows are compared"
    assert all(row.values["not_the_argmax"] == 0 for row in depths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [OffByOne, SiblingsSeeEachOther])
def test_a_planted_fault_is_a_bug_and_no_near_tie(
    tiny_llama: Path, dtype: str, fault: Callable[[ModelRunner], ModelRunner]
) -> None:
    """A position one off, or a sibling seen, in the tree pass: whole rows move, and text with them."""
    audit = audit_of(tiny_llama, dtype=dtype)
    audit.drafting.runner = fault(audit.drafting.runner)
    record = audit.run()
    assert not record.passed
    levels = {level.level: level for level in record.levels}
    root, *deeper = levels["C4"].figures
    # cached rows of the wrong position spoil later roots too; the first drafted rows are wrong at once
    assert deeper[0].passed is False
    assert deeper[0].values["above_tolerance"] > 0
    assert levels["C4"].findings
    assert levels["C2"].passed is False
    assert levels["C2"].figures[0].values["bugs"] > 0
    assert {finding["verdict"] for finding in levels["C2"].findings} == {"bug"}
    assert root.values["rows"] > 0


def coupled_audit(folder: Path, dtype: str) -> Audit:
    """An audit of C3 whose second drafter, besides lookup, knows the sampled texts."""
    audit = audit_of(folder, dtype=dtype, levels=("C3",), texts=COUPLED)
    audit.plan = replace(audit.plan, draft="oracle")
    return audit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_coupled_text_is_the_plain_text_with_an_oracle(tiny_llama: Path, dtype: str) -> None:
    audit = coupled_audit(tiny_llama, dtype)
    level = levels_of(audit)["C3"]
    assert level.passed, level.to_dict()
    assert [figure.name for figure in level.figures] == ["ngram", "oracle"]
    assert level.figures[1].values["texts"] == len(PROMPTS)
    results = audit.drafting.generate([ids for _, ids in PROMPTS], COUPLED)
    accepted = sum(result.stats.accepted for result in results)
    assert accepted > sum(result.stats.verify_steps for result in results), "sampled drafts are accepted"


def test_coupled_text_is_the_plain_text_with_a_head(
    tiny_llama: Path, random_draft: Callable[..., Path], tmp_path: Path
) -> None:
    draft = random_draft(tiny_llama, tmp_path / "draft")
    level = levels_of(Audit(plan_of(tiny_llama, draft=str(draft), levels=("C3",))))["C3"]
    assert level.passed, level.to_dict()
    assert [figure.values["identical"] for figure in level.figures] == [len(PROMPTS)] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [OffByOne, SiblingsSeeEachOther])
def test_a_planted_fault_changes_coupled_text(
    tiny_llama: Path, dtype: str, fault: Callable[[ModelRunner], ModelRunner]
) -> None:
    """The fault is in the oracle's tree passes alone, so lookup must still pass."""
    audit = coupled_audit(tiny_llama, dtype)
    audit.drafting.runner = fault(audit.drafting.runner)
    record = audit.run()
    assert not record.passed
    (level,) = record.levels
    lookup, oracle = level.figures
    assert (level.passed, lookup.passed, oracle.passed) == (False, True, False)
    assert oracle.values["bugs"] > 0
    assert {finding["setting"] for finding in level.findings if finding["verdict"] == "bug"} == {"oracle"}


def test_rows_are_compared_even_where_every_choice_agrees(tiny_llama: Path) -> None:
    """A fault too small for the argmax: a thousandth of each drafted row is another token's logit."""
    audit = audit_of(tiny_llama)

    class Scaled(ModelRunner):
        def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
            output = super().run(plan, trees)
            for tree, start in zip(trees, output.logits_start, strict=True):
                if tree.num_drafted and start >= 0:
                    rows = output.logits[start + 1 : start + tree.num_nodes]
                    output.logits[start + 1 : start + tree.num_nodes] = rows + 0.001 * rows.roll(1, dims=1)
            return output

    inner = audit.drafting.runner
    audit.drafting.runner = Scaled(inner.decoder, inner.cache, inner.boundaries)
    levels = levels_of(audit)
    assert levels["C2"].passed
    assert levels["C4"].passed is False
    assert levels["C4"].figures[0].passed, "roots are as they were"


def test_an_int8_target_is_compared_with_the_weights_that_were_loaded(tiny_llama: Path) -> None:
    if not packing_available(Storage.INT8):
        pytest.skip("this torch build has no int8 products")
    audit = Audit(plan_of(tiny_llama, weights="int8"))
    assert audit.used.decoder.storage is Storage.INT8
    assert audit.reference.decoder.num_packed == 0
    assert not audit.plan.full_precision
    assert audit.noise.relative > 1e-3, "rounding the target is no harmless change"


def test_near_ties_are_told_from_bugs(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(max_num_seqs=1, kv_tokens=256))
    reference = PlainReference(engine.decoder)
    prompt = PROMPTS[0][1]
    plain = engine.generate([prompt], SamplingParams(max_tokens=8))[0].token_ids
    row = reference.logits([*prompt, *plain[:4]], len(prompt) + 3)[0]
    best, second, third = row.topk(3).indices.tolist()
    assert best == plain[4]
    margin = float(row[best] - row[second])
    calm = Noise(margin=margin / 4, relative=0.0, positions=1, scale=1.0, epsilon=0.0)
    wild = Noise(margin=margin / 1.5, relative=0.0, positions=1, scale=1.0, epsilon=0.0)
    other = [*plain[:4], second, 0, 0, 0]
    for noise, verdict in ((calm, "bug"), (wild, "near tie")):
        found = triage_greedy("a", prompt, other, plain, reference, noise)
        assert found is not None
        assert (found.index, found.verdict) == (4, verdict)
        assert found.margin == pytest.approx(margin)
        assert found.gap == pytest.approx(margin)
    # a token far down is a bug, however near the two best are
    far = triage_greedy("a", prompt, [*plain[:4], third, 0, 0, 0], plain, reference, wild)
    assert far is not None
    assert far.verdict == "bug"
    assert triage_greedy("a", prompt, plain, plain, reference, calm) is None
    cut = triage_greedy("a", prompt, plain[:5], plain, reference, wild)
    assert cut is not None
    assert cut.verdict == "bug", "equal tokens do not end in one place and go on in another"


def test_a_small_margin_excuses_no_wrong_row(tiny_llama: Path) -> None:
    """A planted fault that happens to flip a near tie: the rows say that it was no rounding."""
    engine = Engine(tiny_llama, config=EngineConfig(max_num_seqs=1, kv_tokens=256))
    noise = Noise(margin=100.0, relative=0.0, positions=1, scale=1.0, epsilon=0.0)
    results = engine.generate([ids for _, ids in PROMPTS[:2]], SamplingParams(max_tokens=6))
    changed = [replace(one, token_ids=[*one.token_ids[:3], 9, *one.token_ids[4:]]) for one in results]
    compared = Trajectories(setting="x", reference=PlainReference(engine.decoder), noise=noise, exact=False)
    compared.take(["a", "b"], changed, results)
    assert [found.verdict for found in compared.differences] == ["near tie", "near tie"]
    # of a the row of the difference itself is wrong, of b one after it
    compared.condemn({"a": 3, "b": 4})
    assert [found.verdict for found in compared.differences] == ["bug", "near tie"]
    assert compared.figure().passed is False


def test_a_race_has_a_margin_too(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(max_num_seqs=1, kv_tokens=256))
    reference = PlainReference(engine.decoder)
    prompt = PROMPTS[1][1]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, rule="coupled")
    drawn = engine.generate([prompt], params)[0].token_ids
    other = [*drawn[:3], drawn[3] ^ 1, *drawn[4:]]
    loud = Noise(margin=100.0, relative=0.0, positions=1, scale=1.0, epsilon=0.0)
    quiet = Noise(margin=1e-9, relative=0.0, positions=1, scale=1.0, epsilon=0.0)
    near = triage_race("b", prompt, other, drawn, 5, reference, loud)
    far = triage_race("b", prompt, other, drawn, 5, reference, quiet)
    assert near is not None
    assert far is not None
    assert (near.verdict, far.verdict) == ("near tie", "bug")
    assert near.margin == 0.0, "the drawn token needs no lift to win its own race"
    assert near.gap is not None
    assert near.gap > 0.0


def test_first_difference_counts_an_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0
    assert first_difference([1, 5], [1, 2, 3]) == 1


def test_watching_changes_nothing(tiny_llama: Path) -> None:
    audit = audit_of(tiny_llama)
    prompts = [ids for _, ids in PROMPTS]
    params = SamplingParams(max_tokens=TOKENS)
    before = [result.token_ids for result in audit.drafting.generate(prompts, params)]
    runner = audit.drafting.runner
    with recording(audit.drafting) as steps:
        watched = [result.token_ids for result in audit.drafting.generate(prompts, params)]
    assert watched == before
    assert audit.drafting.runner is runner
    # the rows of the accepted paths and the choices after them make up the whole text
    written: dict[int, set[int]] = {}
    for step in steps:
        written.setdefault(id(step.seq), set()).update(
            step.root_position + depth for depth in range(len(step.nodes))
        )
    for positions in written.values():
        assert positions == set(range(min(positions), max(positions) + 1))


def test_parity_counts_discordant_tasks() -> None:
    tasks = [
        Task(id=str(i), category="x", difficulty=1, token_ids=[1], is_right=lambda text: text == "yes")
        for i in range(12)
    ]
    yes, no = Answer(text="yes", token_ids=[1]), Answer(text="no", token_ids=[2])
    same = audit_parity(tasks, [yes, no] * 6, [yes, no] * 6, [])
    assert same.passed
    worse = audit_parity(tasks, [yes] * 12, [no] * 12, [])
    assert worse.passed is False
    assert worse.figures[-1].values["only_plain"] == 12
    assert worse.figures[-1].values["identical_answers"] == 0


def test_what_a_level_cannot_decide_is_refused() -> None:
    lenient = rule_named("lenience")
    with pytest.raises(UsageError, match="C2"):
        check_plan(rule=lenient, levels=("C0", "C2"), spec=CHAIN)
    with pytest.raises(UsageError, match="chain:DEPTH"):
        check_plan(rule=lenient, levels=("C0",), spec=TREE)
    with pytest.raises(UsageError, match="chain:DEPTH"):
        check_plan(rule=rule_named("block"), levels=("C2",), spec=TREE)
    check_plan(rule=None, levels=("C2",), spec=TREE)
    with pytest.raises(UsageError, match="C9"):
        parse_levels("C0,C9")
    assert parse_levels("c4, C0") == ("C0", "C4")
