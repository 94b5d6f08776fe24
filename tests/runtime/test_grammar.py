"""Answers inside a grammar, whatever is drafted: legal prefixes, an end exactly where the grammar accepts."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.grammar import GrammarCompiler
from specdec.sampling_params import GrammarSpec, SamplingParams
from specdec.sequence import Sequence
from specdec.tree import DraftTree, tree_from_paths

# of the requests in order, None for one without a grammar
Specs = list[GrammarSpec | None]
EOS, EOT, VOCAB = 265, 266, 272
SPEC = SpecConfig(max_depth=6, max_nodes=14, adaptive=False)
NUM_SCHEMAS = 200
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "up": {"type": "boolean"}},
    "required": ["age", "up"],
    "additionalProperties": False,
}


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose values are short, so that a random model reaches their end."""
    kinds = ["integer", "boolean", "null", "enum", "string", "number", "const"]
    kind = rng.choice(["object", "object", "array", "anyOf", *kinds] if depth < 3 else kinds)
    if depth == 0:
        kind = "object"
    if kind == "object":
        names = rng.sample(["a", "the", "in", "x y", "\u00e9", "id"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    if kind == "array":
        low = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}
    if kind in ("integer", "number"):
        low = rng.randint(-200, 100)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == "string":
        low = rng.randint(0, 3)
        if rng.random() < 0.3:
            return {"type": "string", "pattern": "^[a-c]{1,4}$"}
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 5)}
    if kind == "enum":
        return {"enum": rng.sample(["the", 'quo"te', 7, None, False, "in", -1.5], rng.randint(1, 3))}
    if kind == "const":
        return {"const": rng.choice(["the end", 3, [1, "x"], {"k": None}])}
    return {"type": kind}


def obeys(value: Any, schema: dict[str, Any]) -> bool:
    """JSON schema's own meaning of the keywords above; knows nothing of the grammar engine."""
    if "anyOf" in schema:
        return any(obeys(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and value == schema["const"]
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(obeys(each, schema["properties"][name]) for name, each in value.items())
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(obeys(each, schema["items"]) for each in value)
        )
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "null":
        return value is None
    if kind == "string":
        if not isinstance(value, str):
            return False
        if "pattern" in schema:
            return re.search(schema["pattern"], value) is not None
        return schema["minLength"] <= len(value) <= schema["maxLength"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = kind == "number" or (number and float(value).is_integer())
    return number and whole and schema["minimum"] <= value <= schema["maximum"]


class Adversary:
    """Drafter that knows the grammars and drafts to break them.

    Every tree has legal tokens, tokens the mask forbids, children below forbidden ones, ends that come too
    early, and tokens behind an end.
    """

    name = "adversary"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(self, engine: Engine, specs: Specs, seed: int) -> None:
        self.compiler = engine.admission.grammars
        self.specs, self.rng = specs, random.Random(seed)
        self.states: dict[int, Any] = {}
        self.illegal = 0

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        self.states.pop(seq_id, None)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> DraftTree:
        seq = request.seq
        spec = self.specs[seq.seq_id % len(self.specs)]
        if spec is not None and seq.seq_id not in self.states:
            self.states[seq.seq_id] = self.compiler.start(spec, seq.prompt_len)
        depth = min(request.max_depth, 4)
        paths = [self._path(seq, spec is not None, depth) for _ in range(request.max_nodes // 5)]
        return tree_from_paths(seq.token_ids[-1], paths)

    def _path(self, seq: Sequence, constrained: bool, depth: int) -> list[int]:
        rng, path = self.rng, []
        while len(path) < depth:
            draw = rng.random()
            mask = None
            if constrained and draw < 0.8 and not {EOS, EOT} & set(path):
                mask = self.states[seq.seq_id].allowed(seq.token_ids, path)
            if mask is None:
                path.append(rng.choice((EOS, EOT, rng.randrange(VOCAB))))
            elif draw < 0.6:
                path.append(rng.choice(mask.nonzero().flatten().tolist()))
            else:
                path.append(rng.choice((~mask).nonzero().flatten().tolist()))
                self.illegal += 1
        return path


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return Engine(tiny_llama, config=EngineConfig(kv_tokens=16384))


def attacked(plain: Engine, specs: Specs, **config: Any) -> Engine:
    settings = {"kv_tokens": 16384, "spec": SPEC, **config}
    return Engine(plain, draft=lambda view: Adversary(plain, specs, 0), config=EngineConfig(**settings))


def matcher_of(plain: Engine, spec: GrammarSpec) -> Any:
    """A matcher of its own, straight from the grammar engine."""
    plain.admission.grammars.start(spec, 0)
    return plain.admission.grammars._compiled[spec].deep_copy()


def test_two_hundred_schemas_hold_against_a_drafter_that_attacks_them(plain: Engine) -> None:
    """Must hold: every prefix legal, every finished output parses and obeys; the rest is length-limited."""
    rng = random.Random(5)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    specs: Specs = [GrammarSpec(json_schema=schema) for schema in schemas]
    params = [
        SamplingParams(max_tokens=250, grammar=spec, temperature=float(index % 2), seed=index)
        for index, spec in enumerate(specs)
    ]
    engine = attacked(plain, specs)
    results = engine.generate([[7, 3, 9]] * NUM_SCHEMAS, params)
    finished = 0
    for result, schema in zip(results, schemas, strict=True):
        assert result.error is None
        matcher = matcher_of(plain, GrammarSpec(json_schema=schema))
        if result.finish_reason == "stop":
            finished += 1
            assert result.token_ids[-1] in (EOS, EOT)
            assert obeys(json.loads(result.text), schema), (result.text, schema)
            tokens = result.token_ids[:-1]
            assert matcher.try_consume_tokens(tokens) == len(tokens)
            assert matcher.is_accepting()
        else:
            assert result.finish_reason == "length"
            assert matcher.try_consume_tokens(result.token_ids) == len(result.token_ids) == 250
    assert finished > 0.95 * NUM_SCHEMAS
    assert sum(result.stats.accepted for result in results) > 200
    assert engine.drafter.illegal > 1000  # type: ignore[union-attr]
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("config", [{}, {"max_num_seqs": 3, "max_batch_tokens": 16}, {"kv_tokens": 192}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_in_a_grammar_is_that_of_plain_decoding(
    plain: Engine, temperature: float, config: dict[str, Any]
) -> None:
    """Trees, chunks and preemption; requests with and without a grammar in one batch."""
    rng = random.Random(9)
    specs: Specs = [GrammarSpec(json_schema=random_schema(rng)) if index % 3 else None for index in range(12)]
    params = [
        SamplingParams(
            max_tokens=40,
            grammar=spec,
            temperature=temperature,
            seed=index,
            repetition_penalty=1.2,
            min_tokens=index % 2,
        )
        for index, spec in enumerate(specs)
    ]
    prompts = [list(range(2, 2 + index)) for index in range(1, 13)]
    wanted = plain.generate(prompts, params)
    engine = attacked(plain, specs, block_size=4, **config)
    results = engine.generate(prompts, params)
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
    assert [result.finish_reason for result in results] == [result.finish_reason for result in wanted]
    assert (engine.scheduler.num_preemptions > 0) is (config.get("kv_tokens") == 192)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (GrammarSpec(regex="(the|in|a ){2,4}x?"), "(the|in|a ){2,4}x?"),
        (
            GrammarSpec(ebnf='root ::= word ("-" word)* "!"\nword ::= [a-c] [a-c]?'),
            "[a-c]{1,2}(-[a-c]{1,2})*!",
        ),
        (GrammarSpec(ebnf='start: "x" y+\ny: "1" | "2" "3"'), "x(1|23)+"),
    ],
)
def test_expressions_and_grammars_hold(plain: Engine, spec: GrammarSpec, pattern: str) -> None:
    """Recursion and alternatives, with an independent expression as the judge."""
    params = [SamplingParams(max_tokens=60, grammar=spec, temperature=1.0, seed=seed) for seed in range(8)]
    results = attacked(plain, [spec]).generate([[7, 3]] * 8, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain.generate([[7, 3]] * 8, params)]
    for result in results:
        assert re.fullmatch(pattern, result.text) is not None or result.finish_reason == "length"
    assert any(result.finish_reason == "stop" for result in results)


def test_masks_of_a_tree_in_any_order_are_those_of_a_matcher_begun_anew(plain: Engine) -> None:
    """A rollback too many or too few, or a state that a rejected draft has moved."""
    rng = random.Random(3)
    spec = GrammarSpec(json_schema=PERSON)
    state = plain.admission.grammars.start(spec, 2)
    text, answer = [7, 3], plain.encoder.tokenizer.encode('{"age": 42, "up": true}', add_special_tokens=False)
    written = 0
    while written <= len(answer):
        right = answer[written:]
        for _ in range(8):
            path = right[: rng.randint(0, 4)] + [rng.randrange(VOCAB - 8) for _ in range(rng.randint(0, 2))]
            fresh = matcher_of(plain, spec)
            so_far = answer[:written] + path
            legal = fresh.try_consume_tokens(so_far) == len(so_far)
            mask = state.allowed(text, path)
            assert (mask is not None) is legal
            if mask is not None:
                bits = torch.tensor(list(fresh.compute_bitmask()), dtype=torch.uint8)
                wanted = (bits[:, None] >> torch.arange(8)) & 1
                assert mask.tolist() == wanted.flatten()[:VOCAB].bool().tolist()
                assert bool(mask[EOS]) == bool(mask[EOT]) == fresh.is_accepting()
        step = rng.randint(1, 3)
        text, written = [7, 3, *answer[: written + step]], written + step
        if written > len(answer):
            break


def test_an_end_comes_only_where_the_grammar_accepts_and_other_wishes_yield(plain: Engine) -> None:
    """min_tokens cannot hold back an answer that is complete; a bias cannot end one that is not."""
    spec = GrammarSpec(regex="abc")
    for given in (
        {"min_tokens": 9},
        {"logit_bias": {EOS: 100.0}},
        {"logits_processors": (lambda ids, row: -row,)},
    ):
        result = plain.generate([[7]], SamplingParams(max_tokens=20, grammar=spec, **given))[0]
        assert (result.text, result.finish_reason) == ("abc", "stop")
        assert len(result.token_ids) == 4


def test_wishes_that_leave_nothing_end_the_request_with_a_reason(plain: Engine) -> None:
    b = plain.encoder.tokenizer.convert_tokens_to_ids("b")
    params = SamplingParams(grammar=GrammarSpec(regex="abc"), bad_words=((b,),))
    result, other = plain.generate([[7], [8]], [params, SamplingParams(max_tokens=4, ignore_eos=True)])
    assert result.finish_reason == "error"
    assert "output token 2" in (result.error or "")
    assert (result.text, len(other.token_ids)) == ("a", 4)


def test_white_space_is_free_only_when_asked_for(plain: Engine) -> None:
    space = plain.encoder.tokenizer.convert_tokens_to_ids("\u010a")
    for any_whitespace in (False, True):
        spec = GrammarSpec(json_schema=PERSON, any_whitespace=any_whitespace)
        params = SamplingParams(max_tokens=40, grammar=spec, logit_bias={space: 100.0})
        result = plain.generate([[7]], params)[0]
        assert (result.finish_reason, "\n" in result.text) == (
            ("length", True) if any_whitespace else ("stop", False)
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "empty"),
        ({"regex": "a", "ebnf": "b"}, "regex, ebnf"),
        ({"regex": ""}, "characters"),
        ({"regex": "a" * 200_001}, "200000 characters"),
        ({"json_schema": "{"}, "must be JSON"),
        ({"json_schema": {"type": {1}}}, "must be JSON"),
    ],
)
def test_specs_that_are_none_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        GrammarSpec(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "a("}, "unclosed"),
        ({"ebnf": 'root ::= "a'}, "Unexpected end"),
        ({"json_schema": {"type": "texts"}}, "texts"),
        # a keyword the engine does not know is not ignored
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ],
)
def test_grammars_that_do_not_compile_are_refused_with_the_reason(
    plain: Engine, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecdecError, match=words) as caught:
        plain.generate([[7]], SamplingParams(grammar=GrammarSpec(**given)))
    assert "\n" not in str(caught.value)
    assert not plain.scheduler.has_work


def test_what_a_grammar_needs_is_said_where_it_is_missing(
    plain: Engine, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = GrammarSpec(regex="a")
    with pytest.raises(SpecdecError, match="end token"):
        GrammarCompiler(tiny_tokenizer, VOCAB, ()).start(spec, 0)
    with pytest.raises(SpecdecError, match="tokenizer"):
        GrammarCompiler(None, VOCAB, (EOS,)).start(spec, 0)
    with pytest.raises(SpecdecError, match="ignore_eos"):
        SamplingParams(grammar=spec, ignore_eos=True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SpecdecError, match=r"specdec\[grammar\]"):
        GrammarCompiler(tiny_tokenizer, VOCAB, (EOS,)).start(spec, 0)


def test_equal_grammars_are_compiled_once(plain: Engine) -> None:
    compiler = GrammarCompiler(plain.encoder.tokenizer, VOCAB, (EOS,))
    one, two = (GrammarSpec(json_schema=each) for each in (PERSON, json.dumps(PERSON, indent=3)))
    assert one == two
    first, second = compiler.start(one, 0), compiler.start(two, 0)
    assert len(compiler._compiled) == 1
    brace = plain.encoder.tokenizer.convert_tokens_to_ids("{")
    assert first.allowed([brace], []) is not None
    mask = second.allowed([], [])
    assert mask is not None
    assert mask.nonzero().flatten().tolist() == [brace]
