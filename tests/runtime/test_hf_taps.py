"""Taps read the boundary they name (faults B01, B02, B03, aliasing); chats render with one BOS."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, MambaConfig, PretrainedConfig, T5Config

from specdec import hf
from specdec.errors import SpecdecError


class AddOne(nn.Module):
    """A decoder layer that adds 1 to the residual stream in place, like a fused residual add."""

    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, hidden_states: Tensor) -> Any:
        hidden_states += 1
        return (hidden_states, None) if self.as_tuple else hidden_states


class TimesThousand(nn.Module):
    """A final norm whose use shows in the values."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * 1000


class CountNet(nn.Module):
    """A target whose captured values say which boundary they are (0..L) and whether the norm ran."""

    def __init__(self, num_layers: int, *, as_tuple: bool = False, by_keyword: bool = False) -> None:
        super().__init__()
        self.config = PretrainedConfig(num_hidden_layers=num_layers)
        self.layers = nn.ModuleList(AddOne(as_tuple) for _ in range(num_layers))
        self.norm = TimesThousand()
        self.by_keyword = by_keyword

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = torch.zeros(*input_ids.shape, 2)
        for layer in self.layers:
            output = layer(hidden_states=hidden) if self.by_keyword else layer(hidden)
            hidden = output[0] if isinstance(output, tuple) else output
        return self.norm(hidden)


IDS = torch.zeros(1, 3, dtype=torch.long)


def tapped_values(net: CountNet, boundaries: list[int]) -> dict[int, float]:
    with hf.BoundaryTap(net, boundaries) as tap:
        net(IDS)
    assert all((state == state.flatten()[0]).all() for state in tap.states.values())
    return {boundary: state.flatten()[0].item() for boundary, state in tap.states.items()}


@pytest.mark.parametrize("as_tuple", [False, True])
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("boundaries", [[2, 18, 33], [24, 30, 36], [0], [36], [0, 1, 17, 35, 36]])
def test_tap_reads_exactly_the_boundaries_it_names(
    boundaries: list[int], by_keyword: bool, as_tuple: bool
) -> None:
    """Catches an id read as a layer output instead of a boundary (B01) and a lost last boundary (B03)."""
    net = CountNet(36, as_tuple=as_tuple, by_keyword=by_keyword)
    assert tapped_values(net, boundaries) == {b: float(b) for b in boundaries}


@pytest.mark.parametrize("num_layers", range(1, 13))
def test_every_boundary_of_a_small_target_can_be_tapped_before_the_norm(num_layers: int) -> None:
    """Catches B02: boundary N valued 1000 N would be after the final norm."""
    assert tapped_values(CountNet(num_layers), list(range(num_layers + 1))) == {
        b: float(b) for b in range(num_layers + 1)
    }


@pytest.mark.parametrize("boundaries", [[5], [-1], [0, 4, 9]])
def test_boundary_out_of_range_is_refused_with_the_range(boundaries: list[int]) -> None:
    with pytest.raises(SpecdecError, match=r"must be in 0\.\.4"):
        hf.BoundaryTap(CountNet(4), boundaries)


@pytest.mark.parametrize("boundaries", [[2, 2], [3, 1], []])
def test_duplicate_unsorted_or_no_boundaries_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(SpecdecError, match="boundaries"):
        hf.BoundaryTap(CountNet(4), boundaries)


def test_states_of_an_earlier_forward_stay_as_they_were() -> None:
    """Catches aliasing, both of the stream that layers add to in place and of the dict between forwards."""
    net = CountNet(4)
    with hf.BoundaryTap(net, [1, 3]) as tap:
        net(IDS)
        first = tap.states
        kept = {b: state.clone() for b, state in first.items()}
        tap.states[1].add_(50)
        net(IDS)
        assert tap.states is not first
        assert tap.states[1].unique().item() == 1
    assert torch.equal(first[3], kept[3])


def test_closed_tap_leaves_no_hook_behind() -> None:
    net = CountNet(4)
    with pytest.raises(RuntimeError, match="boom"), hf.BoundaryTap(net, [0, 4]) as tap:
        raise RuntimeError("boom")
    net(IDS)
    assert tap.states == {}


def test_taps_equal_output_hidden_states_and_the_last_is_before_the_norm(tiny_any_family: Path) -> None:
    model = hf.load_hf_model(tiny_any_family)
    ids = torch.randint(0, 256, (2, 40))
    num_layers = hf.num_decoder_layers(model)
    with hf.BoundaryTap(model, range(num_layers + 1)) as tap, torch.no_grad():
        output = model(ids, output_hidden_states=True)
    for boundary in range(num_layers):
        assert torch.equal(tap.states[boundary], output.hidden_states[boundary])
    last = tap.states[num_layers]
    assert not torch.allclose(last, output.hidden_states[num_layers])
    assert torch.equal(hf.final_norm(model)(last), output.hidden_states[num_layers])
    assert torch.equal(hf.output_head(model)(hf.final_norm(model)(last)), output.logits)


def test_run_decoder_gives_the_states_of_a_full_forward(tiny_llama: Path) -> None:
    model = hf.load_hf_model(tiny_llama)
    ids = torch.randint(0, 256, (2, 17))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with hf.BoundaryTap(model, [0, 2, 4]) as tap, torch.no_grad():
        model(ids, attention_mask=mask)
        full = tap.states
        hf.run_decoder(model, ids, mask)
    assert all(torch.equal(full[b], tap.states[b]) for b in (0, 2, 4))


def test_layers_that_return_tuples_under_another_name_are_found() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=16)).eval()
    ids = torch.randint(0, 32, (1, 8))
    with hf.BoundaryTap(model, range(4)) as tap, torch.no_grad():
        output = model(ids, output_hidden_states=True)
    assert all(torch.equal(tap.states[b], output.hidden_states[b]) for b in range(3))
    assert torch.equal(hf.final_norm(model)(tap.states[3]), output.hidden_states[3])


def test_a_list_of_the_same_length_inside_a_layer_is_not_taken_for_the_layers() -> None:
    net = CountNet(2)
    net.layers[0].experts = nn.ModuleList([nn.Identity(), nn.Identity()])
    assert hf.decoder_layers(net) is net.layers


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "mamba"),
        (BertConfig(architectures=["BertForMaskedLM"]), "not a causal LM"),
    ],
)
def test_targets_without_rewindable_decoder_layers_are_refused_by_name(
    config: PretrainedConfig, word: str
) -> None:
    with pytest.raises(SpecdecError, match=word):
        hf.check_supported(config)


def test_linear_attention_layers_are_refused_by_name(tiny_model_factory: Callable[..., Path]) -> None:
    config = hf.AutoConfig.from_pretrained(tiny_model_factory("qwen3"))
    config.layer_types = ["linear_attention", "full_attention"] * 2
    with pytest.raises(SpecdecError, match="linear_attention"):
        hf.check_supported(config)


def test_missing_foreign_and_incomplete_folders_are_errors_naming_the_folder(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with pytest.raises(SpecdecError, match="absent"):
        hf.load_hf_model(tmp_path / "absent")
    with pytest.raises(SpecdecError, match=r"config\.json"):
        hf.load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(SpecdecError, match=str(tmp_path)):
        hf.load_hf_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tiny_llama / "model.safetensors").read_bytes()[:500])
    with pytest.raises(SpecdecError, match=str(tmp_path)):
        hf.load_hf_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(SpecdecError, match=str(tmp_path)):
        hf.load_hf_model(tmp_path)


def test_weights_that_the_folder_lacks_are_not_made_up(tmp_path: Path, tiny_llama: Path) -> None:
    """Catches transformers' random initialisation of missing weights."""
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(SpecdecError, match=r"layers\.1\.mlp\.up_proj"):
        hf.load_hf_model(tmp_path)


def test_unknown_dtype_is_refused_with_the_known_ones(tiny_llama: Path) -> None:
    with pytest.raises(SpecdecError, match="float32, float16, bfloat16"):
        hf.load_hf_model(tiny_llama, dtype="fp8")


CHAT = [{"role": "user", "content": "hi"}]


def test_rendered_chat_has_one_bos_though_template_and_tokenizer_both_add_it(tiny_tokenizer: Any) -> None:
    """Catches B26: the template writes the BOS and the tokenizer adds it again."""
    bos = tiny_tokenizer.bos_token_id
    assert hf.render_chat(tiny_tokenizer, CHAT, add_generation_prompt=True).count(bos) == 1
    assert hf.encode_text(tiny_tokenizer, "hi").count(bos) == 1
    assert hf.encode_text(tiny_tokenizer, "<|bos|>hi").count(bos) == 1


def test_prompt_answer_and_end_of_turn_are_a_prefix_of_the_whole_chat(tiny_tokenizer: Any) -> None:
    """Catches B25: a training prompt that differs from the serving prompt."""
    whole = [*CHAT, {"role": "assistant", "content": "the end"}]
    prompt = hf.render_chat(tiny_tokenizer, CHAT, add_generation_prompt=True)
    answer = tiny_tokenizer("the end<|eot|>", add_special_tokens=False)["input_ids"]
    assert hf.render_chat(tiny_tokenizer, whole, add_generation_prompt=False) == prompt + answer


def test_chat_without_a_template_says_to_pass_plain_prompts(tiny_tokenizer: Any) -> None:
    template = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = None
    try:
        assert hf.template_hash(tiny_tokenizer) == "none"
        with pytest.raises(SpecdecError, match="plain prompts"):
            hf.render_chat(tiny_tokenizer, CHAT, add_generation_prompt=True)
    finally:
        tiny_tokenizer.chat_template = template
    assert len(hf.template_hash(tiny_tokenizer)) == 64


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "hi"}, {"role": "user", "content": None}])
def test_a_message_without_role_or_text_is_refused_not_rendered_as_nothing(
    tiny_tokenizer: Any, message: dict[str, Any]
) -> None:
    with pytest.raises(SpecdecError, match="message 1"):
        hf.render_chat(tiny_tokenizer, [*CHAT, message], add_generation_prompt=True)


def test_messages_the_template_refuses_are_a_users_error(tiny_tokenizer: Any) -> None:
    template = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(SpecdecError, match="roles must alternate"):
            hf.render_chat(tiny_tokenizer, CHAT, add_generation_prompt=True)
    finally:
        tiny_tokenizer.chat_template = template
