"""One config-driven decoder for Llama, Mistral, Qwen2 and Qwen3 targets over paged KV.

Owns the weights and the forward pass of a ragged batch; knows nothing of sequences, trees or
sampling. Captures taps (boundary b: the residual stream after b layers) on the way.
Shapes: T rows of the batch (all sequences' new tokens, one after the other).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention import SequenceAttention
from specdec.config import ModelConfig
from specdec.errors import SpecdecError
from specdec.kernels import paged_attention, store_kv
from specdec.kernels.invariant import invariant_attention
from specdec.models.fixed_rows import FixedRowLinear
from specdec.models.layer_loop import LayerLoop, LayerWeights, attention_lists
from specdec.models.layers import (
    ROW_MULTIPLE,
    SLOW_BF16,
    Linear,
    Storage,
    fits_fp16,
    packing_available,
    rms_norm,
    row_multiple,
)
from specdec.models.matrices import scripted
from specdec.models.rope import RotaryEmbedding, apply_rope
from specdec.models.weights import WeightSource, open_weights, stacked, stacked_bias
from specdec.paged_kv import PagedKVCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardBatch:
    """Input of one forward pass.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], absolute rotary positions.
        longest: one more than the largest position.
        first_slot: the first of `slots` if they are known to be consecutive.
        slots: int64 [rows to store]; padding rows come last and have none.
        attention: one entry per sequence, in row order.
    """

    token_ids: Tensor
    positions: Tensor
    longest: int
    slots: Tensor
    attention: list[SequenceAttention]
    first_slot: int | None = None


class DecoderLayer:
    """Attention and MLP of one layer, projections fused."""

    def __init__(self, config: ModelConfig, reader: WeightSource, index: int, make: LinearFactory) -> None:
        self.config = config
        prefix = f"model.layers.{index}."
        hidden, dim = config.hidden_size, config.head_dim
        rows = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        qkv = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
        mlp = [f"{prefix}mlp.{part}_proj" for part in ("gate", "up")]
        inner = config.intermediate_size
        self.qkv = make(
            stacked(reader, [f"{name}.weight" for name in qkv], rows, hidden),
            stacked_bias(reader, [f"{name}.bias" for name in qkv], rows) if config.qkv_bias else None,
        )
        out = f"{prefix}self_attn.o_proj"
        self.out = make(
            reader.get(f"{out}.weight", (hidden, rows[0])),
            reader.get(f"{out}.bias", (hidden,)) if config.out_bias else None,
        )
        self.gate_up = make(
            stacked(reader, [f"{name}.weight" for name in mlp], [inner, inner], hidden),
            stacked_bias(reader, [f"{name}.bias" for name in mlp], [inner, inner])
            if config.mlp_bias
            else None,
        )
        down = f"{prefix}mlp.down_proj"
        self.down = make(
            reader.get(f"{down}.weight", (hidden, inner)),
            reader.get(f"{down}.bias", (hidden,)) if config.mlp_bias else None,
        )
        self.input_norm = make.vector(reader.get(f"{prefix}input_layernorm.weight", (hidden,)))
        self.post_norm = make.vector(reader.get(f"{prefix}post_attention_layernorm.weight", (hidden,)))
        self.window = config.sliding_windows[index]
        self.attend = invariant_attention if make.deterministic else paged_attention
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = make.vector(reader.get(f"{prefix}self_attn.q_norm.weight", (dim,)))
            self.k_norm = make.vector(reader.get(f"{prefix}self_attn.k_norm.weight", (dim,)))

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, key_cache: Tensor, value_cache: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """X [T, hidden] -> the residual stream after this layer [T, hidden]."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = x.shape[0]
        qkv = self.qkv(rms_norm(x, self.input_norm, config.rms_norm_eps)).view(
            rows, heads + 2 * kv_heads, dim
        )
        rotating = qkv[:, : heads + kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            query = rms_norm(qkv[:, :heads], self.q_norm, config.rms_norm_eps)
            key = rms_norm(qkv[:, heads : heads + kv_heads], self.k_norm, config.rms_norm_eps)
            rotating = torch.cat((query, key), dim=1)
        rotated = apply_rope(rotating, cos, sin)
        store_kv(rotated[:, heads:], qkv[:, heads + kv_heads :], key_cache, value_cache, batch.slots)
        attended = self.attend(
            rotated[:, :heads], key_cache, value_cache, batch.attention, window=self.window
        )
        x = x + self.out(attended)
        gate, up = self.gate_up(rms_norm(x, self.post_norm, config.rms_norm_eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


# what a setting of `weights` wants of a model in fp32
_STORAGES = {
    "auto": Storage.FP16,
    "plain": Storage.PLAIN,
    "fp16-packed": Storage.FP16,
    "bf16-packed": Storage.BF16,
    "int8": Storage.INT8,
}


class LinearFactory:
    """Chooses each matrix's storage: packed fp16 where exact and available, else the compute dtype.

    A bf16 model on a processor that multiplies bf16 numbers is packed as well, with the same numbers.
    `deterministic` gives every product the same number of rows (`specdec.models.fixed_rows`).
    """

    def __init__(
        self, dtype: torch.dtype, device: str, *, weights: str = "auto", deterministic: bool = False
    ) -> None:
        self.dtype, self.device, self.weights = dtype, device, weights
        self.deterministic = deterministic
        self._kind = FixedRowLinear if deterministic else Linear
        self.storage = _STORAGES[weights] if dtype == torch.float32 else Storage.BF16
        self.wanted = weights != "plain" and device == "cpu" and dtype != torch.float16
        self.packed = self.wanted and packing_available(self.storage)
        if weights not in ("auto", "plain") and not self.packed:
            raise SpecdecError(
                f"weights ({weights!r}) are not available with this torch build on this processor; use 'auto'"
            )
        self.num_packed = self.num_plain = 0

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        packed = self.packed and (self.storage is not Storage.FP16 or fits_fp16(weight))
        if self.weights == "fp16-packed" and not packed:
            raise SpecdecError(
                "weights ('fp16-packed') need every weight to be an fp16 number, and this target has others; "
                "use 'auto'"
            )
        self.num_packed += packed
        self.num_plain += not packed
        if packed:
            return self._kind(weight, bias, self.storage)
        return self._kind(self.vector(weight), None if bias is None else self.vector(bias))

    def vector(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def say_what_is_slower(self, folder: str | Path) -> None:
        """Name the plain path where the packed one was wanted and cannot be had."""
        if not self.wanted or not self.num_plain:
            return
        if self.dtype == torch.bfloat16:
            logger.warning("dtype bfloat16: %s", SLOW_BF16)
        elif not self.packed:
            logger.warning("packed fp16 products are not available in this torch build; using plain fp32")
        else:
            logger.warning(
                "%s: %d of %d matrices hold weights that are no fp16 numbers; those use plain fp32",
                folder,
                self.num_plain,
                self.num_plain + self.num_packed,
            )


class Decoder:
    """A target's weights and forward pass.

    Raises:
        SpecdecError: weights missing, truncated or of the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: str | Path,
        *,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        weights: str = "auto",
        deterministic: bool = False,
    ) -> None:
        self.config = config
        self.dtype, self.device = dtype, device
        reader = open_weights(folder, device)
        make = LinearFactory(dtype, device, weights=weights, deterministic=deterministic)
        embed = reader.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        # kept as stored (a lookup widens the few rows it reads); an fp16 table halves the memory
        self.embed_tokens = embed.to(device) if embed.dtype == torch.float16 else make.vector(embed)
        self.layers = [DecoderLayer(config, reader, index, make) for index in range(config.num_layers)]
        self.final_norm = make.vector(reader.get("model.norm.weight", (config.hidden_size,)))
        head = embed if config.tie_word_embeddings else reader.get("lm_head.weight", tuple(embed.shape))
        self.head_weight = head
        self.head = make(head, None)
        self.num_packed, self.num_plain = make.num_packed, make.num_plain
        self.storage = make.storage
        make.say_what_is_slower(folder)
        self.rope = RotaryEmbedding(config.rope, max_positions=max_model_len, device=device)
        self.row_multiple = self._safe_rows(make)
        # a choice of windows by layer, in order of first appearance
        self._windows = list(dict.fromkeys(layer.window for layer in self.layers))
        self._loop = self._layer_loop() if device == "cpu" and not deterministic else None

    def _safe_rows(self, make: LinearFactory) -> int:
        """To what multiple the rows of a pass are padded, so that a row's products do not depend on it."""
        if self.num_packed and make.storage is Storage.INT8:
            return 1
        if self.num_packed and make.storage is Storage.BF16:
            return ROW_MULTIPLE  # one row of a product takes longer than four
        multiples = [row_multiple()] * bool(self.num_packed) + [ROW_MULTIPLE] * bool(self.num_plain)
        return math.lcm(*multiples)

    def _layer_loop(self) -> LayerLoop:
        weights = [
            LayerWeights(
                matrices=(layer.qkv, layer.out, layer.gate_up, layer.down),
                input_norm=layer.input_norm,
                post_norm=layer.post_norm,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                bias_list=self._windows.index(layer.window),
            )
            for layer in self.layers
        ]
        loop: LayerLoop = scripted(
            LayerLoop(
                weights,
                head=self.head,
                final_norm=self.final_norm,
                embed_tokens=self.embed_tokens,
                head_dim=self.config.head_dim,
                eps=self.config.rms_norm_eps,
            )
        )
        return loop

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings [T, hidden] in the compute dtype."""
        return self.embed_tokens[token_ids].to(self.dtype)

    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers.

        Returns:
            The residual stream after the last layer [T, hidden] (not normed), and the taps
            [T, boundaries, hidden] in the order of `boundaries` (None without any).
        """
        if self._loop is None:
            return self.forward_by_layer(batch, cache, boundaries)
        rows = batch.token_ids.shape[0]
        taps = self.final_norm.new_empty(rows, len(boundaries), self.config.hidden_size)
        cos, sin = self.rope.turned(batch.longest)
        lists = attention_lists(batch.attention, self._windows, self.dtype)
        first_slot = batch.first_slot
        x: Tensor = self._loop(
            batch.token_ids,
            batch.positions,
            cos,
            sin,
            cache.data,
            batch.slots,
            -1 if first_slot is None else first_slot,
            lists.starts,
            lists.counts,
            lists.first_slots,
            lists.lengths,
            lists.gathers,
            lists.biases,
            taps,
            list(boundaries),
        )
        return x, taps if boundaries else None

    def forward_by_layer(
        self, batch: ForwardBatch, cache: PagedKVCache, boundaries: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` computes, one layer after the other in Python: any device, and `deterministic`."""
        cos, sin = self.rope.cos_sin(batch.positions, batch.longest)
        cos, sin = cos.to(self.dtype), sin.to(self.dtype)
        x = self.embed(batch.token_ids)
        taps = x.new_empty(x.shape[0], len(boundaries), x.shape[1]) if boundaries else None
        where = {boundary: column for column, boundary in enumerate(boundaries)}
        for index, layer in enumerate(self.layers):
            if taps is not None and index in where:
                taps[:, where[index]] = x
            key_cache, value_cache = cache.layer(index)
            x = layer(x, cos, sin, key_cache, value_cache, batch)
        if taps is not None and len(self.layers) in where:
            taps[:, where[len(self.layers)]] = x
        return x, taps

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head: hidden [rows, hidden] -> fp32 [rows, vocab]."""
        if self._loop is not None:
            return self._loop.logits(hidden)
        return self.head(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)).float()
