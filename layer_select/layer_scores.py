"""What a scoring pass found: evidence about every boundary, ready to be resampled.

Owns how per-text and per-batch numbers become values a boundary. Does not know models or how the numbers were
measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.layer_select.cka import cka_from_hsic
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.cost import Costs
from specdec.layer_select.entropy import estimator_named
from specdec.layer_select.estimators.sample import StateSample
from specdec.layer_select.ridge_probe import RidgeProbe


@dataclass(frozen=True, kw_only=True)
class LayerScores:
    """Evidence about boundaries 0..N; the unit of resampling is the calibration batch, of one domain each.

    Every method takes `counts`, how often each batch counts `[batches]` (once each when None): a resample, a
    part of the batches, or one domain (`domain_counts`).

    Attributes:
        num_layers: Decoder layers N of the target.
        hidden_size: Width of its residual stream.
        text_values: Text-level estimator to values `[texts, N + 1]`, float64, normalised, sign as measured.
        batch_of_text: Batch index of each text, `[texts]`.
        hsic: Row-weighted sums of HSIC_1 of each batch, `[batches, N + 1, N + 1]`, float64.
        rows: Measured positions of each batch, `[batches]`, float64.
        tokens: Measured positions.
        seconds: Time of the pass.
        batch_values: Batch-level estimator to values `[batches, N + 1]`, float64.
        dataset_names: Dataset-level estimators, computed from `pooled` when asked for.
        pooled: Mean state of each of the first texts, `[N + 1, texts, hidden]`.
        batch_domains: Domain of each batch, "" where texts carry none.
        hsic_biased: As `hsic` of HSIC_0.
        block_influence_by_batch: 1 - E cos(h_b, h_{b+1}) of each batch, `[batches, N]`.
        cosine_to_final_by_batch: E cos(h_b, h_N) of each batch, `[batches, N + 1]`.
        config: How it was measured.
        probe: Scores subsets of boundaries; None when `probe_tokens` was 0.
        costs: What the pass took.
    """

    num_layers: int
    hidden_size: int
    text_values: dict[str, Tensor]
    batch_of_text: Tensor
    hsic: Tensor
    rows: Tensor
    tokens: int
    seconds: float
    batch_values: dict[str, Tensor] = field(default_factory=dict)
    dataset_names: tuple[str, ...] = ()
    pooled: Tensor | None = None
    batch_domains: tuple[str, ...] = ()
    hsic_biased: Tensor | None = None
    block_influence_by_batch: Tensor | None = None
    cosine_to_final_by_batch: Tensor | None = None
    config: ScoreConfig = field(default_factory=ScoreConfig)
    probe: RidgeProbe | None = None
    costs: Costs | None = None

    @property
    def num_batches(self) -> int:
        """Units that can be resampled."""
        return self.hsic.shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Estimators that were measured."""
        return (*self.text_values, *self.batch_values, *self.dataset_names)

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of the calibration texts, each once."""
        return tuple(dict.fromkeys(self.batch_domains))

    def domain_counts(self, domain: str) -> Tensor:
        """Counts that select the batches of one domain, `[batches]`."""
        if domain not in self.batch_domains:
            raise SpecdecError(f"domain ({domain}) must be one of {', '.join(self.domains)}")
        return torch.tensor([float(each == domain) for each in self.batch_domains], dtype=torch.float64)

    def values(self, estimator: str, counts: Tensor | None = None) -> Tensor:
        """Mean value over what counts, normalised, sign as measured, `[N + 1]`."""
        weights = self._weights(counts)
        if estimator in self.text_values:
            return _mean(self.text_values[estimator], weights[self.batch_of_text])
        if estimator in self.batch_values:
            return _mean(self.batch_values[estimator], weights * self.rows)
        if estimator in self.dataset_names:
            return self._dataset_values(estimator, counts)
        raise SpecdecError(
            f"estimator ({estimator}) was not measured; measured: {', '.join(self.names)}. "
            "Add it to the estimators of the pass"
        )

    def informativeness(self, estimator: str, counts: Tensor | None = None) -> Tensor:
        """`values` oriented so that higher is richer, `[N + 1]`."""
        return estimator_named(estimator).sign * self.values(estimator, counts)

    def mean_hsic(self, counts: Tensor | None = None, *, biased: bool = False) -> Tensor:
        """Row-weighted mean HSIC over batches, `[N + 1, N + 1]`."""
        hsic = self.hsic_biased if biased else self.hsic
        assert hsic is not None, "these scores were made without biased HSIC"
        weights = self._weights(counts)
        return torch.einsum("b,bij->ij", weights, hsic) / (weights @ self.rows)

    def cka(self, counts: Tensor | None = None, *, biased: bool = False) -> Tensor:
        """Minibatch CKA, `[N + 1, N + 1]`, debiased or not; positive semi-definite either way."""
        return cka_from_hsic(self.mean_hsic(counts, biased=biased))

    def block_influence(self, counts: Tensor | None = None) -> Tensor:
        """1 - E cos(h_b, h_{b+1}) of the block between boundaries b and b+1, `[N]`."""
        assert self.block_influence_by_batch is not None, "these scores were made without evidence"
        return _mean(self.block_influence_by_batch, self._weights(counts) * self.rows)

    def cosine_to_final(self, counts: Tensor | None = None) -> Tensor:
        """E cos(h_b, h_N) of every boundary, `[N + 1]`."""
        assert self.cosine_to_final_by_batch is not None, "these scores were made without evidence"
        return _mean(self.cosine_to_final_by_batch, self._weights(counts) * self.rows)

    def _weights(self, counts: Tensor | None) -> Tensor:
        return torch.ones_like(self.rows) if counts is None else counts.to(self.rows)

    def _dataset_values(self, estimator: str, counts: Tensor | None) -> Tensor:
        assert self.pooled is not None, "dataset-level estimators come with mean states"
        pooled = self.pooled
        if counts is not None:
            repeats = counts.long()[self.batch_of_text[: pooled.shape[1]]]
            pooled = pooled.repeat_interleave(repeats, dim=1)
        if pooled.shape[1] == 0:
            # none of the texts that were pooled is among what counts.
            return torch.zeros(self.num_layers + 1, dtype=torch.float64)
        sample = StateSample(
            states=pooled, center=self.config.center, row_normalize=self.config.row_normalize
        )
        return estimator_named(estimator).compute(sample)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (weights @ values) / weights.sum()
