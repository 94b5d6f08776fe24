"""Logit-lens entropy: how undecided the target would be if a boundary were its last.

H(softmax(logits(h))) in nats, mean over rows, where logits is the target's own final norm and output head
with whatever it does after it (soft-capping, scaling). Rows times hidden times vocabulary a boundary is the
dearest of all estimators, so only `lens_rows` rows of each sample are read, seeded. The spread of one token's
entropy is about 2 nats, so 1,024 rows leave a standard error near 0.06.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.layer_select.estimators.sample import StateSample


def logit_lens_entropy(sample: StateSample) -> Tensor:
    """Mean entropy of the lens over ln of the vocabulary size, `[boundaries]`, in 0..1."""
    assert sample.over_logits is not None, "the logit lens needs the target's way to logits"
    generator = torch.Generator().manual_seed(sample.seed)
    order = torch.randperm(sample.states.shape[1], generator=generator)
    rows = order[: sample.lens_rows].to(sample.states.device)
    read = sample.states[:, rows]
    # all boundaries in one call: each block of rows costs the target a step.
    shares = sample.over_logits(read.flatten(0, 1), _share_of_uniform)
    return shares.view(read.shape[:2]).double().mean(dim=1)


def _share_of_uniform(logits: Tensor) -> Tensor:
    """Entropy of each row over that of a uniform law, `[rows]`."""
    # H = ln Z - E logit needs one exponential a value and no logarithm, which costs more than the head does.
    # an entry that the target masks has p = 0 and must not be 0 times infinity.
    finite = logits.clamp_min(torch.finfo(logits.dtype).min)
    entropy = (finite.logsumexp(dim=-1) - (finite.softmax(dim=-1) * finite).sum(dim=-1)).clamp_min(0.0)
    return entropy / max(math.log(logits.shape[-1]), torch.finfo(torch.float64).tiny)
