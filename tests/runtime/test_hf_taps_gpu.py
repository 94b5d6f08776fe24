"""Taps on a card: selection and training read there what they read on the processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.hf import BoundaryTap, load_hf_model

pytestmark = pytest.mark.gpu

# fp32 products on a card may use TF32 (10 bits of mantissa): relative error about 1e-3 a product
TAP_TOLERANCE = 5e-3


def test_taps_on_a_card_equal_those_on_the_processor(tiny_llama: Path) -> None:
    ids = torch.arange(2, 42)[None]
    states = {}
    for device in ("cpu", "cuda"):
        model = load_hf_model(tiny_llama).to(device)
        boundaries = [0, 2, 4]
        with BoundaryTap(model, boundaries) as tap:
            model(input_ids=ids.to(device))
            states[device] = [tap.states[boundary].cpu() for boundary in boundaries]
    for cpu, cuda in zip(states["cpu"], states["cuda"], strict=True):
        assert (cpu - cuda).abs().max() < TAP_TOLERANCE * cpu.abs().max()
