"""A decoding step that runs on the device and was not read yet.

Owns the copy of its results to the host and the one wait for it. Does not know how steps are computed or what
becomes of their results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.device.step_packing import unpack_line
from specdec.kernels.step_records import StepClass
from specdec.runner import StepOutput
from specdec.sampling import TARGET_FAULT
from specdec.scheduler import ScheduledSequence
from specdec.tree import DraftTree
from specdec.verification.result import VerifyResult


class Fetch:
    """A tensor's way to the host; it may be written again on the device once this is made."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.clone()

    def wait(self) -> Tensor:
        """The tensor on the host, once the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A launched step.

    Attributes:
        plan: who works in it, in order of its rows.
        size: its class.
        fetch: lines of results int64 [B, ...].
        carry: `step_records.carry_of`, valid until another step is launched.
        states: taps of the committed rows [B, D + 1, taps, hidden]; None without boundaries.
        is_ahead: whether it was launched before the step before it was read.
    """

    plan: list[ScheduledSequence]
    size: StepClass
    fetch: Fetch
    carry: Tensor
    states: Tensor | None
    is_ahead: bool

    @property
    def live(self) -> list[ScheduledSequence]:
        """Shares whose sequences have not ended since."""
        return [share for share in self.plan if not share.seq.is_finished]

    def read(
        self, shares: list[ScheduledSequence]
    ) -> tuple[list[DraftTree], StepOutput, list[VerifyResult | None]]:
        """Trees, output and results of some of its shares; waits for them. Bad logits end their sequence."""
        lines = self.fetch.wait().tolist()
        trees: list[DraftTree] = []
        results: list[VerifyResult | None] = []
        kept: list[Tensor] = []
        place = {share.seq.seq_id: index for index, share in enumerate(self.plan)}
        for share in shares:
            index = place[share.seq.seq_id]
            tree, result = unpack_line(lines[index], self.size)
            if result is None:
                share.seq.finish("error", TARGET_FAULT)
            trees.append(tree)
            results.append(result)
            if self.states is not None:
                kept.append(self.states[index, : 1 + len(result.accepted_nodes) if result else 0])
        nothing = [0] * len(shares)
        # nobody asks for logits: whoever needs them takes the host's path
        empty = torch.empty(0, 1)
        return trees, StepOutput(empty, nothing, None, nothing, kept or None), results
