"""The learning rate of every optimiser step.

Owns the shapes of schedules. A rate is a function of step, total and options alone, so that a resumed run
needs no state for it. Source of warm-up, stable, decay: MiniCPM (arXiv:2404.06395).
"""

from __future__ import annotations

import math

from specdec.train.config import TrainConfig


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Rate of optimiser step `step` (from 0): linear warm-up, then the schedule; the least at the last step.

    "cosine" falls all the way; "wsd" stays at the top and falls in a line over the last `decay_ratio` of all
    steps.
    """
    warmup = max(1, round(total * config.warmup_ratio))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "wsd":
        decay = min(total - warmup, max(1, round(total * config.decay_ratio)))
        progress = (step + 1 - (total - decay)) / max(1, decay)
        share = 1.0 - min(max(progress, 0.0), 1.0)
    else:
        progress = (step - warmup + 1) / max(1, total - warmup)
        share = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
