"""Scores of every boundary: one streaming pass of a target over calibration texts.

Owns the pass. Knows estimators, CKA, evidence and the probe's sums only through their functions; does not
choose anything. Memory is one batch: the states of `batch_tokens` positions at all boundaries, one CKA
minibatch of Grams, and the probe's sums (`cost.working_bytes` is the bound). What is kept per text and per
batch is a few numbers a boundary, enough to resample, and one mean state a text.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.hf import BoundaryTap, num_decoder_layers
from specdec.layer_select.cka import degenerate_boundaries, hsic_pair
from specdec.layer_select.config import MIN_ROWS, ScoreConfig
from specdec.layer_select.cost import Costs, TargetShape, peak_bytes, working_bytes
from specdec.layer_select.entropy import Estimator, estimators_named
from specdec.layer_select.estimators.sample import StateSample
from specdec.layer_select.evidence import block_influence, cosine_to_final
from specdec.layer_select.forward import calibration_batches, kept_states
from specdec.layer_select.layer_scores import LayerScores
from specdec.layer_select.pass_state import PassState
from specdec.layer_select.probe_sums import ProbeCollector, planned_rows, require_probe_rows
from specdec.layer_select.readout import Readout, check_stream
from specdec.layer_select.resume import load_pass, run_key, save_pass
from specdec.layer_select.ridge_probe import RidgeProbe
from specdec.layer_select.rows import massive_boundaries, require_finite
from specdec.layer_select.texts import CalibrationText

__all__ = ["LayerScores", "ScoreProgress", "require_measurable", "score_layers"]

# a row this many times as long as the median would decide every unscaled estimate.
MASSIVE_RATIO = 100.0
# three taps and the next token: a fit of fewer rows than inputs is decided by its penalty.
PROBE_BLOCKS = 4


@dataclass(frozen=True, kw_only=True)
class ScoreProgress:
    """Where a pass stands after a batch.

    Attributes:
        done: Positions measured so far, by earlier runs too.
        total: Positions to measure.
        tokens_per_second: Of this run.
        seconds_left: At that rate.
    """

    done: int
    total: int
    tokens_per_second: float
    seconds_left: float


def require_measurable(texts: Sequence[CalibrationText], config: ScoreConfig) -> None:
    """Refuse texts too few for a pass or its probe; asked before a target is loaded."""
    batches = calibration_batches(texts, config.batch_tokens)
    if config.probe_tokens:
        require_probe_rows(*planned_rows([[text.num_kept for text in batch] for _, batch in batches], config))


def score_layers(
    model: Any,
    texts: Sequence[CalibrationText],
    config: ScoreConfig | None = None,
    *,
    progress: Callable[[ScoreProgress], None] | None = None,
    resume: str | Path | None = None,
) -> LayerScores:
    """Measure every boundary of a target on calibration texts.

    Args:
        model: from `hf.load_hf_model`.
        texts: from `texts.read_texts`.
        config: how to measure.
        progress: called after each batch.
        resume: file that holds the pass after every batch. A run with the same target, texts and settings
            continues it, to the same bits; any other is refused. It stays when the pass is complete.
    """
    scoring = _Pass(model, texts, config or ScoreConfig())
    scoring.run(progress, None if resume is None else Path(resume))
    return scoring.scores()


class _Pass:
    """One pass: what is measured, and what has been so far."""

    def __init__(self, model: Any, texts: Sequence[CalibrationText], config: ScoreConfig) -> None:
        self.model, self.texts, self.config = model, texts, config
        require_measurable(texts, config)
        self.batches = calibration_batches(texts, config.batch_tokens)
        self.estimators = estimators_named(config.estimators)
        check_stream(model)
        self.readout = Readout(model)
        self.boundaries = list(range(num_decoder_layers(model) + 1))
        self.total = sum(text.num_kept for text in texts)
        self.generator = torch.Generator().manual_seed(config.seed)
        self.state = PassState()
        _require_ids(texts, int(model.get_input_embeddings().weight.shape[0]))
        hidden, vocab = self.readout.hidden_size, self.readout.vocab_size
        self.shape = TargetShape(
            num_layers=len(self.boundaries) - 1,
            hidden_size=hidden,
            vocab_size=vocab,
            parameters=float(sum(weight.numel() for weight in model.parameters())),
        )
        self.probe: ProbeCollector | None = None
        if config.probe_tokens:
            self.probe = ProbeCollector(
                self.readout,
                num_boundaries=len(self.boundaries),
                hidden_size=hidden,
                total_rows=self.total,
                config=config,
            )

    def run(self, progress: Callable[[ScoreProgress], None] | None, resume: Path | None) -> None:
        """Measure the batches that are left."""
        key = {} if resume is None else run_key(self.model, self.texts, self.config)
        if resume is not None:
            saved = load_pass(resume, key, self.readout.device)
            if saved is not None:
                self.state = PassState.from_content(saved, self.probe)
                self.generator.set_state(self.state.generator_state)
        before, started, done_before = self.state.seconds, time.perf_counter(), self.state.tokens
        with BoundaryTap(self.model, self.boundaries) as tap:
            for index, (domain, batch) in enumerate(self.batches):
                if index < self.state.num_batches:
                    continue
                self._measure(index, domain, batch, tap)
                elapsed = time.perf_counter() - started
                self.state.seconds = before + elapsed
                self.state.generator_state = self.generator.get_state()
                if resume is not None:
                    save_pass(resume, key, self.state.content(self.probe))
                if progress is not None:
                    rate = (self.state.tokens - done_before) / max(elapsed, 1e-9)
                    progress(
                        ScoreProgress(
                            done=self.state.tokens,
                            total=self.total,
                            tokens_per_second=rate,
                            seconds_left=(self.total - self.state.tokens) / max(rate, 1e-9),
                        )
                    )

    def _measure(self, index: int, domain: str, batch: list[CalibrationText], tap: BoundaryTap) -> None:
        """Add one batch to the state, all of it or, when interrupted, nothing that is saved."""
        states = kept_states(self.model, tap, batch)
        for text_states in states:
            require_finite(text_states, self.boundaries)
        tap.states = {}
        for text_states in states:
            sample = self._sample(text_states)
            for estimator in self._at("text"):
                self.state.text_values.setdefault(estimator.name, []).append(estimator.compute(sample).cpu())
            self.state.batch_of_text.append(index)
            if self._at("dataset") and len(self.state.pooled) < self.config.dataset_texts:
                self.state.pooled.append(text_states.mean(dim=1).cpu())
        if self.probe is not None:
            started = time.perf_counter()
            first = sum(len(earlier) for _, earlier in self.batches[:index])
            ids = [torch.tensor(text.token_ids[text.first_kept :]) for text in batch]
            self.probe.add(index, first, ids, states)
            self.state.probe_seconds += time.perf_counter() - started
        rows = torch.cat(states, dim=1)
        states.clear()
        sample = self._sample(rows)
        for estimator in self._at("batch"):
            self.state.batch_values.setdefault(estimator.name, []).append(estimator.compute(sample).cpu())
        self.state.block_influence.append(block_influence(rows).cpu())
        self.state.cosine_to_final.append(cosine_to_final(rows).cpu())
        if not self.config.row_normalize:
            self.state.massive.update(massive_boundaries(rows, MASSIVE_RATIO))
        debiased, biased = _batch_hsic(sample.scaled, self.config.cka_rows, self.generator)
        self.state.hsic.append(debiased.cpu())
        self.state.hsic_biased.append(biased.cpu())
        self.state.rows.append(rows.shape[1])
        self.state.domains.append(domain)

    def _at(self, level: str) -> list[Estimator]:
        return [estimator for estimator in self.estimators if estimator.level == level]

    def _sample(self, states: Tensor) -> StateSample:
        config = self.config
        return StateSample(
            states=states,
            center=config.center,
            row_normalize=config.row_normalize,
            over_logits=self.readout.over_logits,
            lens_rows=max(1, round(config.lens_tokens * states.shape[1] / self.total)),
            max_coordinates=config.histogram_coordinates,
            # the coordinates of the histogram must be those of every other batch; rows may differ.
            seed=config.seed,
        )

    def scores(self) -> LayerScores:
        """The finished pass as scores."""
        state, config = self.state, self.config
        scores = LayerScores(
            num_layers=self.shape.num_layers,
            hidden_size=self.shape.hidden_size,
            text_values={name: torch.stack(parts) for name, parts in state.text_values.items()},
            batch_values={name: torch.stack(parts) for name, parts in state.batch_values.items()},
            dataset_names=tuple(estimator.name for estimator in self._at("dataset")),
            pooled=torch.stack(state.pooled, dim=1) if state.pooled else None,
            batch_of_text=torch.tensor(state.batch_of_text),
            batch_domains=tuple(state.domains),
            hsic=torch.stack(state.hsic),
            hsic_biased=torch.stack(state.hsic_biased),
            block_influence_by_batch=torch.stack(state.block_influence),
            cosine_to_final_by_batch=torch.stack(state.cosine_to_final),
            rows=torch.tensor(state.rows, dtype=torch.float64),
            tokens=state.tokens,
            seconds=state.seconds,
            config=config,
            probe=None
            if self.probe is None
            else RidgeProbe(
                self.probe.sums,
                num_boundaries=len(self.boundaries),
                logits_of_features=self.readout.logits_of_features,
            ),
            costs=Costs(
                tokens=state.tokens,
                seconds=state.seconds,
                probe_seconds=state.probe_seconds,
                peak_bytes=peak_bytes(),
                bound_bytes=working_bytes(self.shape, config) + self._weight_bytes(),
            ),
        )
        self._warn(scores)
        return scores

    def _weight_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def _warn(self, scores: LayerScores) -> None:
        constant = degenerate_boundaries(scores.mean_hsic())
        if constant:
            warnings.warn(
                f"states at boundaries {constant} do not vary over the calibration texts; their CKA is set "
                "to 0",
                stacklevel=4,
            )
        short = sum(text.num_kept < MIN_ROWS for text in self.texts)
        if short:
            warnings.warn(
                f"{short} texts have fewer than {MIN_ROWS} measured positions; their spectra say little",
                stacklevel=4,
            )
        if scores.dataset_names and len(self.texts) < MIN_ROWS:
            warnings.warn(
                f"dataset-level entropies see one state a text and there are {len(self.texts)} texts, fewer "
                f"than {MIN_ROWS}; they say little",
                stacklevel=4,
            )
        if self.probe is not None and self.probe.sums.rows < PROBE_BLOCKS * self.probe.dims:
            warnings.warn(
                f"the ridge probe was fitted on {self.probe.sums.rows} rows, fewer than the "
                f"{PROBE_BLOCKS * self.probe.dims} inputs that three taps and the token have; its overlaps "
                "say little",
                stacklevel=4,
            )
        if self.state.massive:
            warnings.warn(
                f"states at boundaries {sorted(self.state.massive)} hold rows over {MASSIVE_RATIO:g} times "
                "the median length (massive activations) that decide unscaled estimates; set row_normalize",
                stacklevel=4,
            )


def _require_ids(texts: Sequence[CalibrationText], size: int) -> None:
    """Refuse token ids that the target has no embedding for."""
    for number, text in enumerate(texts):
        worst = max(text.token_ids) if min(text.token_ids) >= 0 else min(text.token_ids)
        if not 0 <= worst < size:
            raise SpecdecError(
                f"calibration text {number} holds token id {worst}, and the target has 0..{size - 1}; its "
                "ids are of another tokenizer"
            )


def _batch_hsic(rows: Tensor, cka_rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Row-weighted sums of HSIC_1 and HSIC_0 over random minibatches of `[boundaries, rows, hidden]`.

    Rows are mixed over texts first: neighbouring tokens are alike, and HSIC_1 assumes independent rows.
    """
    num_rows = rows.shape[1]
    order = torch.randperm(num_rows, generator=generator).to(rows.device)
    num_parts = -(-num_rows // cka_rows)
    debiased, biased = [], []
    for part in torch.tensor_split(order, num_parts):
        pair = hsic_pair(rows[:, part])
        debiased.append(pair.debiased * len(part))
        biased.append(pair.biased * len(part))
    return torch.stack(debiased).sum(dim=0), torch.stack(biased).sum(dim=0)
