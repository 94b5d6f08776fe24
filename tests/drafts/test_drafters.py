"""Drafters in the engine: text unchanged, and every proposed token equal to an independent forward.

Acceptance hides an off-by-one (a head served one layer off keeps most of its acceptance), so the
states the drafter read and the tokens it proposed are compared one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.drafts import load_drafter
from specdec.drafts.checkpoint import DraftContract, save_draft
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import BoundaryTap, load_hf_model
from specdec.provenance import folder_fingerprint
from specdec.sequence import SamplingParams, Sequence
from specdec.tree import DraftTree, path_to

PROMPTS = [
    [7, 3, 9, 20, 5],
    [40, 41],
    list(range(2, 60)),
    [100, 3, 100, 3, 100, 3],
    [6],
    [11, 12, 13, 12, 13],
]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
STATE_TOLERANCE = (
    1e-4  # fp32 rounding of a residual stream of size 10; one layer off is thousands of times that
)


def write_draft(target: Path, folder: Path, *, boundaries: tuple[int, ...] = (1, 3, 4), **flags: Any) -> Path:
    """A random head for a tiny target, saved as `specdec train` saves one."""
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
        draft_vocab_size=flags.pop("draft_vocab_size", 96),
        boundaries=boundaries,
        target_hidden_size=model.hidden_size,
        target_num_layers=model.num_layers,
        **flags,
    )
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(model.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
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


class Reference:
    """The head as a dense forward written from the formulas, reading only the files on disk."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.w = {name: tensor.float() for name, tensor in load_file(draft / "model.safetensors").items()}
        self.config = json.loads((draft / "config.json").read_text())
        weights = load_file(target / "model.safetensors")
        self.embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        d2t = self.w["d2t"].long()
        self.ids = torch.arange(len(d2t)) + d2t
        self.rows = self.w.get("lm_head.weight", head[self.ids])
        self.boundaries = self.config["specdec"]["boundaries"]
        self.model = load_hf_model(target)

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[name + ".weight"]

    def states(self, tokens: list[int]) -> Tensor:
        """[tokens, taps, hidden] from transformers."""
        with BoundaryTap(self.model, self.boundaries) as tap:
            self.model(input_ids=torch.tensor([tokens]))
            return torch.stack([tap.states[b][0] for b in self.boundaries], dim=1)

    def layer(self, g: Tensor, tokens: list[int], positions: Tensor, mask: Tensor) -> Tensor:
        """Z [rows, hidden] of rows that see each other as `mask` [rows, rows] says."""
        dim, heads, kv = (
            self.config["head_dim"],
            self.config["num_attention_heads"],
            self.config["num_key_value_heads"],
        )
        x = torch.cat(
            (self.rms(self.embed[tokens], "midlayer.input_layernorm"), self.rms(g, "midlayer.hidden_norm")),
            dim=-1,
        )
        inv = 1.0 / self.config["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
        angle = torch.cat([positions[:, None].float() * inv] * 2, dim=-1)[:, None]

        def rotate(t: Tensor) -> Tensor:
            left, right = t.chunk(2, dim=-1)
            return t * angle.cos() + torch.cat((-right, left), dim=-1) * angle.sin()

        q = rotate((x @ self.w["midlayer.self_attn.q_proj.weight"].T).view(-1, heads, dim))
        k = rotate((x @ self.w["midlayer.self_attn.k_proj.weight"].T).view(-1, kv, dim))
        v = (x @ self.w["midlayer.self_attn.v_proj.weight"].T).view(-1, kv, dim)
        k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", probs, v).flatten(1)
        y = g + mixed @ self.w["midlayer.self_attn.o_proj.weight"].T
        h = self.rms(y, "midlayer.post_attention_layernorm")
        gate, up = h @ self.w["midlayer.mlp.gate_proj.weight"].T, h @ self.w["midlayer.mlp.up_proj.weight"].T
        return y + (functional.silu(gate) * up) @ self.w["midlayer.mlp.down_proj.weight"].T

    def tree(self, tokens: list[int], depth: int, top_k: int, max_nodes: int) -> dict[tuple[int, ...], float]:
        """The EAGLE-2 tree after `tokens`: path of drafted tokens -> log-probability, by brute force."""
        states = self.states(tokens)[:-1]
        taps = [self.rms(states[:, i], f"fc_norm.{i}") for i in range(states.shape[1])]
        g = torch.cat(taps, dim=-1) @ self.w["fc.weight"].T
        rows = len(tokens) - 1

        def children(path: tuple[int, ...]) -> Tensor:
            # all true rows and one fed-back row per drafted token of the path
            features, read = g, tokens[1:]
            for token in path:
                z = self.layer(
                    features, read, torch.arange(len(read)), torch.ones(len(read), len(read)).tril() > 0
                )
                features = torch.cat((features, self.rms(z[-1:], "norm")))
                read = [*read, token]
            z = self.layer(
                features, read, torch.arange(len(read)), torch.ones(len(read), len(read)).tril() > 0
            )
            assert len(read) == rows + len(path)
            return torch.log_softmax(self.rms(z[-1], "norm") @ self.rows.T, dim=-1)

        found: dict[tuple[int, ...], float] = {}
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(depth):
            candidates = []
            for score, path in frontier:
                best = children(path).topk(top_k)
                for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    candidates.append((score + value, (*path, int(self.ids[index]))))
            candidates.sort(reverse=True)
            found.update({path: score for score, path in candidates})
            frontier = candidates[:top_k]
        kept = sorted(found, key=lambda path: -found[path])[:max_nodes]
        return {path: found[path] for path in kept}


class Spy:
    """Records what the drafter was given and what it proposed."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name, self.boundaries, self.can_sample = inner.name, inner.boundaries, inner.can_sample
        self.makes_chains = inner.makes_chains
        self.relative_cost, self.scratch_rows, self.release = (
            inner.relative_cost,
            inner.scratch_rows,
            inner.release,
        )
        self.seen: list[tuple[list[int], Tensor, DraftTree]] = []
        self.limits: list[tuple[int, int]] = []
        self._states: dict[int, Tensor] = {}

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        given = []
        for request in requests:
            seq = request.seq
            if seq.draft_computed == 0:
                self._states.pop(seq.seq_id, None)
            known = self._states.get(seq.seq_id)
            new = torch.cat(seq.pending_states).clone()
            self._states[seq.seq_id] = new if known is None else torch.cat((known, new))
            given.append((list(seq.token_ids), self._states[seq.seq_id]))
        self.limits += [(request.max_depth, request.max_nodes) for request in requests]
        trees = self.inner.propose(requests)
        self.seen += [(tokens, states, tree) for (tokens, states), tree in zip(given, trees, strict=True)]
        return trees


def spied(target: Path, draft: Path, spec: SpecConfig, **config: Any) -> tuple[Engine, Spy]:
    spies: list[Spy] = []

    def make(view: Any) -> Any:
        spies.append(Spy(load_drafter(str(draft), view)))
        return spies[0]

    settings = {"kv_tokens": 2048, "spec": spec, **config}
    return Engine(target, draft=make, config=EngineConfig(draft_weights="plain", **settings)), spies[0]


SHAPES = [(4, 1, 4), (3, 3, 9), (1, 2, 2), (4, 2, 6)]


@pytest.fixture(scope="module")
def draft(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tiny_llama, tmp_path_factory.mktemp("draft") / "head")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", [{}, {"max_batch_tokens": 16}, {"block_size": 4, "kv_tokens": 148}])
def test_states_and_proposed_tokens_equal_an_independent_forward(
    tiny_llama: Path, draft: Path, shape: tuple[int, int, int], config: dict[str, Any]
) -> None:
    """The day-one guard, token by token: batches, prompt chunks and preemption included."""
    depth, top_k, nodes = shape
    spec = SpecConfig(max_depth=depth, top_k=top_k, max_nodes=nodes, adaptive=False)
    engine, spy = spied(tiny_llama, draft, spec, **config)
    engine.generate(PROMPTS, GREEDY)
    reference = Reference(tiny_llama, draft)
    assert len(spy.seen) > 60
    stride = max(1, len(spy.seen) // 40)
    for (tokens, states, tree), limits in zip(spy.seen[::stride], spy.limits[::stride], strict=True):
        expected_states = reference.states(tokens)[:-1]
        assert states.shape == expected_states.shape
        assert (states - expected_states).abs().max() < STATE_TOLERANCE * max(
            1.0, float(expected_states.abs().max())
        )
        # the end of the text and a full step leave room for fewer nodes than the setting
        expected = reference.tree(tokens, limits[0], top_k, limits[1])
        paths = {
            tuple(tree.tokens_of(path_to(tree.parents, node)[1:])): tree.log_probs[node]  # type: ignore[index]
            for node in range(1, tree.num_nodes)
        }
        assert paths.keys() == expected.keys()
        for path, score in expected.items():
            assert abs(paths[path] - score) < 1e-3


@pytest.mark.parametrize("spelling", ["{}", "ngram+{}"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 6])
def test_speculation_with_a_head_changes_no_token(
    tiny_llama: Path, draft: Path, spelling: str, shape: tuple[int, int, int], batch: int
) -> None:
    depth, top_k, nodes = shape
    plain = Engine(tiny_llama, config=EngineConfig(kv_tokens=2048)).generate(PROMPTS, GREEDY)
    spec = SpecConfig(max_depth=depth, top_k=top_k, max_nodes=nodes, adaptive=False, ngram_min=1)
    engine = Engine(
        tiny_llama,
        draft=spelling.format(draft),
        config=EngineConfig(kv_tokens=2048, max_num_seqs=batch, spec=spec),
    )
    results = engine.generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert all(result.stats.drafted > 0 for result in results)
    engine.audit()
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_a_sequence_that_stops_and_comes_back_drafts_from_true_states(
    tiny_llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B74: rows missed while speculation was off are caught up before the next proposal."""
    spec = SpecConfig(max_depth=3, top_k=1, max_nodes=3, adaptive=True)
    engine, spy = spied(tiny_llama, draft, spec)

    def now_and_then(decoding: list[Sequence]) -> dict[int, int]:
        return {seq.seq_id: 3 if seq.num_output % 30 < 6 else 0 for seq in decoding}

    monkeypatch.setattr(engine.budget, "plan", now_and_then)
    engine.generate(PROMPTS[:2], SamplingParams(max_tokens=90, ignore_eos=True))
    reference = Reference(tiny_llama, draft)
    steps = [len(tokens) for tokens, _, _ in spy.seen]
    assert any(later - earlier > 8 for earlier, later in pairwise(steps))
    for tokens, states, _ in spy.seen:
        expected = reference.states(tokens)[:-1]
        assert (states - expected).abs().max() < STATE_TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("spelling", ["{}", "ngram+{}"])
@pytest.mark.parametrize("shape", [(8, 1, 8), (4, 3, 16)])
def test_drafting_touches_only_the_sequences_own_blocks(
    tiny_llama: Path, draft: Path, spelling: str, shape: tuple[int, int, int]
) -> None:
    """B50: few slots left in the last page; blocks that nobody owns hold 1e9, in both caches."""
    prompts = [[7 + row, *range(20, 19 + row)] for row in range(9, 18)]
    plain = Engine(tiny_llama, config=EngineConfig(kv_tokens=2048))
    expected = [result.token_ids for result in plain.generate(prompts, GREEDY)]
    spec = SpecConfig(max_depth=shape[0], top_k=shape[1], max_nodes=shape[2], adaptive=False, ngram_min=1)
    engine = Engine(plain, draft=spelling.format(draft), config=EngineConfig(kv_tokens=1024, spec=spec))
    head = getattr(engine.drafter, "head", engine.drafter)
    caches = [
        cache.data.view(*cache.data.shape[:3], cache.num_blocks, cache.block_size, -1)
        for cache in (engine.runner.cache, head._cache)
    ]
    for data in caches:
        data.fill_(1e9)
    schedule, free = engine.scheduler.schedule, []

    def guarded() -> Any:
        plan = schedule()
        owned = {block for seq in engine.scheduler.running for block in seq.block_table}
        free[:] = [block for block in range(engine.blocks.num_blocks) if block not in owned]
        for data in caches:
            data[:, :, :, free] = 1e9
        return plan

    engine.scheduler.schedule = guarded  # type: ignore[method-assign]
    sequences = [engine.add(prompt, GREEDY) for prompt in prompts]
    while engine.scheduler.has_work:
        engine.step()
        assert all(bool((data[:, :, :, free] == 1e9).all()) for data in caches)
    assert [seq.output_ids for seq in sequences] == expected


@pytest.mark.parametrize("call", [1, 2, 3, 6])
def test_an_exception_in_a_proposal_harms_no_other_reader(tiny_llama: Path, draft: Path, call: int) -> None:
    """B75: states taken from a sequence by a proposal that broke must not be lost to its next one."""
    spec = SpecConfig(max_depth=3, top_k=2, max_nodes=6, adaptive=False)
    engine, spy = spied(tiny_llama, draft, spec)
    expected = Engine(engine, config=EngineConfig(kv_tokens=2048)).generate(PROMPTS, GREEDY)
    other = engine.add(PROMPTS[0], GREEDY)
    layer, calls = spy.inner._layer, []

    def broken(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == call:
            raise RuntimeError("broken")
        return layer(*args)

    spy.inner._layer = broken
    with pytest.raises(RuntimeError, match="broken"):
        engine.generate(PROMPTS[1:], GREEDY)
    engine.audit()
    while not other.is_finished:
        engine.step()
    assert other.output_ids == expected[0].token_ids
    assert other.stats.drafted > 0


def test_every_boundary_can_be_tapped(tiny_llama: Path, tmp_path: Path) -> None:
    """B01-B03: the embedding (0) and the state before the final norm (N) included."""
    for boundaries in ((0,), (4,), (0, 4), (0, 1, 2, 3, 4)):
        folder = write_draft(tiny_llama, tmp_path / "-".join(map(str, boundaries)), boundaries=boundaries)
        spec = SpecConfig(max_depth=2, top_k=2, max_nodes=4, adaptive=False)
        engine, spy = spied(tiny_llama, folder, spec)
        engine.generate(PROMPTS[:2], SamplingParams(max_tokens=6, ignore_eos=True))
        reference = Reference(tiny_llama, folder)
        tokens, states, _ = spy.seen[-1]
        expected = reference.states(tokens)[:-1]
        assert states.shape[1] == len(boundaries)
        assert (states - expected).abs().max() < STATE_TOLERANCE * max(1.0, float(expected.abs().max()))


def test_a_draft_of_another_target_is_refused(
    tiny_llama: Path, draft: Path, tiny_model_factory: Callable[..., Path]
) -> None:
    other = tiny_model_factory("llama", seed=1)
    with pytest.raises(SpecdecError, match="target"):
        Engine(other, draft=str(draft))


def test_an_unknown_draft_is_refused_with_what_is_allowed(tiny_llama: Path) -> None:
    for spelling in ("no-such-draft", "ngram+no-such-draft"):
        with pytest.raises(SpecdecError, match=r"--draft \(no-such-draft\).*ngram"):
            Engine(tiny_llama, draft=spelling)


def test_lookup_follows_the_longest_and_latest_match() -> None:
    from specdec.drafts.ngram import NgramDrafter, _continuation

    def continued(tokens: list[int], seq_id: int) -> list[int]:
        seq = SimpleNamespace(seq_id=seq_id, token_ids=tokens, spec=SpecConfig(ngram_min=1, ngram_max=3))
        request = DraftRequest(seq=seq, max_nodes=3, max_depth=3, top_k=1)  # type: ignore[arg-type]
        return drafter.propose([request])[0].token_ids

    drafter = NgramDrafter()
    text = [1, 2, 3, 9, 8, 1, 2, 3, 4, 5, 7, 2, 3]
    assert continued(text, 0) == [3, 4, 5, 7]  # 2 3 -> 4 5 7, the later match
    assert continued([*text, 4, 5, 7, 2, 3], 0) == [3, 4, 5, 7]  # 7 2 3 -> 4 5 7
    assert continued([1, 2, 3], 1) == [3]
    assert _continuation([5, 6, 5, 6], 2, 5) == [5, 6, 5, 6, 5]  # a loop is continued with its period
