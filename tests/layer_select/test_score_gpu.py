"""Scores on a card are those of the processor: estimators, CKA, evidence and the probe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.hf import load_hf_model
from specdec.layer_select.config import ScoreConfig
from specdec.layer_select.score import score_layers
from specdec.layer_select.texts import CalibrationText

pytestmark = pytest.mark.gpu

# states differ by fp32 rounding in attention; the probe's overlaps sum hundreds of small differences.
VALUE_TOLERANCE = 1e-3
OVERLAP_TOLERANCE = 1e-2


def test_scores_on_a_card_equal_those_on_the_processor(tiny_llama: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [
        CalibrationText(
            token_ids=tuple(torch.randint(0, 256, (40,), generator=generator).tolist()), first_kept=1
        )
        for _ in range(24)
    ]
    config = ScoreConfig(batch_tokens=200, estimators=("all",), probe_tokens=500, probe_heldout=100)
    found = []
    for device in ("cpu", "cuda"):
        model = load_hf_model(tiny_llama).to(device)
        score_layers(model, texts, config, resume=tmp_path / device)
        # read back: tensors of the file must land where the next run needs them.
        found.append(score_layers(model, texts, config, resume=tmp_path / device))
    cpu, cuda = found
    for name in cpu.names:
        assert torch.allclose(cpu.values(name), cuda.values(name), atol=VALUE_TOLERANCE), name
    assert torch.allclose(cpu.cka(), cuda.cka(), atol=VALUE_TOLERANCE)
    assert torch.allclose(cpu.block_influence(), cuda.block_influence(), atol=VALUE_TOLERANCE)
    assert cpu.probe is not None
    assert cuda.probe is not None
    subsets = [(1, 2, 3), (0, 4)]
    assert torch.allclose(cpu.probe.explained(subsets), cuda.probe.explained(subsets), atol=VALUE_TOLERANCE)
    for one, other in zip(cpu.probe.score(subsets), cuda.probe.score(subsets), strict=True):
        assert one.overlap_second == pytest.approx(other.overlap_second, abs=OVERLAP_TOLERANCE)
