"""Every rule in the engine: seeds settle texts, exact rules keep the law, lossy ones are no accident."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chi2

from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.drafts.checkpoint import DraftContract, save_draft
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.provenance import folder_fingerprint
from specdec.rule_choice import draft_mode
from specdec.sequence import SamplingParams
from specdec.verification.judge import judge_rule
from specdec.verification.registry import EXACT_RULES, LOSSY_RULES, rule_named

PROMPTS = [
    [7, 3, 9, 20, 5],
    [40, 41],
    list(range(2, 40)),
    [100, 3, 100, 3, 100, 3],
    [6],
    [11, 12, 13, 12, 13],
]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
EXACT_NAMES = [rule.name for rule in EXACT_RULES if rule.name != "greedy"]
TREE_NAMES = [rule.name for rule in EXACT_RULES if rule.name != "greedy" and rule.topology == "tree"]
CHAIN = SpecConfig(max_depth=3, top_k=1, max_nodes=3, adaptive=False, ngram_min=1)
TREE = SpecConfig(max_depth=3, top_k=3, max_nodes=8, adaptive=False, ngram_min=1)
# a small chance of failure over the whole file; the seeds are fixed, so a failure is a change of the law
ALPHA = 1e-4


def random_head(target: Path, folder: Path, draft_vocab_size: int) -> Path:
    model = ModelConfig.from_folder(target)
    config = Eagle3Config(
        hidden_size=model.hidden_size,
        intermediate_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope=model.rope,
        vocab_size=model.vocab_size,
        draft_vocab_size=draft_vocab_size,
        boundaries=(1, 3, 4),
        target_hidden_size=model.hidden_size,
        target_num_layers=model.num_layers,
    )
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(model.vocab_size, generator=generator)[:draft_vocab_size].sort().values
    head = Eagle3Head(
        config,
        DraftVocab(ids, model.vocab_size),
        tensors["model.embed_tokens.weight"],
        tensors["lm_head.weight"],
    )
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    contract = DraftContract(target_fingerprint=folder_fingerprint(target), template_hash="none", training={})
    return save_draft(folder, head, contract, dtype="float16")


@pytest.fixture(scope="module")
def head(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head(tiny_llama, tmp_path_factory.mktemp("draft") / "head", 96)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))


def seeded(params: SamplingParams, count: int) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(count)]


def texts(engine: Engine, params: SamplingParams) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(PROMPTS, seeded(params, len(PROMPTS)))]


# two at a time with prompts in chunks and trees over the budget; all together with too little memory
REGIMES: list[dict[str, Any]] = [
    {"max_num_seqs": 2, "max_batch_tokens": 16},
    {"kv_tokens": 84, "block_size": 4},
]


@pytest.mark.parametrize("spelling", ["{}", "ngram+{}"])
@pytest.mark.parametrize("rule", TREE_NAMES)
def test_the_seed_settles_the_text_of_every_tree_rule(
    plain: Engine, head: Path, spelling: str, rule: str
) -> None:
    """B56 for rules that look at drafts: the same trees, whatever else is served."""
    _check_regimes(plain, spelling.format(head), replace(SAMPLED, rule=rule), TREE)


@pytest.mark.parametrize("spelling", ["{}", "ngram"])
@pytest.mark.parametrize("rule", EXACT_NAMES)
def test_the_seed_settles_the_text_of_every_chain_rule(
    plain: Engine, head: Path, spelling: str, rule: str
) -> None:
    adaptive = replace(CHAIN, adaptive=True)
    _check_regimes(plain, spelling.format(head), replace(SAMPLED, rule=rule, top_k=40), adaptive)


def _check_regimes(plain: Engine, draft: str, params: SamplingParams, spec: SpecConfig) -> None:
    expected, preemptions = None, 0
    for regime in [{}, *REGIMES]:
        engine = Engine(
            plain, draft=draft, config=EngineConfig(**{"kv_tokens": 2048, "spec": spec, **regime})
        )
        found = texts(engine, params)
        expected = expected or found
        assert found == expected, regime
        preemptions += engine.scheduler.num_preemptions
        engine.audit()
        assert engine.blocks.num_free == engine.blocks.num_blocks
    assert preemptions > 0


@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, temperature=0.7, top_p=0.9)])
def test_coupled_text_is_the_same_string_with_any_drafter(
    plain: Engine, head: Path, params: SamplingParams
) -> None:
    """C3: string equality when sampling."""
    prompts = [[(17 * row + 5 * column) % 250 for column in range(2 + row % 9)] for row in range(30)]
    each = seeded(replace(params, rule="coupled"), len(prompts))
    expected = [result.token_ids for result in plain.generate(prompts, each)]
    assert len({tuple(text) for text in expected}) == len(prompts)
    accepted = 0
    for draft, spec in [("ngram", CHAIN), (str(head), CHAIN), (str(head), TREE), (f"ngram+{head}", TREE)]:
        engine = Engine(plain, draft=draft, config=EngineConfig(kv_tokens=4096, spec=spec))
        results = engine.generate(prompts, each)
        assert [result.token_ids for result in results] == expected
        accepted += sum(result.stats.accepted for result in results)
    assert accepted > 0


NUM_TOKENS = 4
VOCAB = 5
LAW_PROMPT = [1, 4, 2, 0, 3]
NUM_REQUESTS = 800


@pytest.fixture(scope="module")
def small(
    tiny_model_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Path, dict[tuple[int, ...], float]]:
    """A target of five tokens, a head that knows four of them, and the law of every answer in float64."""
    folder = tiny_model_factory("llama", vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    draft = random_head(folder, tmp_path_factory.mktemp("small") / "head", 4)
    answers = list(itertools.product(range(VOCAB), repeat=NUM_TOKENS))
    model = load_hf_model(folder).double()
    ids = torch.tensor([[*LAW_PROMPT, *answer] for answer in answers])
    probs = model(input_ids=ids).logits[:, len(LAW_PROMPT) - 1 : -1].softmax(-1).numpy()
    law = {
        answer: float(np.prod([rows[place, token] for place, token in enumerate(answer)]))
        for answer, rows in zip(answers, probs, strict=True)
    }
    return Engine(folder, config=EngineConfig(kv_tokens=2048)), draft, law


@pytest.mark.parametrize(
    ("rule", "spelling", "shape"),
    [
        ("block", "{}", (2, 1, 2)),
        ("coupled", "{}", (2, 2, 4)),
        ("rejection", "{}", (2, 2, 4)),
        ("traversal", "{}", (2, 3, 7)),
        ("k-seq", "{}", (2, 3, 7)),
        ("traversal", "ngram+{}", (2, 2, 4)),
    ],
)
def test_served_text_has_the_targets_law(
    small: tuple[Engine, Path, dict[tuple[int, ...], float]],
    rule: str,
    spelling: str,
    shape: tuple[int, int, int],
) -> None:
    """The whole engine with a head that draws: a wrong q, row, order or number anywhere shifts the table."""
    plain, draft, law = small
    depth, top_k, nodes = shape
    spec = SpecConfig(max_depth=depth, top_k=top_k, max_nodes=nodes, adaptive=False, ngram_min=1)
    engine = Engine(plain, draft=spelling.format(draft), config=EngineConfig(kv_tokens=2048, spec=spec))
    params = seeded(replace(SAMPLED, rule=rule, max_tokens=NUM_TOKENS), NUM_REQUESTS)
    results = engine.generate([LAW_PROMPT] * NUM_REQUESTS, params)
    assert {result.rule for result in results} == {rule}
    assert sum(result.stats.accepted for result in results) > NUM_REQUESTS // 4
    counts = Counter(tuple(result.token_ids) for result in results)
    assert set(counts) <= set(law)
    observed, expected = [0.0], [0.0]
    for answer, probability in sorted(law.items(), key=lambda item: -item[1]):
        if expected[-1] >= 5.0:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += counts[answer]
        expected[-1] += NUM_REQUESTS * probability
    if expected[-1] < 5.0:
        observed[-2:], expected[-2:] = [sum(observed[-2:])], [sum(expected[-2:])]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert len(expected) > 20
    assert chi2.sf(statistic, len(expected) - 1) > ALPHA


@pytest.mark.parametrize("rule", [*EXACT_NAMES, *(rule.name for rule in LOSSY_RULES if rule.name != "judge")])
def test_no_rule_writes_what_the_request_forbids(plain: Engine, head: Path, rule: str) -> None:
    """A token with p = 0 is never accepted, whatever the draft thinks of it."""
    bound = rule_named(rule)
    spec = CHAIN if bound.rule.topology == "chain" else TREE
    engine = Engine(plain, draft=str(head), config=EngineConfig(kv_tokens=2048, spec=spec, allow_lossy=True))
    params = replace(SAMPLED, rule=rule, allowed_token_ids=tuple(range(0, 250, 3)))
    results = engine.generate(PROMPTS, seeded(params, len(PROMPTS)))
    assert all(token % 3 == 0 for result in results for token in result.token_ids)
    assert {result.rule for result in results} == {bound.label}
    assert {result.lossless for result in results} == {bound.rule.is_lossless}
    assert {result.error for result in results} == {None}


@pytest.mark.parametrize("rule", [rule.name for rule in LOSSY_RULES])
def test_lossy_rules_are_refused_unless_they_are_allowed(plain: Engine, rule: str) -> None:
    with pytest.raises(SpecdecError, match=rf"rule \({rule}.*lossy.*--lossy"):
        plain.generate(PROMPTS[:1], replace(SAMPLED, rule=rule))
    assert not plain.scheduler.has_work


@pytest.mark.parametrize(
    ("spelling", "spec", "params", "message"),
    [
        ("{}", TREE, {"rule": "block"}, r"rule \(block\).*top_k \(3\).*chain:DEPTH.*traversal"),
        ("ngram+{}", CHAIN, {"rule": "block"}, r"rule \(block\).*ngram\+eagle3.*chain:DEPTH"),
        ("ngram", CHAIN, {"rule": "lenience"}, r"rule \(lenience\).*draft \(ngram\).*draft head"),
        ("{}", CHAIN, {"rule": "nonsense"}, r"rule nonsense is not known.*rejection"),
        ("{}", CHAIN, {"rule": "lenience", "rule_knobs": {"k": 1.0}}, r"no knob k"),
        ("{}", CHAIN, {"rule_knobs": {"k": 1.0}}, r"rule_knobs \(k=1.0\).*rule"),
        ("{}", CHAIN, {"rule": "greedy"}, r"rule \(greedy\) needs temperature 0"),
        ("{}", CHAIN, {"rule": "margin", "temperature": 0.0}, r"rule \(margin.*temperature above 0"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused_in_one_line(
    plain: Engine, head: Path, spelling: str, spec: SpecConfig, params: dict[str, Any], message: str
) -> None:
    config = EngineConfig(kv_tokens=2048, spec=spec, allow_lossy=True)
    engine = Engine(plain, draft=spelling.format(head), config=config)
    with pytest.raises(SpecdecError, match=message) as caught:
        engine.generate(PROMPTS[:1], replace(SAMPLED, **params))
    assert "\n" not in str(caught.value)
    assert not engine.scheduler.has_work


def test_a_tree_that_must_be_whole_has_to_fit_the_pool(plain: Engine, head: Path) -> None:
    """A pool that can never hold text and tree would preempt its only sequence for ever."""
    config = EngineConfig(kv_tokens=32, block_size=4, spec=TREE)
    engine = Engine(plain, draft=str(head), config=config)
    params = replace(SAMPLED, rule="rejection", max_tokens=19)
    with pytest.raises(SpecdecError, match=r"trees of 8 rows.*kv_tokens"):
        engine.generate(PROMPTS[:1], replace(params, max_tokens=20))
    assert len(engine.generate(PROMPTS[:1], params)[0].token_ids) == 19
    rest = engine.generate(PROMPTS[:1], replace(params, max_tokens=None))[0]
    assert (len(rest.token_ids), rest.finish_reason) == (19, "length")


def test_every_exact_rule_is_greedy_at_temperature_zero(plain: Engine, head: Path) -> None:
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = [result.token_ids for result in plain.generate(PROMPTS, greedy)]
    engine = Engine(plain, draft=str(head), config=EngineConfig(kv_tokens=2048, spec=CHAIN))
    for rule in EXACT_RULES:
        results = engine.generate(PROMPTS, replace(greedy, rule=rule.name))
        assert [result.token_ids for result in results] == expected
        assert {(result.rule, result.lossless) for result in results} == {("greedy", True)}


def test_requests_of_one_batch_have_their_own_rules(plain: Engine, head: Path) -> None:
    engine = Engine(plain, draft=str(head), config=EngineConfig(kv_tokens=4096, spec=CHAIN, allow_lossy=True))
    rules = ["block", "coupled", "typical", "multi-round", "lenience", None]
    params = [replace(SAMPLED, rule=rule, seed=3) for rule in rules]
    together = engine.generate(PROMPTS, params)
    alone = [engine.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.lossless for result in together] == [True, True, False, True, False, True]
    assert together[4].rule.startswith("lenience(")


def test_a_judge_of_the_callers_is_a_rule_like_any_other(plain: Engine, head: Path) -> None:
    config = EngineConfig(kv_tokens=2048, spec=CHAIN, allow_lossy=True)
    lenient = judge_rule(lambda tree, node: True)
    params = replace(SAMPLED, rule="judge", seed=1)
    with pytest.raises(SpecdecError, match=r"rule \(judge\) needs a judge.*judge_rule"):
        Engine(plain, draft=str(head), config=config).generate(PROMPTS[:1], params)
    engine = Engine(plain, draft=str(head), config=config, rules=[lenient])
    results = engine.generate(PROMPTS, params)
    assert {(result.rule, result.lossless) for result in results} == {("judge", False)}
    # whatever was drafted stands: 3 drafts and the bonus a step
    assert all(result.stats.accepted == result.stats.drafted for result in results)


@pytest.mark.parametrize(("rule", "mode"), [("iid", "k-seq"), ("coupled", "coupled")])
def test_rules_ask_for_the_drafts_they_need(rule: str, mode: str) -> None:
    assert draft_mode(rule_named(mode)) == rule
    assert draft_mode(rule_named("block")) == "without_replacement"
    assert draft_mode(rule_named("target-only")) == "deterministic"
