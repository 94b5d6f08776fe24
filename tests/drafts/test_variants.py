"""Every variant of a head is served as its formulas say, on both paths, and changes no token of the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.config import EngineConfig, RopeConfig, SpecConfig
from specdec.drafter import DraftRequest
from specdec.drafts.checkpoint import expected_shapes, load_draft, read_stored
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.eagle3_device import DeviceEagle3Drafter
from specdec.drafts.eagle3_drafter import Eagle3Drafter
from specdec.drafts.variants import VARIANTS
from specdec.engine import Engine
from specdec.hf import BoundaryTap, load_hf_model
from specdec.models.rope import apply_rope
from specdec.sequence import SamplingParams
from specdec.tree import DraftTree

DEPTH = 4
CHAIN = SpecConfig(max_depth=DEPTH, top_k=1, max_nodes=DEPTH, adaptive=False)
TREE = SpecConfig(max_depth=3, top_k=3, max_nodes=8, adaptive=False)
PROMPTS = [[7, 3, 9, 20, 5], [100, 3, 100, 3, 100, 3, 8, 9, 10, 11, 12]]
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)


def _rope(rope_type: str, **params: Any) -> RopeConfig:
    return RopeConfig(rope_type=rope_type, theta=5e4, head_dim=24, max_position_embeddings=256, params=params)


HEADS: dict[str, dict[str, Any]] = {
    "eagle-3": {"fc_norm": False, "norm_output": False},
    "norm-before-fc-and-residual": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
    "biases": {"attention_bias": True},
    "qk-norm": {"qk_norm": True},
    "own-embeddings": {"embed": "own", "lm_head": "own"},
    "narrow-with-projections": {"hidden_size": 40},
    "wide-with-all-its-own": {"hidden_size": 72, "embed": "own", "lm_head": "own", "qk_norm": True},
    "narrow-own-rows": {"hidden_size": 40, "lm_head": "own", "attention_bias": True},
    "one-tap": {"boundaries": (4,)},
    "five-taps": {"boundaries": (0, 1, 2, 3, 4)},
    "linear": {"rope": _rope("linear", factor=4.0)},
    "dynamic": {"rope": _rope("dynamic", factor=2.0)},
    "llama3": {
        "rope": _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
    },
    "yarn": {"rope": _rope("yarn", factor=4.0, original_max_position_embeddings=64)},
    "longrope": {
        "rope": _rope(
            "longrope",
            short_factor=[1.0] * 12,
            long_factor=[1.5] * 12,
            original_max_position_embeddings=64,
        )
    },
}


@torch.no_grad()
def chain(head: Eagle3Head, states: Tensor, tokens: list[int], depth: int) -> list[int]:
    """Greedy drafts after `tokens` from the head's own formulas, every row recomputed for each."""
    config, features, read, found = head.config, head.fuse(states), tokens[1:], []
    groups = config.num_heads // config.num_kv_heads
    for _ in range(depth):
        rows = len(features)
        q, k, v, residual = head.qkv(head.embed(torch.tensor(read)), features)
        cos, sin = head.rope.cos_sin(torch.arange(rows), rows)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        weights = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1)).flatten(1)
        z = head.finish(mixed, residual)[-1:]
        token = int(head.vocab.ids[head.logits(z).argmax()])
        found.append(token)
        features, read = torch.cat((features, head.feedback(z))), [*read, token]
    return found


@pytest.fixture(scope="module")
def plain_texts(tiny_llama: Path) -> list[list[int]]:
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=512))
    return [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load_hf_model(tiny_llama)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [(name, "auto") for name in HEADS]
    # rotary tables are made alike for both paths
    + [(name, "reference") for name, head in HEADS.items() if "rope" not in head],
)
def test_a_variant_is_served_as_its_formulas_say_and_the_text_stays(
    name: str,
    kernels: str,
    tiny_llama: Path,
    tmp_path: Path,
    random_draft: Callable[..., Path],
    model: Any,
    plain_texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every drafted token of a chain as the formulas give it, and the text, in chains and in trees."""
    folder = random_draft(tiny_llama, tmp_path / "head", **HEADS[name])
    weights = load_file(tiny_llama / "model.safetensors")
    head = load_draft(folder, weights["model.embed_tokens.weight"], weights["lm_head.weight"]).head
    proposed: list[tuple[list[int], DraftTree]] = []
    drafter = Eagle3Drafter if kernels == "auto" else DeviceEagle3Drafter
    propose = drafter.propose

    def recorded(self: Any, requests: list[DraftRequest]) -> list[DraftTree]:
        trees = propose(self, requests)
        proposed.extend((list(one.seq.token_ids), tree) for one, tree in zip(requests, trees, strict=True))
        return trees

    monkeypatch.setattr(drafter, "propose", recorded)
    for spec in (TREE, CHAIN):
        proposed.clear()
        config = EngineConfig(spec=spec, kv_tokens=512, kernels=kernels, draft_weights="plain")
        results = Engine(tiny_llama, draft=folder, config=config).generate(PROMPTS, GREEDY)
        assert [result.token_ids for result in results] == plain_texts
    # later steps of the device path grow theirs on the device, through the same layer
    assert len(proposed) >= len(PROMPTS)
    for tokens, tree in proposed:
        with BoundaryTap(model, head.config.boundaries) as tap, torch.no_grad():
            model(input_ids=torch.tensor([tokens[:-1]]))
            states = torch.stack([tap.states[b][0] for b in head.config.boundaries], 1)
        drafted = tree.token_ids[1:]
        assert drafted == chain(head, states, tokens, len(drafted))


def test_every_variant_has_a_head_here(tiny_llama: Path, tmp_path: Path, random_draft: Any) -> None:
    """The list of variants is complete: what a folder may hold beyond plain EAGLE-3 is named in it."""
    found: set[str] = set()
    names: set[str] = set()
    for name, overrides in HEADS.items():
        stored = read_stored(random_draft(tiny_llama, tmp_path / name, **overrides))
        found |= {variant for variant, one in VARIANTS.items() if one.present(stored.config)}
        names |= {key.split(".")[0] for key in expected_shapes(stored.config)}
    assert found == VARIANTS.keys()
    plain = {"fc", "midlayer", "norm", "lm_head", "d2t", "t2d"}
    assert names - plain == {"fc_norm", "input_norm", "embed_tokens", "embed_proj", "out_proj"}
