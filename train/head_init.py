"""How a new head starts: its shape from the target, its weights random or from the target's last layer.

Owns both. Knows nothing of data or the loop.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specdec.config import RopeConfig
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError
from specdec.hf import decoder_layers, final_norm, num_decoder_layers, output_head
from specdec.train.config import Init, TrainConfig

RANDOM_STD = 0.02
# keys of a self-attending start: with queries equal to keys and unit-scale inputs, a row's score for itself
# is about 9 at hidden 576 and head_dim 64, which outweighs a few hundred other rows.
SELF_KEY_STD = 0.031


def head_config(
    model: Any, boundaries: tuple[int, ...], vocab: DraftVocab, config: TrainConfig
) -> Eagle3Config:
    """Shape of a head for a Hugging Face target; rotary parameters are the target's, every one of them."""
    raw = model.config.get_text_config(decoder=True).to_dict()
    heads = int(raw["num_attention_heads"])
    hidden = int(raw["hidden_size"])
    head_dim = int(raw.get("head_dim") or hidden // heads)
    return Eagle3Config(
        hidden_size=config.hidden_size or hidden,
        intermediate_size=config.intermediate_size or int(raw["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=config.num_kv_heads or int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
        rope=RopeConfig.from_dict(raw, head_dim=head_dim),
        vocab_size=vocab.vocab_size,
        draft_vocab_size=len(vocab),
        boundaries=boundaries,
        target_hidden_size=hidden,
        target_num_layers=num_decoder_layers(model),
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        attention_bias=config.attention_bias,
        qk_norm=config.qk_norm,
        lm_head=config.lm_head,
        embed=config.embed,
    )


def final_norm_weight(model: Any) -> Tensor:
    """What the final norm of a Hugging Face target multiplies a unit state by, [hidden].

    For most that is its stored weight; Gemma stores the difference from 1.
    """
    norm = final_norm(model)
    stored = _weight(norm)
    # large, so that the norm's epsilon does not count; all equal, so that the unit state is all ones.
    applied = norm(torch.full_like(stored, 1024.0).view(1, 1, -1)).flatten().float()
    shifted = 1.0 + stored.float()
    from_one = torch.allclose(applied, shifted, rtol=4 * torch.finfo(stored.dtype).eps, atol=0.0)
    return (shifted if from_one else stored.float()).cpu()


def head_weight(model: Any) -> Tensor:
    """The output head's weight [vocab, hidden] of a Hugging Face target."""
    return _weight(output_head(model))


def build_head(
    model: Any, boundaries: tuple[int, ...], vocab: DraftVocab, config: TrainConfig, tap_rms: Tensor
) -> Eagle3Head:
    """A fp32 head ready to train.

    Args:
        model: Hugging Face target.
        boundaries: taps.
        vocab: tokens the head can say.
        config: training options (seed, init, norms).
        tap_rms: root-mean-square [taps] of the target's states, to restore the scale that `fc_norm` removes.
    """
    shape = head_config(model, boundaries, vocab, config)
    weight = head_weight(model).float().cpu()
    embed = model.get_input_embeddings().weight.detach().cpu()
    head = Eagle3Head(shape, vocab, embed, weight).float()
    _random(head, config.seed)
    if shape.hidden_size != shape.target_hidden_size:
        _other_width(head, weight, config.seed)
    if config.init == "last-layer":
        _from_last_layer(head, model, tap_rms)
    if config.self_attending:
        _self_attending(head, config.init)
    return head


def _random(head: Eagle3Head, seed: int) -> None:
    """Small normal weights; norms stay at one, biases at zero, own rows of tokens the target's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 2 and not name.startswith(("lm_head", "embed_tokens")):
                parameter.normal_(0.0, RANDOM_STD, generator=generator)


@torch.no_grad()
def _other_width(head: Eagle3Head, target_rows: Tensor, seed: int) -> None:
    """Bring the target's embeddings and output rows to the head's width by one random rotation [H, Ht].

    It keeps inner products as far as the width allows, so that like tokens stay alike.
    """
    config = head.config
    size = (
        max(config.hidden_size, config.target_hidden_size),
        min(config.hidden_size, config.target_hidden_size),
    )
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    rotation: Tensor = torch.linalg.qr(noise).Q
    if config.hidden_size < config.target_hidden_size:
        rotation = rotation.T
    if config.projects_embeddings:
        head.embed_proj.weight.copy_(rotation)
    else:
        head.embed_tokens.weight.copy_(head.target_embed.float() @ rotation.T)
    if config.projects_output:
        head.out_proj.weight.copy_(rotation.T)
    else:
        head.lm_head.weight.copy_(target_rows[head.vocab.ids] @ rotation.T)


def _linear(parent: nn.Module, name: str) -> Tensor:
    found = dict(parent.named_modules()).get(name)
    if not isinstance(found, nn.Linear):
        raise SpecdecError(
            f"--init (last-layer) needs a Llama-shaped target: its last layer has no linear {name}; use "
            f"--init random"
        )
    return found.weight.detach().float().cpu()


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), "norms and heads of a target carry a weight tensor"
    return weight.detach()


def _from_last_layer(head: Eagle3Head, model: Any, tap_rms: Tensor) -> None:
    """Copy the target's last decoder layer; the feature starts as the deepest tap at its own scale."""
    layer = decoder_layers(model)[-1]
    config, hidden = head.config, head.config.hidden_size
    draft = head.midlayer
    attention = {name: _linear(layer, f"self_attn.{name}_proj") for name in ("q", "k", "v", "o")}
    blocks = {name: _linear(layer, f"mlp.{name}_proj") for name in ("gate", "up", "down")}
    with torch.no_grad():
        draft.self_attn.o_proj.weight.copy_(attention["o"])
        draft.self_attn.q_proj.weight[:, hidden:].copy_(attention["q"])
        for name, target in (("k", draft.self_attn.k_proj), ("v", draft.self_attn.v_proj)):
            source = attention[name].unflatten(0, (-1, config.head_dim))
            repeat, rest = divmod(config.num_kv_heads, source.shape[0])
            if rest:
                raise SpecdecError(
                    f"num_kv_heads ({config.num_kv_heads}) must be a multiple of the target's "
                    f"{source.shape[0]} "
                    "with --init last-layer"
                )
            target.weight[:, hidden:].copy_(source.repeat_interleave(repeat, 0).flatten(0, 1))
        if blocks["gate"].shape == draft.mlp.gate_proj.weight.shape:
            draft.mlp.gate_proj.weight.copy_(blocks["gate"])
            draft.mlp.up_proj.weight.copy_(blocks["up"])
            draft.mlp.down_proj.weight.copy_(blocks["down"])
        draft.hidden_norm.weight.copy_(_weight(layer.get_submodule("input_layernorm")))
        draft.post_attention_layernorm.weight.copy_(_weight(layer.get_submodule("post_attention_layernorm")))
        head.norm.weight.copy_(_weight(final_norm(model)))
        if config.qk_norm:
            for name, own in (("q_norm", draft.self_attn.q_norm), ("k_norm", draft.self_attn.k_norm)):
                if (norm := dict(layer.named_modules()).get(f"self_attn.{name}")) is not None:
                    own.weight.copy_(_weight(norm))
        scale = float(tap_rms[-1]) if config.fc_norm or config.norm_before_fc else 1.0
        head.fc.weight[:, -hidden:] += scale * torch.eye(hidden)


def _self_attending(head: Eagle3Head, init: Init) -> None:
    """Copy each query head's weights from its key head, so that a row first attends to itself.

    A token's embedding reaches the output only through the values, so a head that looks at itself learns
    first.
    """
    attention, config = head.midlayer.self_attn, head.config
    if init != "last-layer":
        with torch.no_grad():
            attention.k_proj.weight.mul_(SELF_KEY_STD / RANDOM_STD)
    keys = attention.k_proj.weight.detach().unflatten(0, (config.num_kv_heads, config.head_dim))
    with torch.no_grad():
        attention.q_proj.weight.copy_(
            keys.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten(0, 1)
        )
