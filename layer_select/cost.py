"""What a selection costs: measured memory of a run, its bound, and what larger targets would take.

Owns the arithmetic. Does not run anything. The figures for larger targets are computed, not measured.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.entropy import estimators_named

# copies of one batch's states that are alive at once: those of the taps, of texts, of mixed and scaled rows.
STATE_COPIES = 4
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one scoring pass took.

    Attributes:
        tokens: Measured positions.
        seconds: Time of the pass, over all runs when it was resumed.
        probe_seconds: Part of it that went to the ridge probe's sums.
        peak_bytes: Most resident memory of the process so far, plus the most its card held.
        bound_bytes: Weights and `working_bytes`: what the pass may hold by design, beside the libraries.
    """

    tokens: int
    seconds: float
    probe_seconds: float
    peak_bytes: int
    bound_bytes: int


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """Sizes of a target that decide what measuring it costs."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    parameters: float


def peak_bytes() -> int:
    """Most resident memory of this process so far, plus the most its card held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if torch.cuda.is_available():
        peak += sum(torch.cuda.max_memory_allocated(card) for card in range(torch.cuda.device_count()))
    return peak


def working_bytes(shape: TargetShape, config: ScoreConfig) -> int:
    """Memory of a pass beside the weights: one batch of states, one CKA minibatch, the probe's sums."""
    boundaries = shape.num_layers + 1
    # a small last batch joins the one before, so a batch can hold half as much again.
    states = STATE_COPIES * 1.5 * config.batch_tokens * boundaries * shape.hidden_size * FLOAT_BYTES
    grams = 3 * boundaries * config.cka_rows**2 * FLOAT_BYTES
    text_grams = 2 * boundaries * min(config.max_text_tokens, shape.hidden_size) ** 2 * 2 * FLOAT_BYTES
    pooled = config.dataset_texts * boundaries * shape.hidden_size * FLOAT_BYTES
    probe = 0
    if config.probe_tokens:
        width = (boundaries + 1) * min(config.probe_dims, shape.hidden_size)
        held_out = config.probe_heldout * (width + 2 * shape.hidden_size)
        # the sums, a copy while they are centred, and what is left of them while subsets are compared.
        probe = FLOAT_BYTES * (3 * width**2 + 2 * width * shape.hidden_size + held_out)
    return int(states + max(grams, text_grams) + pooled + probe)


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """What a target would cost, computed: floating-point operations by part, seconds, memory."""

    forward_flop: float
    estimator_flop: float
    eigen_flop: float
    cka_flop: float
    probe_flop: float
    seconds: float
    weight_bytes: float
    working_bytes: int

    @property
    def flop(self) -> float:
        """All parts together."""
        parts = (self.forward_flop, self.estimator_flop, self.eigen_flop, self.cka_flop, self.probe_flop)
        return sum(parts)

    def rounded(self) -> dict[str, float]:
        """The figures that a report shows."""
        return {
            "seconds": round(self.seconds, 1),
            "peta_flop": round(self.flop / 1e15, 3),
            "weights_gib": round(self.weight_bytes / 2**30, 1),
            "working_gib": round(self.working_bytes / 2**30, 2),
        }


# sizes of Llama-2-7B and Llama-3.1-70B, for which the question is asked.
LARGE_TARGETS = {
    "7B": TargetShape(num_layers=32, hidden_size=4096, vocab_size=32000, parameters=6.7e9),
    "70B": TargetShape(num_layers=80, hidden_size=8192, vocab_size=128256, parameters=70.6e9),
}
# NVIDIA's figures for one H200 (dense): bf16 989 TFLOP/s, fp32 67 TFLOP/s; 40 % of each is a usual share.
H200_BF16_FLOP_PER_S = 0.4 * 989e12
H200_FP32_FLOP_PER_S = 0.4 * 67e12
# eigenvalues of one matrix of 512 rows in fp64 by one processor core; a card is not faster at this size.
EIGEN_FLOP_PER_S = 1e10


def estimate_cost(shape: TargetShape, config: ScoreConfig, *, weight_width: int = 2) -> CostEstimate:
    """Operations, seconds on one H200-class card and memory of a pass over `config.tokens` positions.

    Weights in half precision, products in fp32, eigenvalues of texts of full length in fp64. The ridge
    probe's subsets come on top, about 1e9 operations for each of three taps.
    """
    boundaries, hidden, tokens = shape.num_layers + 1, shape.hidden_size, config.tokens
    names = {estimator.name for estimator in estimators_named(config.estimators)}
    text = min(config.max_text_tokens, hidden)
    products = 2 * tokens * boundaries * text * hidden
    if "gaussian_entropy" in names:
        products += 2 * tokens * boundaries * min(hidden, config.batch_tokens) * hidden
    if "logit_lens_entropy" in names:
        products += 2 * config.lens_tokens * boundaries * hidden * shape.vocab_size
    eigen = tokens / text * boundaries * 4 / 3 * text**3
    cka = 2 * tokens * boundaries * config.cka_rows * hidden + 4 * tokens * config.cka_rows * boundaries**2
    width = (boundaries + 1) * min(config.probe_dims, hidden)
    probe = 2 * config.probe_tokens * (width**2 + boundaries * hidden * config.probe_dims)
    forward = 2 * shape.parameters * tokens
    return CostEstimate(
        forward_flop=forward,
        estimator_flop=products,
        eigen_flop=eigen,
        cka_flop=cka,
        probe_flop=probe,
        seconds=forward / H200_BF16_FLOP_PER_S
        + (products + cka + probe) / H200_FP32_FLOP_PER_S
        + eigen / EIGEN_FLOP_PER_S,
        weight_bytes=weight_width * shape.parameters,
        working_bytes=working_bytes(shape, config),
    )
