"""In which precision a head is trained where nobody says: what the device is fast in."""

from __future__ import annotations

from dataclasses import replace

import torch

from specdec.models.layers import multiplies_bf16
from specdec.train.config import AUTO, TrainConfig


def settle_dtype(config: TrainConfig, device: str | torch.device) -> TrainConfig:
    """The same options with `compute_dtype` "auto" settled.

    bfloat16 where the device multiplies such numbers, else float32: a processor without them takes several
    times as long for a product of bf16 numbers as for one of fp32 numbers.
    """
    if config.compute_dtype != AUTO:
        return config
    if torch.device(device).type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = multiplies_bf16()
    return replace(config, compute_dtype="bfloat16" if native else "float32")
