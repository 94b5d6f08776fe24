"""The sizes at which kernels are measured, and the records of what is measured.

Owns `KernelCase`, one operation at one size with the runs that do it, and the inputs that several cases
share: block tables in no order, trees, positions. Knows nothing of time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config import ModelConfig
from specdec.kernels import KernelBackend, kernel_backend

# the name of our own run in every case
OURS = "specdec"
# children of a node in the trees measured
_FAN_OUT = 4


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One operation at one size.

    Attributes:
        name: the operation.
        size: its size in words.
        bytes: that must be read and written at least.
        flop: operations of matrix products; 0 where there are none worth counting.
        runs: ours and the baselines, by name; all do the same work.
        left_out: baselines that were not measured, and why.
    """

    name: str
    size: str
    bytes: int
    flop: int
    runs: dict[str, Callable[[], object]]
    left_out: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class MicroShape:
    """Sizes of one measurement: `batch` sequences of `context` rows, each verifying `nodes`."""

    model: ModelConfig
    device: str
    dtype: torch.dtype
    batch: int
    context: int
    nodes: int
    block_size: int = 16

    @property
    def backend(self) -> KernelBackend:
        return kernel_backend(self.device, "auto", self.dtype)

    @property
    def rows(self) -> int:
        """Rows of a pass."""
        return self.batch * self.nodes

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def blocks_each(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def num_slots(self) -> int:
        """Rows of a pool that holds all sequences."""
        return self.batch * self.blocks_each * self.block_size

    def normal(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Numbers to compute with, the same in every run."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype or self.dtype)

    def block_tables(self) -> Tensor:
        """Int32 [batch, blocks], the pool's blocks in no order, as after hours of serving."""
        generator = torch.Generator().manual_seed(self.batch)
        order = torch.randperm(self.batch * self.blocks_each, generator=generator)
        return order.view(self.batch, self.blocks_each).to(self.device, torch.int32)

    def slots(self) -> Tensor:
        """Int64 [batch, context], the slot of every row."""
        within = torch.arange(self.block_size, device=self.device)
        slots = self.block_tables().long()[..., None] * self.block_size + within
        return slots.flatten(1)[:, : self.context]


def tree_parents(nodes: int) -> list[int]:
    """Parents of a tree of so many nodes, root included: four children each, breadth first."""
    return [-1, *((node - 1) // _FAN_OUT for node in range(1, nodes))]
