"""Runs the target over scheduled sequences on a device: one copy there per pass, then kernels alone.

Owns the pass of a ragged step (prompt chunks, plain decoding, trees together) on the device; the host's rules
may read its logits. What it computes is what `specdec.runner.ModelRunner` computes, up to rounding.
"""

from __future__ import annotations

import torch

from specdec.device.packing import pack_step
from specdec.device.staging import Staging
from specdec.device.target_pass import TargetPass
from specdec.kernels.operations import Operations
from specdec.models.decoder import Decoder
from specdec.models.layers import ROW_MULTIPLE
from specdec.paged_kv import PagedKVCache
from specdec.runner import ModelRunner, StepOutput
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree


class DeviceRunner(ModelRunner):
    """A `ModelRunner` whose passes go through `specdec.kernels`.

    Args:
        decoder: the weights.
        cache: the KV pool, on the same device.
        boundaries: which residual streams a drafter reads.
        ops: the kernels.
        max_model_len: longest context in use.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        boundaries: tuple[int, ...],
        ops: Operations,
        max_model_len: int,
    ) -> None:
        super().__init__(decoder, cache, boundaries)
        self.ops = ops
        self.staging = Staging(decoder.device)
        self.target = TargetPass(decoder, cache, boundaries, ops, max_model_len)

    @torch.inference_mode()
    def run(self, plan: list[ScheduledSequence], trees: list[DraftTree]) -> StepOutput:
        """One target pass; `trees` has one entry per sequence (the root alone where nothing was drafted)."""
        packed = pack_step(plan, trees, self.cache.block_size, ROW_MULTIPLE)
        token_ids, batch, wanted = packed.send(self.staging, self.cache.block_size)
        normed, taps = self.target(token_ids, batch)
        if packed.num_wanted:
            logits = self.target.logits(normed[wanted])
        else:
            logits = normed.new_empty(0, self.decoder.config.vocab_size, dtype=torch.float32)
        return StepOutput(
            logits,
            packed.logits_start,
            taps,
            packed.row_start,
            row_logits=lambda rows: self.target.logits(normed[rows]),
        )
