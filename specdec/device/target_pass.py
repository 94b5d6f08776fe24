"""The target's forward pass through the kernels: the same layers as `specdec.models.decoder`, fewer launches.

Owns the order of launches and what is fused: norm with residual sum, rotation with the KV store. Reads the
weights of a `Decoder`; knows nothing of sequences. Nothing here reads a value on the host.
Shapes: T rows of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.device_batch import DeviceBatch
from specdec.kernels.operations import Operations
from specdec.models.decoder import Decoder
from specdec.paged_kv import PagedKVCache


class TargetPass:
    """Runs a decoder's layers over batches on its device.

    Args:
        decoder: the weights.
        cache: the KV pool.
        boundaries: which residual streams to keep, ascending.
        ops: the kernels.
        max_positions: longest context in use; tables of the rotation are made for it once.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        boundaries: tuple[int, ...],
        ops: Operations,
        max_positions: int,
    ) -> None:
        self.decoder, self.cache, self.ops = decoder, cache, ops
        self.boundaries = boundaries
        everywhere = torch.arange(max_positions, device=decoder.device)
        self.cos, self.sin = decoder.rope.cos_sin(everywhere, max_positions)

    def __call__(self, token_ids: Tensor, batch: DeviceBatch) -> tuple[Tensor, Tensor | None]:
        """Run the layers on T rows and store their keys and values.

        Args:
            token_ids: int64 [T].
            batch: where the rows stand and what they see.

        Returns:
            The final norm of the residual stream [T, hidden], and the taps [T, boundaries, hidden] in the
            order of `boundaries` (None without any).
        """
        decoder, config, ops = self.decoder, self.decoder.config, self.ops
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        eps, rows = config.rms_norm_eps, token_ids.shape[0]
        residual = decoder.embed(token_ids)
        taps = residual.new_empty(rows, len(self.boundaries), config.hidden_size) if self.boundaries else None
        norms = [*(layer.input_norm for layer in decoder.layers[1:]), decoder.final_norm]
        normed = ops.rms_norm(residual, decoder.layers[0].input_norm, eps)
        self._tap(taps, 0, residual)
        for index, layer in enumerate(decoder.layers):
            key_cache, value_cache = self.cache.layer(index)
            key_scales, value_scales = self.cache.layer_scales(index)
            query = ops.rope_store(
                layer.qkv(normed).view(rows, heads + 2 * kv_heads, dim),
                self.cos,
                self.sin,
                batch.positions,
                key_cache,
                value_cache,
                batch.slots,
                num_heads=heads,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                key_scales=key_scales,
                value_scales=value_scales,
            )
            attended = ops.tree_attention(
                query,
                key_cache,
                value_cache,
                batch,
                window=layer.window,
                key_scales=key_scales,
                value_scales=value_scales,
            )
            # both sums go into `residual` in place
            normed = ops.add_rms_norm(layer.out(attended), residual, layer.post_norm, eps)
            update = layer.down(ops.silu_mul(layer.gate_up(normed)))
            normed = ops.add_rms_norm(update, residual, norms[index], eps)
            self._tap(taps, index + 1, residual)
        return normed, taps

    def logits(self, normed: Tensor) -> Tensor:
        """Output head: final-normed rows [rows, hidden] -> fp32 [rows, vocab]."""
        return self.decoder.head(normed).float()

    def _tap(self, taps: Tensor | None, boundary: int, residual: Tensor) -> None:
        if taps is not None and boundary in self.boundaries:
            taps[:, self.boundaries.index(boundary)] = residual
