"""Evidence about targets that do not exist: smooth CKA, random entropies, a probe with known answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from specdec.layer_select.layer_scores import LayerScores


@dataclass(frozen=True)
class MadeUpVerdict:
    """What `RidgeProbe.score` gives."""

    overlap_next: float
    overlap_second: float
    explained: float


class MadeUpProbe:
    """Explained variance is the mean of hidden values; overlap follows it, with a wobble of its own."""

    def __init__(self, num_layers: int, seed: int, wobble: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.worth = torch.rand(num_layers + 1, generator=generator, dtype=torch.float64)
        self.wobble = wobble
        self.asked: list[tuple[int, ...]] = []

    def explained(self, subsets: Sequence[tuple[int, ...]]) -> Tensor:
        """Mean worth of each set."""
        return torch.stack([self.worth[list(subset)].mean() for subset in subsets])

    def overlap(self, subset: tuple[int, ...]) -> float:
        """The true overlap, which only measuring tells."""
        return 0.2 + 0.5 * float(self.worth[list(subset)].mean()) + self.wobble * (hash(subset) % 7 - 3)

    def overlap_by_row(self, subsets: Sequence[tuple[int, ...]]) -> Tensor:
        """Rows that scatter around the overlap."""
        generator = torch.Generator().manual_seed(5)
        scatter = torch.randn(len(subsets), 60, generator=generator, dtype=torch.float64)
        scatter -= scatter.mean(dim=1, keepdim=True)
        return torch.tensor([self.overlap(s) for s in subsets]).double()[:, None] + 0.05 * scatter

    def score(self, subsets: Sequence[tuple[int, ...]]) -> list[MadeUpVerdict]:
        """Measure."""
        self.asked += subsets
        return [
            MadeUpVerdict(overlap_next=0.1, overlap_second=self.overlap(subset), explained=0.5)
            for subset in subsets
        ]


@pytest.fixture
def made_up_scores() -> Callable[..., LayerScores]:
    """Scores of a target of any depth, by seed."""

    def make(
        num_layers: int,
        *,
        seed: int = 0,
        num_batches: int = 6,
        domains: tuple[str, ...] = (),
        hsic: Tensor | None = None,
    ) -> LayerScores:
        generator = torch.Generator().manual_seed(seed)
        size = num_layers + 1
        steps = torch.randn(num_batches, size, 12, generator=generator, dtype=torch.float64)
        features = steps.cumsum(dim=1)
        values = torch.rand(2 * num_batches, size, generator=generator, dtype=torch.float64)
        return LayerScores(
            num_layers=num_layers,
            hidden_size=12,
            text_values={"matrix_entropy": values, "effective_rank": values.square().roll(2, dims=1)},
            batch_of_text=torch.arange(num_batches).repeat_interleave(2),
            hsic=features @ features.mT if hsic is None else hsic,
            rows=torch.full((num_batches,), 100.0, dtype=torch.float64),
            tokens=100 * num_batches,
            seconds=0.0,
            batch_domains=domains,
            block_influence_by_batch=torch.rand(
                num_batches, num_layers, generator=generator, dtype=torch.float64
            ),
            cosine_to_final_by_batch=torch.rand(num_batches, size, generator=generator, dtype=torch.float64),
        )

    return make


@pytest.fixture
def made_up_probe() -> Callable[..., MadeUpProbe]:
    """A probe for a target of any depth, by seed."""

    def make(num_layers: int, *, seed: int = 0, wobble: float = 0.0) -> MadeUpProbe:
        return MadeUpProbe(num_layers, seed, wobble)

    return make
