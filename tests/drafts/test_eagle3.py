"""The head's mathematics against an independent forward, and the shapes of its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from specdec.config import RopeConfig
from specdec.drafts.checkpoint import expected_shapes
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError

VOCAB = 50


def make_config(**overrides: Any) -> Eagle3Config:
    head_dim = overrides.get("head_dim", 24)
    config = Eagle3Config(
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(rope_type="default", theta=1e5, head_dim=head_dim, max_position_embeddings=128),
        vocab_size=VOCAB,
        draft_vocab_size=10,
        boundaries=(2, 5),
        target_hidden_size=64,
        target_num_layers=6,
    )
    return replace(config, **overrides)


def make_head(**overrides: Any) -> Eagle3Head:
    config = make_config(**overrides)
    torch.manual_seed(0)
    step = VOCAB // config.draft_vocab_size
    vocab = DraftVocab(torch.arange(config.draft_vocab_size) * step, VOCAB)
    head = Eagle3Head(config, vocab, torch.randn(VOCAB, 64), torch.randn(VOCAB, 64))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    return head


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def reference(head: Eagle3Head, states: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and next feature of one first row, written from the formulas; attending to itself."""
    w, config = dict(head.state_dict()), head.config
    taps = [states[i] for i in range(config.num_taps)]
    if config.fc_norm:
        taps = [_rms(tap, w[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
    flat = torch.cat(taps)
    if config.norm_before_fc:
        flat = _rms(flat, w["input_norm.weight"])
    g = w["fc.weight"] @ flat
    normed = _rms(g, w["midlayer.hidden_norm.weight"])
    x = torch.cat((_rms(head.target_embed[token], w["midlayer.input_layernorm.weight"]), normed))
    value = (w["midlayer.self_attn.v_proj.weight"] @ x).view(config.num_kv_heads, config.head_dim)
    group = config.num_heads // config.num_kv_heads
    attention = torch.cat([value[index // group] for index in range(config.num_heads)])
    y = (normed if config.norm_before_residual else g) + w["midlayer.self_attn.o_proj.weight"] @ attention
    h = _rms(y, w["midlayer.post_attention_layernorm.weight"])
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ h, w["midlayer.mlp.up_proj.weight"] @ h
    z = y + w["midlayer.mlp.down_proj.weight"] @ (functional.silu(gate) * up)
    out = _rms(z, w["norm.weight"])
    return head.head_weight @ out, out if config.norm_output else z


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fc_norm": False, "norm_output": False},
        {"fc_norm": False, "norm_before_fc": True},
        {"norm_before_residual": True},
        {"lm_head": "own"},
    ],
)
@torch.no_grad()
def test_the_head_equals_an_independent_forward(flags: dict[str, Any]) -> None:
    """Catches a flag that is loaded and never applied (vllm PR #43482) or applied the other way round."""
    head = make_head(**flags)
    states, token = torch.randn(2, 64), torch.tensor(17)
    feature = head.fuse(states[None])
    _, _, value, residual = head.qkv(head.embed(token[None]), feature)
    attention = value.repeat_interleave(2, dim=1).flatten(1)
    z = head.finish(attention, residual)
    logits, following = reference(head, states, token)
    assert (head.logits(z)[0] - logits).abs().max() < 1e-4
    assert (head.feedback(z)[0] - following).abs().max() < 1e-4


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_projections_follow_head_dim_and_take_both_halves(kv_heads: int) -> None:
    """Catches head_dim computed as hidden / heads, and a first layer of width H: EAGLE #315, DeepSpec #44."""
    head = make_head(num_kv_heads=kv_heads)
    attention = head.midlayer.self_attn
    assert tuple(attention.q_proj.weight.shape) == (96, 128)
    assert tuple(attention.k_proj.weight.shape) == (24 * kv_heads, 128)
    assert tuple(attention.o_proj.weight.shape) == (64, 96)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    assert shapes == {k: v for k, v in expected_shapes(head.config).items() if k not in ("d2t", "t2d")}


def test_the_targets_tensors_are_never_part_of_the_state() -> None:
    assert not [name for name in make_head().state_dict() if "embed" in name or "head" in name]
    assert "lm_head.weight" in make_head(lm_head="own").state_dict()


def test_borrowed_rows_are_the_targets_rows_of_the_draft_ids() -> None:
    config = make_config()
    rows = torch.randn(VOCAB, 64)
    vocab = DraftVocab(torch.tensor([0, 3, 4, 9, 11, 20, 30, 40, 48, 49]), VOCAB)
    head = Eagle3Head(config, vocab, torch.randn(VOCAB, 64), rows)
    assert torch.equal(head.head_weight, rows[vocab.ids])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"boundaries": (5, 2)}, "boundaries"),
        ({"boundaries": (2, 2)}, "boundaries"),
        ({"boundaries": (2, 7)}, r"0\.\.6"),
        ({"boundaries": ()}, "boundaries"),
        ({"num_kv_heads": 3}, "num_heads \\(4\\) must be a multiple of num_kv_heads \\(3\\)"),
        ({"norm_before_fc": True}, "exclude each other"),
        ({"embed": "tied"}, "embed"),
        ({"target_hidden_size": 0}, "target_hidden_size"),
        ({"draft_vocab_size": 51}, "draft_vocab_size \\(51\\)"),
        ({"lm_head": "tied"}, "lm_head"),
        ({"hidden_size": 64.0}, "hidden_size"),
    ],
)
def test_a_head_that_cannot_be_is_refused_by_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecdecError, match=words):
        make_config(**change)
