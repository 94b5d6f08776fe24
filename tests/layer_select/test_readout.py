"""Logits come out as the target makes them; taps that would miss part of the stream are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from specdec import hf
from specdec.errors import SpecdecError
from specdec.layer_select import readout
from specdec.layer_select.readout import Readout, check_stream

# a block of rows and single rows differ by the order of fp32 sums.
TOLERANCE = 1e-4
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {}),
    ("gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}),
    ("gemma3_text", {"query_pre_attn_scalar": 24}),
    ("granite", {"logits_scaling": 5.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    ("cohere", {"logit_scale": 0.3}),
    ("gpt_neox", {}),
    ("olmo2", {}),
    ("phi3", {}),
]


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_states_of_the_last_boundary_give_the_targets_own_logits(
    family: str,
    settings: dict[str, Any],
    tiny_model_factory: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches soft-capping and scaling left out: they change entropies, not rankings."""
    model = hf.load_hf_model(tiny_model_factory(family, **settings))
    check_stream(model)
    last = hf.num_decoder_layers(model)
    ids = torch.randint(0, 256, (1, 11))
    with hf.BoundaryTap(model, [last]) as tap, torch.no_grad():
        expected = model(ids).logits[0]
    reader = Readout(model)
    # blocks of 4 rows: the last one is short.
    monkeypatch.setattr(readout, "BLOCK_ELEMENTS", 4 * reader.vocab_size)
    states = tap.states[last][0]
    assert torch.allclose(reader.over_logits(states, lambda logits: logits), expected, atol=TOLERANCE)
    assert torch.allclose(reader.logits_of_features(reader.features(states)), expected, atol=TOLERANCE)
    assert not model.base_model._forward_hooks
    assert not hf.final_norm(model)._forward_hooks
    assert not hf.final_norm(model)._forward_pre_hooks


class Layer(nn.Module):
    """A decoder layer that adds its number, keeping the residual apart when asked."""

    def __init__(self, number: int, apart: bool) -> None:
        super().__init__()
        self.number, self.apart = float(number), apart

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        if not self.apart:
            return hidden_states + self.number
        stream = hidden_states if residual is None else hidden_states + residual
        return torch.full_like(stream, self.number), stream


class FusedNorm(nn.Module):
    """A norm that adds the residual it is given first."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        return (hidden_states if residual is None else hidden_states + residual) * 1000


class Stack(nn.Module):
    """A decoder of `Layer`s; `between` is applied to the stream after layer 1, `before_norm` at the end."""

    def __init__(self, *, apart: bool = False, between: float = 1.0, before_norm: float = 1.0) -> None:
        super().__init__()
        self.config = PretrainedConfig(num_hidden_layers=3)
        self.embed = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(Layer(number, apart) for number in (1, 2, 3))
        self.norm = FusedNorm()
        self.between, self.before_norm = between, before_norm

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        hidden, residual = self.embed(input_ids), None
        for index, layer in enumerate(self.layers):
            output = layer(hidden, residual)
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            if index == 0:
                hidden = hidden * self.between
        return self.norm(hidden * self.before_norm, residual)


def test_a_residual_that_layers_keep_apart_is_part_of_every_tap() -> None:
    """Catches a tap of what the last layer adds instead of the stream."""
    ids = torch.tensor([[3, 5, 7]])
    states = []
    for apart in (False, True):
        torch.manual_seed(0)
        model = Stack(apart=apart)
        check_stream(model)
        with hf.BoundaryTap(model, range(4)) as tap, torch.no_grad():
            model(ids)
        states.append(tap.states)
    for boundary in range(4):
        assert torch.allclose(states[0][boundary], states[1][boundary])
    assert not torch.allclose(states[0][3], states[0][2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"between": 2.0}, "Layer at boundary 1 something else"),
        ({"before_norm": 2.0}, "FusedNorm at boundary 3 something else"),
    ],
)
def test_a_stream_that_is_changed_outside_the_layers_is_refused_with_its_boundary(
    settings: dict[str, float], message: str
) -> None:
    with pytest.raises(SpecdecError, match=message):
        check_stream(Stack(**settings))


def test_layers_with_several_streams_are_refused() -> None:
    model = Stack()
    model.layers[1].forward = lambda hidden, residual: hidden.unsqueeze(0).repeat(4, 1, 1, 1)
    with pytest.raises(SpecdecError, match=r"one tensor \[batch, tokens, hidden\]"), torch.no_grad():
        check_stream(model)
