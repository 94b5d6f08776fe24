"""Scores of every boundary: one streaming pass of a target over calibration texts.

Owns the pass and its result, `LayerScores`. Knows estimators and CKA only through their functions; does not
choose anything. Memory is one batch: the states of `batch_tokens` positions at all boundaries, and one CKA
minibatch of Grams. What is kept per text and per batch is a few numbers a boundary, enough to resample.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.hf import BoundaryTap, num_decoder_layers, run_decoder
from specdec.layer_select.cka import cka_from_hsic, degenerate_boundaries, hsic_matrix
from specdec.layer_select.config import MIN_ROWS, ScoreConfig
from specdec.layer_select.entropy import ESTIMATORS, TextStates, estimator_named
from specdec.layer_select.rows import normalize_rows, require_finite
from specdec.layer_select.texts import CalibrationText

# texts share one padded forward while the shortest has this part of the longest's length.
MIN_LENGTH_RATIO = 0.75


@dataclass(frozen=True, kw_only=True)
class LayerScores:
    """Evidence about boundaries 0..N; the unit of resampling is the calibration batch.

    Attributes:
        num_layers: Decoder layers N of the target.
        hidden_size: Width of its residual stream.
        text_values: Estimator name to values `[texts, N + 1]`, float64.
        batch_of_text: Batch index of each text, `[texts]`.
        hsic: Row-weighted sums of HSIC_1 of each batch, `[batches, N + 1, N + 1]`, float64.
        rows: Measured positions of each batch, `[batches]`, float64.
        tokens: Measured positions.
        seconds: Time of the pass.
    """

    num_layers: int
    hidden_size: int
    text_values: dict[str, Tensor]
    batch_of_text: Tensor
    hsic: Tensor
    rows: Tensor
    tokens: int
    seconds: float

    @property
    def num_batches(self) -> int:
        """Units that can be resampled."""
        return self.hsic.shape[0]

    def informativeness(self, estimator: str, counts: Tensor | None = None) -> Tensor:
        """Mean value over texts, oriented so that higher is richer, `[N + 1]`.

        Args:
            estimator: Name in the registry.
            counts: How often each batch counts, `[batches]`; once each when None.
        """
        values = self.text_values[estimator]
        weights = torch.ones(len(values), dtype=torch.float64)
        if counts is not None:
            weights = counts.double()[self.batch_of_text]
        return estimator_named(estimator).sign * (weights @ values) / weights.sum()

    def mean_hsic(self, counts: Tensor | None = None) -> Tensor:
        """Row-weighted mean HSIC_1 over batches, `[N + 1, N + 1]`."""
        weights = torch.ones_like(self.rows) if counts is None else counts.double()
        return torch.einsum("b,bij->ij", weights, self.hsic) / (weights @ self.rows)

    def cka(self, counts: Tensor | None = None) -> Tensor:
        """Debiased minibatch CKA, `[N + 1, N + 1]`."""
        return cka_from_hsic(self.mean_hsic(counts))


def score_layers(
    model: Any,
    texts: Sequence[CalibrationText],
    config: ScoreConfig | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> LayerScores:
    """Measure every boundary of a target on calibration texts.

    Args:
        model: from `hf.load_hf_model`.
        texts: from `texts.read_texts`.
        config: how to measure.
        progress: called after each batch with the number of positions measured so far.
    """
    config = config or ScoreConfig()
    num_layers = num_decoder_layers(model)
    boundaries = list(range(num_layers + 1))
    generator = torch.Generator().manual_seed(config.seed)
    values: dict[str, list[Tensor]] = {name: [] for name in ESTIMATORS}
    batch_of_text: list[int] = []
    hsic: list[Tensor] = []
    rows: list[int] = []
    hidden_size = 0
    started = time.perf_counter()
    with BoundaryTap(model, boundaries) as tap:
        for batch_index, batch in enumerate(_batches(texts, config.batch_tokens)):
            states = _kept_states(model, tap, batch)
            hidden_size = states[0].shape[-1]
            for text_states in states:
                require_finite(text_states, boundaries)
                text = TextStates(
                    states=text_states, center=config.center, row_normalize=config.row_normalize
                )
                for name, estimator in ESTIMATORS.items():
                    values[name].append(estimator.compute(text).cpu())
                batch_of_text.append(batch_index)
            hsic.append(_batch_hsic(states, config, generator).cpu())
            rows.append(sum(text.num_kept for text in batch))
            if progress is not None:
                progress(sum(rows))
    scores = LayerScores(
        num_layers=num_layers,
        hidden_size=hidden_size,
        text_values={name: torch.stack(parts) for name, parts in values.items()},
        batch_of_text=torch.tensor(batch_of_text),
        hsic=torch.stack(hsic),
        rows=torch.tensor(rows, dtype=torch.float64),
        tokens=sum(rows),
        seconds=time.perf_counter() - started,
    )
    constant = degenerate_boundaries(scores.mean_hsic())
    if constant:
        warnings.warn(
            f"states at boundaries {constant} do not vary over the calibration texts; their CKA is set to 0",
            stacklevel=2,
        )
    return scores


def _batches(texts: Sequence[CalibrationText], batch_tokens: int) -> list[list[CalibrationText]]:
    """Consecutive texts in groups of about `batch_tokens` measured positions, none much smaller."""
    if sum(text.num_kept for text in texts) < MIN_ROWS or any(text.num_kept < 1 for text in texts):
        raise SpecdecError(
            f"calibration needs at least {MIN_ROWS} measured tokens; give more or longer texts"
        )
    groups: list[list[CalibrationText]] = [[]]
    size = 0
    for text in texts:
        if groups[-1] and size + text.num_kept > batch_tokens:
            groups.append([])
            size = 0
        groups[-1].append(text)
        size += text.num_kept
    # a small last group would be a resampling unit, and a CKA minibatch, unlike the others.
    if len(groups) > 1 and size < batch_tokens / 2:
        tail = groups.pop()
        groups[-1].extend(tail)
    return groups


def _kept_states(model: Any, tap: BoundaryTap, texts: list[CalibrationText]) -> list[Tensor]:
    """Measured states of each text, `[boundaries, kept, hidden]`, at least fp32, on one device."""
    kept: dict[int, Tensor] = {}
    device = model.get_input_embeddings().weight.device
    for group in _similar_lengths(texts):
        longest = max(len(texts[index].token_ids) for index in group)
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(group):
            length = len(texts[index].token_ids)
            ids[row, :length] = torch.tensor(texts[index].token_ids)
            mask[row, :length] = 1
        run_decoder(model, ids.to(device), mask.to(device) if len(group) > 1 else None)
        for row, index in enumerate(group):
            kept_slice = slice(texts[index].first_kept, len(texts[index].token_ids))
            per_boundary = [tap.states[b][row, kept_slice].to(device) for b in tap.boundaries]
            stacked = torch.stack(per_boundary)
            kept[index] = stacked.float() if stacked.dtype in (torch.float16, torch.bfloat16) else stacked
    return [kept[index] for index in range(len(texts))]


def _similar_lengths(texts: list[CalibrationText]) -> Iterator[list[int]]:
    """Indices of texts, longest first, in groups of similar length: padding is wasted work."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index].token_ids))
    group: list[int] = []
    for index in order:
        length = len(texts[index].token_ids)
        if group and length < MIN_LENGTH_RATIO * len(texts[group[0]].token_ids):
            yield group
            group = []
        group.append(index)
    yield group


def _batch_hsic(states: list[Tensor], config: ScoreConfig, generator: torch.Generator) -> Tensor:
    """Row-weighted sum of HSIC_1 over random minibatches of one batch's rows.

    Rows are mixed over texts first: neighbouring tokens are alike, and HSIC_1 assumes independent rows.
    """
    rows = torch.cat(states, dim=1)
    if config.row_normalize:
        rows = normalize_rows(rows)
    num_rows = rows.shape[1]
    order = torch.randperm(num_rows, generator=generator).to(rows.device)
    num_parts = -(-num_rows // config.cka_rows)
    parts = torch.tensor_split(order, num_parts)
    return torch.stack([hsic_matrix(rows[:, part]) * len(part) for part in parts]).sum(dim=0)
