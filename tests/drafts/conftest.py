"""A small stored head with its target, and a forward pass of exported folders written only for these tests.

The forward pass shares nothing with specdec: it reads config.json and model.safetensors as the named engine
does, layer ids included, so that an export that names another layer or flag gives other logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.config import RopeConfig
from specdec.drafts.checkpoint import STORAGE_DTYPES, DraftContract, StoredDraft, expected_shapes
from specdec.drafts.config import Eagle3Config
from specdec.drafts.target_facts import TargetFacts
from specdec.drafts.vocab import DraftVocab

VOCAB, HIDDEN, LAYERS, ROWS = 40, 16, 8, 7
DRAFT_IDS = [0, 3, 4, 9, 12, 39]
# what the EAGLE repository captures of eight layers
DEFAULT_BOUNDARIES = (2, 4, 5)


@pytest.fixture
def facts() -> TargetFacts:
    """A target of eight layers in bfloat16; its weights need not exist."""
    generator = torch.Generator().manual_seed(5)
    embed, head = (torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    return TargetFacts(
        served_as="org/target",
        folder=Path("target"),
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        num_layers=LAYERS,
        bos_token_id=1,
        eos_token_id=2,
        fingerprint="f" * 64,
        embed=embed,
        lm_head=head,
    )


@pytest.fixture
def make_stored() -> Callable[..., StoredDraft]:
    """Call with overrides of the config, and dtype: a stored head that every format can hold."""

    def make(dtype: str = "float16", **overrides: Any) -> StoredDraft:
        config = Eagle3Config(
            hidden_size=HIDDEN,
            intermediate_size=24,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            rms_norm_eps=1e-6,
            rope=RopeConfig(rope_type="default", theta=12345.0, head_dim=6, max_position_embeddings=512),
            vocab_size=VOCAB,
            draft_vocab_size=len(DRAFT_IDS),
            boundaries=DEFAULT_BOUNDARIES,
            target_hidden_size=HIDDEN,
            target_num_layers=LAYERS,
            fc_norm=False,
            norm_output=False,
        )
        config = replace(config, **overrides)
        generator = torch.Generator().manual_seed(3)
        tensors: dict[str, Tensor] = {}
        for name, shape in expected_shapes(config).items():
            noise = torch.randn(shape, generator=generator)
            tensors[name] = (0.3 * noise if noise.dim() > 1 else 1 + 0.3 * noise).to(STORAGE_DTYPES[dtype])
        if config.reduced:
            vocab = DraftVocab(torch.tensor(DRAFT_IDS), VOCAB)
            tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
        contract = DraftContract(target_fingerprint="f" * 64, template_hash="t" * 64, training={"step": 3})
        return StoredDraft(config=config, contract=contract, tensors=tensors)

    return make


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotated(x: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotary positions 0.. of x [rows, heads, d]; default and linear only."""
    dim, scale = x.shape[-1], config.get("rope_scaling") or {"factor": 1.0}
    frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim) / scale["factor"]
    angles = torch.outer(torch.arange(len(x)), frequencies).repeat(1, 2)[:, None]
    turned = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    return x * angles.cos() + turned * angles.sin()


def _engine_boundaries(reader: str, config: dict[str, Any]) -> list[int]:
    if reader == "eagle":
        return [2, LAYERS // 2, LAYERS - 3]
    if reader == "sglang":
        return [value + 1 for value in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return list(config["eagle_aux_hidden_state_layer_ids"])


def reference_logits(
    folder: Path, reader: str, states: Tensor, tokens: Tensor, target: TargetFacts
) -> Tensor:
    """Logits over the target's vocabulary for true rows and one drafted row, [rows + 1, vocab].

    Args:
        folder: the export.
        reader: who reads it.
        states: of every boundary [LAYERS + 1, rows, hidden].
        tokens: the token after each row, and the drafted one after them [rows + 1].
        target: whose embeddings are used where the folder has none.
    """
    config = json.loads((folder / "config.json").read_text())
    config = {**config.get("transformer_layer_config", {}), **config}
    w = {
        name.replace("layers.0.", "midlayer."): t.float()
        for name, t in load_file(folder / "model.safetensors").items()
    }
    eps, d = config["rms_norm_eps"], config["head_dim"]
    taps = [states[boundary] for boundary in _engine_boundaries(reader, config)]
    if config["fc_norm"]:
        taps = [_rms(tap, w[f"fc_norm.{i}.weight"], eps) for i, tap in enumerate(taps)]
    fused = torch.cat(taps, -1)
    if config["norm_before_fc"]:
        fused = _rms(fused, w["input_norm.weight"], eps)
    g = fused @ w["fc.weight"].T
    embeds = w.get("embed_tokens.weight", target.embed.float())[tokens]

    def project(name: str, x: Tensor) -> Tensor:
        return x @ w[f"midlayer.self_attn.{name}_proj.weight"].T + w.get(
            f"midlayer.self_attn.{name}_proj.bias", 0
        )

    def layer(g: Tensor) -> Tensor:
        normed = _rms(g, w["midlayer.hidden_norm.weight"], eps)
        x = torch.cat((_rms(embeds[: len(g)], w["midlayer.input_layernorm.weight"], eps), normed), -1)
        q, k, v = (project(name, x).unflatten(-1, (-1, d)) for name in "qkv")
        if config["model_type"] == "qwen3":
            q, k = (
                _rms(rows, w[f"midlayer.self_attn.{name}_norm.weight"], eps)
                for name, rows in (("q", q), ("k", k))
            )
        groups = q.shape[1] // k.shape[1]
        q, k = _rotated(q, config), _rotated(k, config).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
        scores = scores.masked_fill(torch.ones(len(g), len(g)).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(groups, 1)).flatten(1)
        y = (normed if config["norm_before_residual"] else g) + project("o", mixed)
        inner = _rms(y, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up = (inner @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return y + (torch.nn.functional.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T

    z = layer(g)
    fed_back = _rms(z[-1:], w["norm.weight"], eps) if config["norm_output"] else z[-1:]
    z = layer(torch.cat((g, fed_back)))
    found = _rms(z, w["norm.weight"], eps) @ w["lm_head.weight"].T
    ids = torch.arange(found.shape[-1]) + w.get("d2t", torch.zeros(1)).long()
    return torch.full((len(z), config["vocab_size"]), float("-inf")).index_copy(1, ids, found)


@pytest.fixture
def engine_logits(facts: TargetFacts) -> Callable[[Path, str], Tensor]:
    """Call with (folder, reader): the logits of the reader's engine for fixed states and tokens."""
    generator = torch.Generator().manual_seed(9)
    states = torch.randn(LAYERS + 1, ROWS, HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (ROWS + 1,), generator=generator)
    return lambda folder, reader: reference_logits(folder, reader, states, tokens, facts)


@pytest.fixture
def our_logits(facts: TargetFacts) -> Callable[[StoredDraft], Tensor]:
    """Call with a stored draft: the logits of our own head for the same states and tokens."""
    from specdec.drafts.eagle3 import Eagle3Head
    from specdec.models.rope import apply_rope

    def compute(draft: StoredDraft) -> Tensor:
        generator = torch.Generator().manual_seed(9)
        states = torch.randn(LAYERS + 1, ROWS, HIDDEN, generator=generator)
        tokens = torch.randint(0, VOCAB, (ROWS + 1,), generator=generator)
        config, weights = draft.config, dict(draft.tensors)
        vocab = DraftVocab.full(VOCAB)
        if config.reduced:
            vocab = DraftVocab.from_d2t(weights.pop("d2t"), weights.pop("t2d"), VOCAB)
        head = Eagle3Head(config, vocab, facts.embed.float(), facts.lm_head.float())
        head.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        with torch.no_grad():
            g = head.fuse(states[list(config.boundaries)].transpose(0, 1))
            for _ in range(2):
                rows, groups = len(g), config.num_heads // config.num_kv_heads
                q, k, v, residual = head.qkv(head.embed(tokens[:rows]), g)
                cos, sin = head.rope.cos_sin(torch.arange(rows), rows)
                q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin).repeat_interleave(groups, 1)
                mixed = torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(0, 1),
                    k.transpose(0, 1),
                    v.repeat_interleave(groups, 1).transpose(0, 1),
                    is_causal=True,
                )
                z = head.finish(mixed.transpose(0, 1).flatten(1), residual)
                g = torch.cat((g, head.feedback(z[-1:])))
            found = head.logits(z)
        return torch.full((rows, VOCAB), float("-inf")).index_copy(1, vocab.ids, found)

    return compute
