"""An EAGLE-3 head's decoder layer through the kernels, over rows in a paged draft cache.

Owns the head's weights as serving on a device reads them: projections fused, norms as vectors, all in the
target's dtype. The mathematics is `eagle3`'s. Nothing here reads a value on the host.
Shapes: R rows of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafter import TargetView
from specdec.drafts.eagle3 import Eagle3Head
from specdec.kernels.device_batch import DeviceBatch
from specdec.kernels.operations import Operations
from specdec.models.layers import Linear
from specdec.models.rope import RotaryEmbedding
from specdec.paged_kv import PagedKVCache


class DeviceLayer:
    """The head of one draft on the target's device.

    Args:
        head: the loaded head; its tensors are copied.
        target: whose device, dtype, blocks and embeddings are used.
        ops: the kernels.
    """

    def __init__(self, head: Eagle3Head, target: TargetView, ops: Operations) -> None:
        self.config, self.ops = head.config, ops
        self._dtype, self._device = target.dtype, target.device
        shared = self.config.embed == "target" and not self.config.projects_embeddings
        self._embed_tokens = target.embed_tokens if shared else self._vector(head.embedding_rows())
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        self._fc = self._linear(head.fc.weight)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biased = self.config.attention_bias
        self._qkv = self._linear(
            *(projection.weight for projection in projections),
            bias=torch.cat([projection.bias for projection in projections]) if biased else None,
        )
        self._out = self._linear(attention.o_proj.weight, bias=attention.o_proj.bias if biased else None)
        self._q_norm = self._vector(attention.q_norm.weight) if self.config.qk_norm else None
        self._k_norm = self._vector(attention.k_norm.weight) if self.config.qk_norm else None
        self._gate_up = self._linear(mlp.gate_proj.weight, mlp.up_proj.weight)
        self._down = self._linear(mlp.down_proj.weight)
        self._output = self._linear(head.output_rows())
        self._embed_norm = self._vector(layer.input_layernorm.weight)
        self._hidden_norm = self._vector(layer.hidden_norm.weight)
        self._post_norm = self._vector(layer.post_attention_layernorm.weight)
        self._final_norm = self._vector(head.norm.weight)
        self._tap_norms = (
            [self._vector(norm.get_parameter("weight")) for norm in head.fc_norm]
            if self.config.fc_norm
            else []
        )
        self._flat_norm = self._vector(head.input_norm.weight) if self.config.norm_before_fc else None
        context = self.config.rope.max_position_embeddings
        # as in training: the head's own context, whatever part of it the engine uses
        rope = RotaryEmbedding(self.config.rope, device=target.device)
        rows = min(context, target.max_model_len)
        self._cos, self._sin = rope.cos_sin(torch.arange(rows, device=target.device), rows)
        self.cache = PagedKVCache(
            num_layers=1,
            num_blocks=target.num_blocks,
            block_size=target.block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=target.dtype,
            device=target.device,
        )

    def _linear(self, *parts: Tensor, bias: Tensor | None = None) -> Linear:
        weight = self._vector(torch.cat([part.detach() for part in parts]))
        return Linear(weight, None if bias is None else self._vector(bias))

    def _vector(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, self._dtype).contiguous()

    def fuse(self, states: Tensor) -> Tensor:
        """Features [R, hidden] of taps [R, taps, target_hidden]."""
        eps = self.config.rms_norm_eps
        if self._tap_norms:
            parts = [self.ops.rms_norm(states[:, tap], norm, eps) for tap, norm in enumerate(self._tap_norms)]
            return self._fc(torch.cat(parts, dim=-1))
        flat = states.flatten(1)
        return self._fc(flat if self._flat_norm is None else self.ops.rms_norm(flat, self._flat_norm, eps))

    def __call__(self, features: Tensor, token_ids: Tensor, batch: DeviceBatch) -> tuple[Tensor, Tensor]:
        """Run the layer on R rows and store their keys and values.

        Args:
            features: fused states or fed-back features [R, hidden].
            token_ids: the token after each row's, int64 [R].
            batch: where the rows stand and what they see.

        Returns:
            What the next drafted row is fed with, and what the output head reads, each [R, hidden].
        """
        config, ops, eps = self.config, self.ops, self.config.rms_norm_eps
        rows, heads, kv_heads = features.shape[0], config.num_heads, config.num_kv_heads
        embeds = self._embed_tokens[token_ids].to(self._dtype)
        normed = ops.rms_norm(features, self._hidden_norm, eps)
        x = torch.cat((ops.rms_norm(embeds, self._embed_norm, eps), normed), dim=-1)
        # the residual sums are made in place
        residual = normed if config.norm_before_residual else features.clone()
        key_cache, value_cache = self.cache.layer(0)
        query = ops.rope_store(
            self._qkv(x).view(rows, heads + 2 * kv_heads, config.head_dim),
            self._cos,
            self._sin,
            batch.positions,
            key_cache,
            value_cache,
            batch.slots,
            num_heads=heads,
            q_norm=self._q_norm,
            k_norm=self._k_norm,
            eps=eps,
        )
        attended = ops.tree_attention(query, key_cache, value_cache, batch)
        inner = ops.silu_mul(
            self._gate_up(ops.add_rms_norm(self._out(attended), residual, self._post_norm, eps))
        )
        output = ops.add_rms_norm(self._down(inner), residual, self._final_norm, eps)
        return (output if config.norm_output else residual), output

    def logits(self, output: Tensor) -> Tensor:
        """Draft logits, fp32 [R, draft_vocab]."""
        return self._output(output).float()
