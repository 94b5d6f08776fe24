"""The speculators package itself loads our exports; needs it installed, with transformers 5.19 or older."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafts.checkpoint import StoredDraft
from specdec.drafts.export import make_export, write_export
from specdec.drafts.formats import FORMATS
from specdec.drafts.target_facts import TargetFacts

pytest.importorskip("speculators")
# the required agreement between two implementations in fp32
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True, "norm_before_fc": True, "attention_bias": True, "lm_head": "own"},
        {"draft_vocab_size": 40},
        {"qk_norm": True, "fc_norm": True, "norm_output": True},
        {"embed": "own"},
    ],
)
def test_the_package_computes_the_logits_of_our_head(
    settings: dict[str, Any],
    make_stored: Any,
    facts: TargetFacts,
    tiny_model_factory: Callable[..., Path],
    our_logits: Callable[[StoredDraft], Tensor],
    tmp_path: Path,
) -> None:
    from speculators import SpeculatorModel
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    # the package looks at the folder of its verifier
    verifier = tiny_model_factory(
        "llama",
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=8,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    target = replace(facts, served_as=str(verifier), embed=facts.embed.float(), lm_head=facts.lm_head.float())
    draft, folder = make_stored("float32", **settings), tmp_path / "out"
    form = FORMATS["speculators"]
    write_export(folder, make_export(draft, form, target), draft, form, target, {})

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config).eval()
    assert isinstance(model, Eagle3DraftModel)
    if draft.config.reduced:
        assert torch.equal(model.d2t, draft.tensors["d2t"])

    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0].detach()))
    generator = torch.Generator().manual_seed(9)
    states = torch.randn(9, 7, 16, generator=generator)
    tokens = torch.randint(0, 40, (8,), generator=generator)
    taps = torch.cat([states[boundary] for boundary in model.target_layer_ids], -1)
    torch.compiler.set_stance("force_eager")
    with torch.no_grad():
        model(taps[None], tokens[None, :7], torch.zeros(1, 7, dtype=torch.long), ttt_steps=1)
    ours = our_logits(draft)[:7]
    expected = ours[~ours.isinf()].view(7, -1)
    torch.testing.assert_close(logits[0], expected, rtol=TOLERANCE, atol=TOLERANCE)
