"""Taps on other architectures, on several devices, and the refusal of stacks that are not all attention."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    BambaConfig,
    FalconMambaConfig,
    JambaConfig,
    Lfm2Config,
    MambaConfig,
    MiniMaxConfig,
    PretrainedConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
)

from specdec import hf
from specdec.errors import SpecdecError

GEMMA = {"query_pre_attn_scalar": 24}


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_boundary_zero_of_gemma_is_its_scaled_embedding(
    family: str, tiny_model_factory: Callable[..., Path]
) -> None:
    """Catches a tap on the embedding table instead of the stream that enters block 0."""
    model = hf.load_hf_model(tiny_model_factory(family, **GEMMA))
    ids = torch.randint(0, 256, (2, 9))
    with hf.BoundaryTap(model, [0]) as tap, torch.no_grad():
        model(ids)
    scaled = model.get_input_embeddings().weight[ids] * model.config.hidden_size**0.5
    # transformers rounds the factor to the weights' precision; fp32 here.
    assert torch.allclose(tap.states[0], scaled, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", GEMMA),
        ("gemma3_text", GEMMA),
        ("gpt_neox", {}),
        ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
        ("cohere", {}),
        ("olmo2", {}),
        ("mixtral", {"num_local_experts": 4}),
    ],
)
def test_taps_of_other_families_equal_output_hidden_states_before_the_norm(
    family: str, settings: dict[str, Any], tiny_model_factory: Callable[..., Path]
) -> None:
    """Sandwich norms, scaled embeddings and residuals, parallel blocks, experts."""
    model = hf.load_hf_model(tiny_model_factory(family, **settings))
    num_layers = hf.num_decoder_layers(model)
    with hf.BoundaryTap(model, range(num_layers + 1)) as tap, torch.no_grad():
        output = model(torch.randint(0, 256, (2, 21)), output_hidden_states=True)
    for boundary in range(num_layers):
        assert torch.equal(tap.states[boundary], output.hidden_states[boundary])
    normed = hf.final_norm(model)(tap.states[num_layers])
    assert torch.equal(normed, output.hidden_states[num_layers])
    assert not torch.allclose(tap.states[num_layers], normed)


def test_a_target_spread_over_devices_has_the_taps_of_a_whole_one(tiny_llama: Path) -> None:
    """Two layers lie on a disk-like device that accelerate fetches from: their weights are not here."""
    from accelerate import cpu_offload

    ids = torch.randint(0, 256, (1, 13))
    states = []
    for spread in (False, True):
        model = hf.load_hf_model(tiny_llama)
        if spread:
            cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
            cpu_offload(model.model.layers[2], execution_device=torch.device("cpu"))
            assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
        assert hf.input_device(model).type == "cpu"
        with hf.BoundaryTap(model, range(5)) as tap:
            hf.run_decoder(model, ids)
        states.append(tap.states)
    assert all(torch.equal(states[0][b], states[1][b]) for b in range(5))


@pytest.mark.parametrize("device_map", ["auto", "sequential", {"": "cpu"}])
def test_device_maps_give_the_taps_of_a_plain_load_and_unknown_ones_are_refused(
    tiny_llama: Path, device_map: Any
) -> None:
    ids = torch.randint(0, 256, (1, 13))
    states = []
    for chosen in (None, device_map):
        model = hf.load_hf_model(tiny_llama, device_map=chosen)
        with hf.BoundaryTap(model, range(5)) as tap:
            hf.run_decoder(model, ids.to(hf.input_device(model)))
        states.append(tap.states)
    assert all(torch.allclose(states[0][b], states[1][b].cpu(), atol=1e-3) for b in range(5))
    with pytest.raises(SpecdecError, match=r"device_map \(everywhere\) must be one of auto, balanced"):
        hf.load_hf_model(tiny_llama, device_map="everywhere")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (MambaConfig(), "mamba"),
        (FalconMambaConfig(), "mamba"),
        (JambaConfig(), "mamba"),
        (BambaConfig(), "mamba2"),
        (Zamba2Config(), "mamba2|hybrid"),
        (Lfm2Config(), "conv"),
        (MiniMaxConfig(), "linear_attention"),
        (RecurrentGemmaConfig(), "recurrent"),
        (AutoConfig.for_model("qwen3_next"), "linear_attention"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_hybrid_and_recurrent_targets_are_refused_with_the_kinds_of_their_layers(
    config: PretrainedConfig, kind: str
) -> None:
    with pytest.raises(SpecdecError, match=rf"\({config.model_type}\) has layers of kind [\w, ]*({kind})"):
        hf.check_supported(config)


class ShortConvolution(nn.Module):
    """A token mixer under a name no list knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3)


def test_a_recurrent_mixer_of_an_unknown_name_is_found_by_its_convolution() -> None:
    """Catches next year's hybrid: the lists above name only what exists today."""
    net = nn.Module()
    net.config = PretrainedConfig(num_hidden_layers=2)
    net.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
    hf._refuse_convolutions(net)
    net.layers[1].append(ShortConvolution())
    with pytest.raises(SpecdecError, match="layers of kind ShortConvolution"):
        hf._refuse_convolutions(net)
