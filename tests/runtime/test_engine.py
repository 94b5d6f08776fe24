"""The serving loop against a slow reference: one token at a time, everything recomputed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.config import EngineConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree, chain_tree, tree_from_paths

PROMPTS = [
    [7, 3, 9, 20, 5],
    [40, 41],
    list(range(2, 60)),
    [8] * 21,
    [100, 3, 100, 3, 100, 3],
    [6],
    [11, 12, 13],
    [9, 9],
]


def generate_naive(folder: Path, prompt: list[int], max_tokens: int, eos: tuple[int, ...] = ()) -> list[int]:
    """Greedy continuation by full recomputation in transformers: the oracle."""
    model = load_hf_model(folder)
    ids = list(prompt)
    for _ in range(max_tokens):
        token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
        if token in eos:
            break
    return ids[len(prompt) :]


class Script:
    """Fake drafter that knows the continuation of each prompt.

    `pattern` gives, step by step, how many drafted tokens are right; None is always all (ORACLE),
    0 never (ANTI). `branches` adds wrong siblings before the right child.
    """

    name = "script"
    boundaries: tuple[int, ...] = ()
    can_sample = False

    def __init__(
        self,
        continuations: dict[tuple[int, ...], list[int]],
        depth: int,
        pattern: list[int] | None,
        branches: int = 0,
    ) -> None:
        self.continuations, self.depth, self.pattern, self.branches = continuations, depth, pattern, branches
        self.calls = 0

    def makes_chains(self, spec: SpecConfig) -> bool:
        return False

    def relative_cost(self, spec: SpecConfig) -> float:
        return 0.0

    def scratch_rows(self, spec: SpecConfig) -> int:
        return 0

    def release(self, seq_id: int) -> None:
        pass

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        trees = []
        for request in requests:
            seq = request.seq
            known = self.continuations[tuple(seq.token_ids[: seq.prompt_len])]
            ahead = known[seq.num_output : seq.num_output + min(self.depth, request.max_depth)]
            right = len(ahead) if self.pattern is None else self.pattern[self.calls % len(self.pattern)]
            tokens = [token if depth < right else token ^ 1 for depth, token in enumerate(ahead)]
            root = seq.token_ids[-1]
            if self.branches and tokens:
                wrong = [[tokens[0] ^ (2 << n)] for n in range(self.branches)]
                trees.append(tree_from_paths(root, [*wrong, tokens]))
            else:
                trees.append(chain_tree(root, tokens))
        self.calls += 1
        return trees


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> list[list[int]]:
    return [generate_naive(tiny_llama, prompt, 40) for prompt in PROMPTS]


def spec(depth: int = 4, **overrides: Any) -> SpecConfig:
    settings = {"max_depth": depth, "max_nodes": 16, "adaptive": False, **overrides}
    return SpecConfig(**settings)


def scripted(folder: Path, reference: list[list[int]], **options: Any) -> Callable[..., Engine]:
    known = {tuple(prompt): tokens + [0] * 64 for prompt, tokens in zip(PROMPTS, reference, strict=True)}

    def make(**config: Any) -> Engine:
        settings = {"kv_tokens": 2048, "spec": spec(8), **config}
        return Engine(folder, draft=lambda view: Script(known, 8, **options), config=EngineConfig(**settings))

    return make


GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("batch", [1, 8])
def test_plain_greedy_equals_full_recomputation(
    tiny_llama: Path, reference: list[list[int]], batch: int
) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(max_num_seqs=batch, kv_tokens=2048))
    results = engine.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == reference
    assert all(result.finish_reason == "length" for result in results)
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("pattern", [None, [0], [0, 1, 3, 3, 2], [8, 0, 5]])
@pytest.mark.parametrize("branches", [0, 2])
@pytest.mark.parametrize("batch", [1, 8])
def test_speculation_changes_no_token(
    tiny_llama: Path, reference: list[list[int]], pattern: list[int] | None, branches: int, batch: int
) -> None:
    """Chains and trees, right and wrong drafts: the text is that of plain decoding (B47, B65 patterns)."""
    engine = scripted(tiny_llama, reference, pattern=pattern, branches=branches)(max_num_seqs=batch)
    results = engine.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == reference
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    if pattern is None:
        # the oracle's chains of 8 and one bonus token: 40 tokens in far fewer than 40 steps
        assert all(result.stats.verify_steps <= 6 for result in results)
    if pattern == [0]:
        assert all(result.stats.accepted == 0 for result in results)


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_tiny_pool_preempts_and_changes_no_token(
    tiny_llama: Path, reference: list[list[int]], block_size: int
) -> None:
    """B49, B50: rows at the end of the pool, forced preemption, recomputation."""
    engine = scripted(tiny_llama, reference, pattern=[8, 0, 5], branches=1)(
        kv_tokens=144, block_size=block_size, max_num_seqs=8
    )
    results = engine.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == reference
    assert engine.scheduler.num_preemptions > 0
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks


@pytest.mark.parametrize("chunk", [16, 17, 49])
def test_chunked_prefill_changes_no_token(tiny_llama: Path, reference: list[list[int]], chunk: int) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(max_batch_tokens=chunk, kv_tokens=2048, max_num_seqs=4))
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == reference


def test_an_end_token_inside_an_accepted_run_ends_the_text_there(
    tiny_llama: Path, reference: list[list[int]]
) -> None:
    """B35, B64: declare each of the first tokens as the end in turn."""
    engine = scripted(tiny_llama, reference, pattern=None)()
    for stop in reference[0][:8]:
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
        result = engine.generate(PROMPTS[:1], params)[0]
        end = reference[0].index(stop) + 1
        assert result.token_ids == reference[0][:end]
        assert result.finish_reason == "stop"
        assert result.stats.committed + 1 == len(result.token_ids)  # and the token of the prompt pass


@pytest.mark.parametrize("pattern", [None, [0]])
def test_max_tokens_is_exact_at_every_length(
    tiny_llama: Path, reference: list[list[int]], pattern: list[int] | None
) -> None:
    """B38: never one token more or less, whatever a step accepted."""
    engine = scripted(tiny_llama, reference, pattern=pattern)()
    for limit in range(1, 13):
        result = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=limit, ignore_eos=True))[0]
        assert result.token_ids == reference[0][:limit]
        assert result.finish_reason == "length"


def test_stop_and_length_on_the_same_token_is_a_stop(tiny_llama: Path, reference: list[list[int]]) -> None:
    """B36: the cap must not win over a stop that falls on the same token."""
    engine = scripted(tiny_llama, reference, pattern=None)()
    first = next(i for i in range(3, 12) if reference[0][i] not in reference[0][:i])
    params = SamplingParams(max_tokens=first + 1, ignore_eos=True, stop_token_ids=(reference[0][first],))
    assert engine.generate(PROMPTS[:1], params)[0].finish_reason == "stop"
    params = SamplingParams(max_tokens=first, ignore_eos=True, stop_token_ids=(reference[0][first],))
    assert engine.generate(PROMPTS[:1], params)[0].finish_reason == "length"


def test_stop_strings_cut_the_text_inside_a_run(tiny_llama: Path, reference: list[list[int]]) -> None:
    """B36: nothing after the stop string leaks, streamed or not."""
    engine = scripted(tiny_llama, reference, pattern=None)()
    whole = engine.generate(PROMPTS[:1], GREEDY)[0].text
    stop = whole[4:7]
    cut = whole[: whole.index(stop)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
    result = engine.generate(PROMPTS[:1], params)[0]
    assert (result.text, result.finish_reason) == (cut, "stop")
    pieces = list(engine.stream(PROMPTS[:1], params))
    assert "".join(piece.text for piece in pieces) == cut
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids


def test_the_context_end_bounds_drafts_and_text(tiny_model_factory: Callable[..., Path]) -> None:
    """B39, B40: context 64, prompt 60: four tokens; 63: one; 64: refused with both numbers."""
    folder = tiny_model_factory("llama", max_position_embeddings=64)
    prompt = list(range(2, 62))
    expected = generate_naive(folder, prompt, 4)
    engine = Engine(folder, draft="ngram", config=EngineConfig(kv_tokens=512, spec=spec(8, ngram_min=1)))
    result = engine.generate([prompt], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert (result.token_ids, result.finish_reason) == (expected, "length")
    assert len(engine.generate([[5] * 63], SamplingParams(ignore_eos=True))[0].token_ids) == 1
    for length in (64, 65):
        with pytest.raises(SpecdecError, match=f"{length} tokens.*64"):
            engine.generate([[5] * length])
    assert len(engine.generate([[5] * 10], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_ngram_speculation_equals_plain(tiny_model_factory: Callable[..., Path], family: str) -> None:
    """Windows crossed by drafted rows included (Mistral's window is 32)."""
    folder = tiny_model_factory(family)
    plain = Engine(folder, config=EngineConfig(kv_tokens=2048)).generate(PROMPTS, GREEDY)
    engine = Engine(folder, draft="ngram", config=EngineConfig(kv_tokens=2048, spec=spec(5, ngram_min=1)))
    spoken = engine.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in spoken] == [result.token_ids for result in plain]
    assert sum(result.stats.accepted for result in spoken) > 0


def test_sampled_text_depends_on_the_seed_alone(tiny_llama: Path, reference: list[list[int]]) -> None:
    """B56: alone or in a batch, drafted or not, chunked or preempted: the same text for the same seed."""
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, top_k=20, top_p=0.9, seed=seed, ignore_eos=True)
        for seed in (1, 2, 1, 3, 4, 5, 6, 7)
    ]
    plain = Engine(tiny_llama, config=EngineConfig(kv_tokens=2048)).generate(PROMPTS, params)
    texts = [result.token_ids for result in plain]
    for config in (
        {"max_num_seqs": 1},
        {"max_batch_tokens": 16},
        {"kv_tokens": 128, "block_size": 4},
    ):
        engine = Engine(
            tiny_llama,
            draft="ngram",
            config=EngineConfig(**{"kv_tokens": 2048, "spec": spec(6, ngram_min=1), **config}),
        )
        assert [result.token_ids for result in engine.generate(PROMPTS, params)] == texts
    one = Engine(tiny_llama).generate(
        [PROMPTS[0]] * 10, [SamplingParams(temperature=1.0, seed=s) for s in range(10)]
    )
    assert len({tuple(result.token_ids) for result in one}) > 1


def test_a_nan_row_ends_only_its_own_request(tiny_llama: Path, reference: list[list[int]]) -> None:
    """B44: no id outside the vocabulary, the others unharmed, all blocks back."""
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))
    original = engine.decoder.logits
    steps = 0

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        logits = original(hidden)
        if steps == 3:
            logits[1] = float("nan")
        return logits

    engine.decoder.logits = poisoned  # type: ignore[method-assign]
    results = engine.generate(PROMPTS[:4], GREEDY)
    assert results[1].finish_reason == "error"
    assert "NaN" in (results[1].error or "")
    assert [results[i].token_ids for i in (0, 2, 3)] == [reference[i] for i in (0, 2, 3)]
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_a_closed_stream_gives_its_blocks_back(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))
    stream = engine.stream(PROMPTS, GREEDY)
    for _ in range(5):
        next(stream)
    stream.close()
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")), ("temperature", -1.0), ("temperature", "0.5"), ("temperature", True),
        ("temperature", float("inf")), ("top_p", 0.0), ("top_p", float("nan")), ("min_p", 1.5), ("top_k", -2),
        ("max_tokens", 0), ("max_tokens", 1.5), ("seed", 2**70), ("stop", ("",)), ("stop_token_ids", (-1,)),
    ],
)  # fmt: skip
def test_bad_sampling_values_are_refused_by_name(field: str, value: Any) -> None:
    """B43, B44: NaN passes every comparison-style check; a bool is no number."""
    with pytest.raises(SpecdecError, match=field):
        SamplingParams(**{field: value})


def test_prompts_the_engine_cannot_decode_are_refused_and_leave_nothing_behind(tiny_llama: Path) -> None:
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))
    for bad in ([], [10**6], [-1]):
        with pytest.raises(SpecdecError, match="prompt"):
            engine.generate([PROMPTS[0], bad])
    assert not engine.scheduler.has_work
    with pytest.raises(SpecdecError, match="kv_tokens"):
        Engine(tiny_llama, config=EngineConfig(kv_tokens=32)).generate(
            [[5] * 8], SamplingParams(max_tokens=100)
        )
