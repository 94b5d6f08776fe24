"""What a scoring pass has measured so far, and its form in a resume file.

Owns the running lists. Does not know how they were measured or what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from specdec.layer_select.probe_sums import ProbeCollector, ProbeSums


@dataclass(kw_only=True)
class PassState:
    """Numbers of each text and each batch measured so far.

    Attributes:
        text_values: Estimator to values `[boundaries]` of each text.
        batch_values: Estimator to values `[boundaries]` of each batch.
        batch_of_text: Batch index of each text.
        pooled: Mean state `[boundaries, hidden]` of each of the first texts.
        hsic: Sums of HSIC_1 of each batch.
        hsic_biased: Sums of HSIC_0 of each batch.
        block_influence: Of each batch.
        cosine_to_final: Of each batch.
        rows: Measured positions of each batch.
        domains: Domain of each batch.
        massive: Boundaries with massive activations.
        generator_state: Of the order of rows in CKA minibatches.
        seconds: Time so far, over all runs.
        probe_seconds: Part of it that went to the probe's sums.
    """

    text_values: dict[str, list[Tensor]] = field(default_factory=dict)
    batch_values: dict[str, list[Tensor]] = field(default_factory=dict)
    batch_of_text: list[int] = field(default_factory=list)
    pooled: list[Tensor] = field(default_factory=list)
    hsic: list[Tensor] = field(default_factory=list)
    hsic_biased: list[Tensor] = field(default_factory=list)
    block_influence: list[Tensor] = field(default_factory=list)
    cosine_to_final: list[Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    massive: set[int] = field(default_factory=set)
    generator_state: Tensor = field(default_factory=lambda: torch.Generator().get_state())
    seconds: float = 0.0
    probe_seconds: float = 0.0

    @property
    def num_batches(self) -> int:
        """Batches measured so far."""
        return len(self.domains)

    @property
    def tokens(self) -> int:
        """Positions measured so far."""
        return sum(self.rows)

    def content(self, probe: ProbeCollector | None) -> dict[str, Any]:
        """Everything as tensors, lists and numbers, with the probe's sums."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["massive"] = sorted(self.massive)
        if probe is not None:
            found["probe"] = {each.name: getattr(probe.sums, each.name) for each in fields(probe.sums)}
        return found

    @classmethod
    def from_content(cls, content: dict[str, Any], probe: ProbeCollector | None) -> PassState:
        """The state that `content` was made from; the probe's sums go back into `probe`."""
        given = dict(content)
        sums = given.pop("probe", None)
        if probe is not None:
            assert sums is not None, "a pass with a probe is saved with its sums"
            probe.sums = ProbeSums(**sums)
        kept = {name: _on_cpu(value) for name, value in given.items()}
        return cls(**{**kept, "massive": set(kept["massive"])})


def _on_cpu(value: Any) -> Any:
    """Per-text and per-batch numbers live on the processor, whatever device the file was read to."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {name: _on_cpu(part) for name, part in value.items()}
    return [_on_cpu(part) for part in value] if isinstance(value, list) else value
