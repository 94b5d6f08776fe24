"""A head and the loss of a batch as one module: what is wrapped for several processes and mixed precision.

Owns the frozen rows of both sides, the target's and the draft's, and the cast to the precision of products.
Knows nothing of optimisers or of where batches come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.drafts.eagle3 import Eagle3Head
from specdec.train.batching import RowBatch
from specdec.train.config import AUTO, TrainConfig
from specdec.train.loss import LossOptions, Teacher, UnrolledLoss, unrolled_loss
from specdec.train.packed_rows import packed_rows


class Objective(nn.Module):
    """A head and the loss of a batch: the module whose forward is wrapped for mixed precision."""

    def __init__(
        self, head: Eagle3Head, teacher_rows: Tensor, config: TrainConfig, device: torch.device
    ) -> None:
        super().__init__()
        self.head = head
        self.config = config
        assert config.compute_dtype != AUTO, "settled by the run, so that its record names what was used"
        self.compute_dtype = torch.bfloat16 if config.compute_dtype == "bfloat16" else torch.float32
        self.register_buffer("teacher_rows", teacher_rows, persistent=False)
        self._packed_rows = packed_rows(teacher_rows.to(device))
        # a shift common to all logits changes no probability; without it bf16 logits are small and finer.
        centred = teacher_rows - teacher_rows.mean(0)
        self.register_buffer("student_rows", centred.to(self.compute_dtype), persistent=False)
        self.register_buffer("draft_ids", head.vocab.draft_ids(), persistent=False)

    teacher_rows: Tensor
    student_rows: Tensor
    draft_ids: Tensor

    def forward(self, batch: RowBatch, measure: bool) -> UnrolledLoss:
        """Weighted loss sum of the batch, with acceptance counts when `measure`."""
        own = self.head.config.lm_head == "own"
        teacher = Teacher(
            batch.final,
            batch.log_norm,
            self.teacher_rows,
            self.draft_ids[batch.argmax.long()],
            self.config.distill_top_k,
            self._packed_rows,
        )
        options = LossOptions(self.config.loss, self.config.loss_chunk_rows, self.compute_dtype, measure)
        weight = self.head.head_weight if own else self.student_rows
        mixed = self.compute_dtype == torch.bfloat16
        with torch.autocast(batch.final.device.type, dtype=torch.bfloat16, enabled=mixed):
            return unrolled_loss(self.head, batch, teacher, weight, options)
