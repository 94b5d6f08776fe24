"""The EAGLE-3 draft head: one decoder layer over fused target states.

Owns the head's mathematics, once, for training and serving: `fuse`, `qkv`, `finish`, `feedback`, `logits`.
Does not know attention (a paged cache when serving, an unrolled graph in training), rotary positions, trees
or losses. Module names are the on-disk tensor names. Source: EAGLE-3 (arXiv:2503.01840); per-tap norms and
post-norm feedback are EAGLE-3.1 (arXiv:2605.09992).

    g   = fc([norm_1(a_1); ...; norm_K(a_K)])                     true rows only
    x   = [input_layernorm(embed(token)); hidden_norm(g)]         embedding first, width 2H
    y   = g + o_proj(attention(x));  z = y + mlp(post_attention_layernorm(y))
    logits = lm_head(norm(z));  next row's g = norm(z) if norm_output else z
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from specdec.drafts.config import Eagle3Config
from specdec.drafts.vocab import DraftVocab
from specdec.models.rope import RotaryEmbedding


class RMSNorm(nn.Module):
    """Root-mean-square norm with the statistics in at least fp32, as Hugging Face Llama computes it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x [..., size]."""
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class DraftAttention(nn.Module):
    """Projections of the draft's attention; the attention itself belongs to the caller."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, kv, bias = 2 * config.hidden_size, config.num_kv_heads * config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv, bias=bias)
        self.v_proj = nn.Linear(width, kv, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class DraftMLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Output [..., hidden] of x [..., hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Head(nn.Module):
    """Draft head over the taps of one target.

    The target's embeddings when `embed` is "target", and its output rows when `lm_head` is "target_rows", are
    buffers outside the state dict: they are the target's and are never saved with the head. In a head of
    another width `embed_proj` and `out_proj` lead to and from them.

    Args:
        config: shape and flags.
        vocab: tokens the head can say.
        target_embed: the target's embeddings [vocab, target_hidden].
        target_lm_head: the target's output head [vocab, target_hidden]; only the rows of `vocab` are kept.
    """

    target_embed: Tensor
    head_rows: Tensor

    def __init__(
        self, config: Eagle3Config, vocab: DraftVocab, target_embed: Tensor, target_lm_head: Tensor
    ) -> None:
        super().__init__()
        assert len(vocab) == config.draft_vocab_size, "the vocabulary must have the configured size"
        shape = (config.vocab_size, config.target_hidden_size)
        for name, tensor in (("embeddings", target_embed), ("output head", target_lm_head)):
            assert tensor.shape == shape, f"target {name} {tuple(tensor.shape)} must have shape {shape}"
        self.config = config
        self.vocab = vocab
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.boundaries
            )
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_taps * config.target_hidden_size, config.rms_norm_eps)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rows = target_lm_head[vocab.ids.to(target_lm_head.device)]
        if config.lm_head == "own":
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            if config.hidden_size == config.target_hidden_size:
                with torch.no_grad():
                    self.lm_head.weight.copy_(rows)
        else:
            self.register_buffer("head_rows", rows.detach().clone(), persistent=False)
        if config.projects_output:
            self.out_proj = nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)
        self.register_buffer("target_embed", target_embed.detach(), persistent=False)
        if config.embed == "own":
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            if config.hidden_size == config.target_hidden_size:
                with torch.no_grad():
                    self.embed_tokens.weight.copy_(target_embed)
        if config.projects_embeddings:
            self.embed_proj = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)
        self.rope = RotaryEmbedding(config.rope)

    @property
    def head_weight(self) -> Tensor:
        """Rows that `normed` is multiplied by: own [draft_vocab, hidden] or [draft_vocab, target_hidden]."""
        return self.lm_head.weight if self.config.lm_head == "own" else self.head_rows

    @torch.no_grad()
    def output_rows(self) -> Tensor:
        """Rows that read the final norm itself [draft_vocab, hidden], any projection multiplied in."""
        rows = self.head_weight.detach()
        return rows.float() @ self.out_proj.weight.float() if self.config.projects_output else rows

    @torch.no_grad()
    def embedding_rows(self) -> Tensor:
        """What a token contributes [vocab, hidden], any projection multiplied in."""
        if self.config.embed == "own":
            return self.embed_tokens.weight.detach()
        rows = self.target_embed
        return rows.float() @ self.embed_proj.weight.float().T if self.config.projects_embeddings else rows

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [tokens, hidden] of target ids [tokens], in the head's dtype."""
        if self.config.embed == "own":
            return self.embed_tokens(token_ids)
        rows = self.target_embed[token_ids].to(self.fc.weight.dtype)
        return self.embed_proj(rows) if self.config.projects_embeddings else rows

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse taps [..., taps, target_hidden], ascending boundaries, into features [..., hidden]."""
        return self.fc(self.tap_rows(states))

    def tap_rows(self, states: Tensor) -> Tensor:
        """What `fc` reads of taps [..., taps, target_hidden]: normed as configured, side by side."""
        if self.config.fc_norm:
            parts = [norm(states[..., tap, :]) for tap, norm in enumerate(self.fc_norm)]
            return torch.cat(parts, dim=-1)
        flat = states.flatten(-2)
        return self.input_norm(flat) if self.config.norm_before_fc else flat

    def attention_input(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Layer input [tokens, 2 hidden] and residual [tokens, hidden]."""
        normed = self.midlayer.hidden_norm(features)
        x = torch.cat((self.midlayer.input_layernorm(embeds).to(normed.dtype), normed), dim=-1)
        return x, normed if self.config.norm_before_residual else features

    def queries(self, x: Tensor) -> Tensor:
        """Queries [tokens, heads, head_dim], not yet rotated, of a layer input."""
        attention = self.midlayer.self_attn
        queries = attention.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        return attention.q_norm(queries) if self.config.qk_norm else queries

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, head_dim], keys not yet rotated, of a layer input."""
        attention, split = self.midlayer.self_attn, (-1, self.config.head_dim)
        keys = attention.k_proj(x).unflatten(-1, split)
        keys = attention.k_norm(keys) if self.config.qk_norm else keys
        return keys, attention.v_proj(x).unflatten(-1, split)

    def qkv(self, embeds: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values (heads split, not rotated) and the residual, for a paged runtime.

        Args:
            embeds: embeddings of token k+1, [tokens, hidden].
            features: fused state k or fed-back feature, [tokens, hidden].
        """
        x, residual = self.attention_input(embeds, features)
        keys, values = self.keys_values(x)
        return self.queries(x), keys, values, residual

    def finish(self, attention: Tensor, residual: Tensor) -> Tensor:
        """Layer output [tokens, hidden] from attention [tokens, heads * head_dim] and the residual."""
        y = residual + self.midlayer.self_attn.o_proj(attention)
        return y + self.midlayer.mlp(self.midlayer.post_attention_layernorm(y))

    def normed(self, z: Tensor) -> Tensor:
        """The layer output as the rows of `head_weight` read it."""
        normed = self.norm(z)
        return self.out_proj(normed) if self.config.projects_output else normed

    def feedback(self, z: Tensor) -> Tensor:
        """The feature of the next drafted row."""
        return self.norm(z) if self.config.norm_output else z

    def logits(self, z: Tensor) -> Tensor:
        """Draft logits [tokens, draft_vocab]."""
        return functional.linear(self.normed(z), self.head_weight.to(z.dtype))
