"""An audit from beginning to end: engines on one set of weights, the levels in order, one record.

Owns what is compared with what; the levels do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.audit.baselines import Baseline, direct_rules, four_baselines, given_knobs
from specdec.audit.draws import Tested, draws_result, engine_tests, tensor_tests
from specdec.audit.enumerated import audit_enumeration
from specdec.audit.levels import LOSSY, Figure, LevelResult, level_result
from specdec.audit.parity import Answer, audit_parity
from specdec.audit.plan import AuditPlan, AuditRecord, check_plan
from specdec.audit.recording import recording
from specdec.audit.reference import Noise, PlainReference, measure_noise
from specdec.audit.steps import StepInvariant
from specdec.audit.trajectory import Trajectories, trajectory_result
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.models.decoder import Decoder
from specdec.requests import GenerationResult
from specdec.sampling_params import SamplingParams
from specdec.verification.greedy import GREEDY
from specdec.verification.registry import EXACT_RULES
from specdec.verification.rules import BoundRule, bind

# texts by which harmless changes are measured, and tokens of each that count
NOISE_TEXTS = 4
NOISE_TOKENS = 32
LOOKUP = "ngram"
# the rule whose text depends on seed and target alone
COUPLED = "coupled"

Report = Callable[[str], None]


class Audit:
    """One audit; `run` does it.

    Args:
        plan: what is audited.
        report: told in a line what is being done.
    """

    def __init__(self, plan: AuditPlan, report: Report = lambda _: None) -> None:
        check_plan(rule=plan.rule, levels=plan.levels, spec=plan.spec)
        self.plan = plan
        self._report = report
        longest = max(
            *(len(ids) + plan.max_tokens for _, ids in plan.prompts),
            *(len(task.token_ids) + plan.task_tokens for task in plan.tasks),
            plan.max_tokens,
        )
        # a tree, or the nodes grown on the way to it, behind the longest text
        behind = max(plan.spec.max_nodes, plan.spec.top_k * plan.spec.max_depth)
        config = EngineConfig(
            dtype=plan.dtype,
            weights=plan.weights,
            max_num_seqs=plan.batch_size,
            kv_tokens=plan.batch_size * (longest + behind + 48),
            allow_lossy=plan.lossy,
            spec=replace(plan.spec, adaptive=False),
        )
        rules = direct_rules(plan.rule) if plan.rule is not None and plan.lossy else []
        self.plain = Engine(plan.target, config=config, rules=rules)
        self.drafting = Engine(self.plain, draft=plan.draft, config=config, rules=rules)
        self.used = PlainReference(self.plain.decoder)
        self.reference = self.used
        if not plan.full_precision:
            self.reference = PlainReference(self._full_precision())
        self._noise: Noise | None = None

    def _full_precision(self) -> Decoder:
        return Decoder(
            self.plain.model_config,
            self.plain.target_folder,
            max_model_len=self.plain.max_model_len,
            dtype=torch.float32,
        )

    @property
    def noise(self) -> Noise:
        """How far harmless changes move logits, measured when first asked for."""
        if self._noise is None:
            self._report("harmless changes: the same texts in other cuts")
            chosen = self.plan.prompts[:NOISE_TEXTS]
            params = SamplingParams(max_tokens=NOISE_TOKENS, ignore_eos=True)
            texts = [
                [*result.prompt_token_ids, *result.token_ids]
                for result in self._generate(self.plain, [ids for _, ids in chosen], params)
            ]
            first = [len(ids) - 1 for _, ids in chosen]
            self._noise = measure_noise(self.used, self.reference, texts, first)
        return self._noise

    def run(self) -> AuditRecord:
        """Every level of the plan, and the baselines of a lossy rule."""
        plan, levels = self.plan, []
        if "C0" in plan.levels:
            levels.append(audit_enumeration(self._rules(), lambda name: self._report(f"C0: {name}")))
        if "C1" in plan.levels:
            levels.append(self._draws())
        if {"C2", "C4"} & set(plan.levels):
            levels += self._greedy()
        if "C3" in plan.levels:
            levels.append(self._coupled())
        if "C5" in plan.levels:
            levels.append(self._parity())
        levels.sort(key=lambda level: level.level)
        baselines: list[Baseline] = []
        if plan.lossy:
            baselines = self._baselines()
            levels.append(_kept(baselines[-1], plan.label))
        return AuditRecord(levels=levels, baselines=baselines, noise=self._noise)

    def _rules(self) -> list[BoundRule]:
        return [bind(rule, {}) for rule in EXACT_RULES] if self.plan.rule is None else [self.plan.rule]

    def _request(self, *, temperature: float = 0.0) -> SamplingParams:
        params = SamplingParams(max_tokens=self.plan.max_tokens, seed=self.plan.seed, temperature=temperature)
        rule = self.plan.rule
        return params if rule is None else replace(params, rule=rule.rule.name, rule_knobs=given_knobs(rule))

    def _draws(self) -> LevelResult:
        plan = self.plan
        tests: list[Tested] = []
        undeclared = []
        for rule in self._rules():
            self._report(f"C1: {rule.label} on tensors")
            if rule.rule.emitted_law is None:
                undeclared.append(rule.label)
            else:
                tests += tensor_tests(rule, plan.draws)
        notes = [f"tensors: float32 logits of 16 tokens, {plan.draws} draws a rule, each with its own seed"]
        notes += [f"{label} declares no law, so its draws are not tested" for label in undeclared]
        if plan.lossy:
            notes.append("the engine's draws are tested under exact rules: a lossy one's law also needs q")
        elif plan.engine_draws:
            prompts = plan.prompts[:1]
            self._report("C1: through the engine")
            request = self._request(temperature=1.0)
            if request.rule == GREEDY.name:
                request = replace(request, rule=None)
            tests += engine_tests(
                self.drafting,
                self.used,
                prompts,
                request,
                draws=plan.engine_draws,
                batch_size=plan.batch_size,
                on_progress=lambda done: self._report(f"C1: {done} answers"),
            )
            notes.append(
                f"engine: {len(prompts)} prompt, {plan.engine_draws} answers of 4 tokens, temperature 1, "
                "top-k 3; the law comes from plain passes over every context; half precision may shift it"
            )
        return draws_result(tests, notes)

    def _greedy(self) -> list[LevelResult]:
        plan = self.plan
        names: dict[tuple[int, ...], str] = {}
        compared = Trajectories(
            setting=f"{plan.draft}, {plan.label}",
            reference=self.reference,
            noise=self.noise,
            exact=plan.full_precision,
        )
        invariant = StepInvariant(
            used=self.used,
            noise=self.noise,
            greedy=not plan.lossy,
            name_of=lambda seq: names[tuple(seq.token_ids[: seq.prompt_len])],
        )
        request = self._request(temperature=plan.temperature if plan.lossy else 0.0)
        plain = SamplingParams(max_tokens=plan.max_tokens)
        for start in range(0, len(plan.prompts), plan.batch_size):
            batch = plan.prompts[start : start + plan.batch_size]
            names.update({tuple(ids): name for name, ids in batch})
            prompts = [ids for _, ids in batch]
            with recording(self.drafting) as steps:
                results = self._generate(self.drafting, prompts, request)
                invariant.take(steps)
            if "C2" in plan.levels:
                expected = self._generate(self.plain, prompts, plain)
                compared.take([name for name, _ in batch], results, expected)
            self._report(f"C2, C4: {start + len(batch)} of {len(plan.prompts)} prompts")
        sizes = (
            f"{len(plan.prompts)} prompts of up to {plan.max_tokens} tokens, greedy, batch {plan.batch_size}"
        )
        levels = []
        compared.condemn(invariant.spoiled)
        if "C2" in plan.levels:
            levels.append(trajectory_result("C2", [compared], [sizes]))
        if "C4" in plan.levels:
            levels.append(invariant.result())
        return levels

    def _coupled(self) -> LevelResult:
        plan = self.plan
        lookup = Engine(self.plain, draft=LOOKUP, config=self.drafting.config)
        settings = {LOOKUP: lookup}
        if plan.draft != LOOKUP:
            settings[plan.draft] = self.drafting
        compared = {
            name: Trajectories(
                setting=name,
                reference=self.reference,
                noise=self.noise,
                exact=plan.full_precision,
            )
            for name in settings
        }
        request = SamplingParams(temperature=1.0, max_tokens=plan.max_tokens, rule=COUPLED)
        for start in range(0, len(plan.prompts), plan.batch_size):
            batch = plan.prompts[start : start + plan.batch_size]
            params = [replace(request, seed=plan.seed + start + row) for row in range(len(batch))]
            prompts = [ids for _, ids in batch]
            expected = self._generate(self.plain, prompts, params)
            for name, engine in settings.items():
                results = self._generate(engine, prompts, params)
                compared[name].take([name for name, _ in batch], results, expected, sampled=True)
            self._report(f"C3: {start + len(batch)} of {len(plan.prompts)} prompts")
        return trajectory_result(
            "C3",
            list(compared.values()),
            [
                f"{len(plan.prompts)} prompts of up to {plan.max_tokens} tokens, temperature 1, coupled "
                f"verification, a seed a prompt, batch {plan.batch_size}; compared with no drafter"
            ],
        )

    def _parity(self) -> LevelResult:
        plan = self.plan
        answers: dict[str, list[Answer]] = {"plain": [], "speculated": []}
        requests = {
            "plain": SamplingParams(max_tokens=plan.task_tokens),
            "speculated": replace(self._request(), max_tokens=plan.task_tokens),
        }
        for start in range(0, len(plan.tasks), plan.batch_size):
            batch = plan.tasks[start : start + plan.batch_size]
            for name, engine in (("plain", self.plain), ("speculated", self.drafting)):
                results = self._generate(engine, [task.token_ids for task in batch], requests[name])
                answers[name] += [Answer(text=r.text, token_ids=r.token_ids) for r in results]
            self._report(f"C5: {start + len(batch)} of {len(plan.tasks)} tasks")
        return audit_parity(
            plan.tasks,
            answers["plain"],
            answers["speculated"],
            [f"greedy, up to {plan.task_tokens} tokens, batch {plan.batch_size}"],
        )

    def _baselines(self) -> list[Baseline]:
        plan = self.plan
        assert plan.rule is not None, "baselines are a lossy rule's"
        return four_baselines(
            self.plain,
            self.drafting,
            plan.rule,
            plan.tasks,
            SamplingParams(temperature=plan.temperature, max_tokens=plan.task_tokens, seed=plan.seed),
            one_ahead=SpecConfig(max_depth=1, max_nodes=1, top_k=1, adaptive=False),
            batch_size=plan.batch_size,
            on_progress=lambda name, done: self._report(f"{name}: {done} of {len(plan.tasks)} tasks"),
        )

    def _generate(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[GenerationResult]:
        results = engine.generate(prompts, params)
        for result in results:
            if result.error:
                raise SpecdecError(f"an answer failed, so nothing was audited: {result.error}")
        return results


def _kept(speculative: Baseline, label: str) -> LevelResult:
    """What a lossy run must keep on the real target."""
    prices = speculative.prices
    figure = Figure(
        name=label,
        values={
            "positions": prices["positions"],
            "excluded_tokens": prices["excluded_tokens"],
            "largest_overshoot": prices["largest_overshoot"],
            "overshoot_bound": prices["overshoot_bound"],
            "above_bound": prices["above_bound"],
        },
        passed=prices["excluded_tokens"] == 0 and prices["above_bound"] == 0,
    )
    return level_result(LOSSY, [figure], notes=("along the texts of the speculative run",))
