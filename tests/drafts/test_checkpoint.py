"""Draft folders: strict loading, nothing written on failure, and what is served is what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.config import RopeConfig
from specdec.drafts.checkpoint import DraftContract, cast_head, load_draft, save_draft
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError
from specdec.models.rope import RotaryEmbedding

VOCAB, IDS = 40, [0, 3, 4, 9, 12, 39]
CONTRACT = DraftContract(target_fingerprint="f" * 64, template_hash="t" * 64, training={"step": 3})
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
}


@pytest.fixture
def target() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(VOCAB, 16, generator=generator), torch.randn(VOCAB, 16, generator=generator)


@pytest.fixture
def make(target: tuple[Tensor, Tensor]) -> Callable[..., Eagle3Head]:
    def build(**overrides: Any) -> Eagle3Head:
        config = Eagle3Config(
            hidden_size=16,
            intermediate_size=24,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            rms_norm_eps=1e-6,
            rope=RopeConfig(rope_type="default", theta=12345.0, head_dim=6, max_position_embeddings=8192),
            vocab_size=VOCAB,
            draft_vocab_size=len(IDS),
            boundaries=(1, 4),
            target_hidden_size=16,
            target_num_layers=4,
        )
        config = replace(config, **overrides)
        vocab = DraftVocab(torch.tensor(IDS), VOCAB) if config.reduced else DraftVocab.full(VOCAB)
        torch.manual_seed(1)
        head = Eagle3Head(config, vocab, *target)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.randn_like(parameter))
        return head

    return build


def _logits(head: Eagle3Head) -> Tensor:
    states = torch.randn(3, head.config.num_taps, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return head.logits(head.fuse(states))


@pytest.mark.parametrize("flags", [{}, {"lm_head": "own"}, {"draft_vocab_size": VOCAB}, {"fc_norm": False}])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_saved_head_is_the_head_after_the_cast(
    flags: dict[str, Any], dtype: str, make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    """Catches a draft measured in fp32 and served in another rounding."""
    head = make(**flags)
    save_draft(tmp_path / "draft", head, CONTRACT, dtype=dtype)
    loaded = load_draft(tmp_path / "draft", *target, target_fingerprint="f" * 64)
    cast_head(head, dtype)
    assert torch.equal(_logits(loaded.head), _logits(head))
    assert loaded.head.config == head.config
    assert loaded.contract == CONTRACT
    assert torch.equal(loaded.head.vocab.ids, head.vocab.ids)


def test_every_draft_argmax_maps_to_its_kept_id(
    make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    """Only the two files are needed; the map is in the weights (Automodel #2447)."""
    save_draft(tmp_path, make(), CONTRACT)
    tensors = load_file(tmp_path / "model.safetensors")
    assert (torch.arange(len(IDS)) + tensors["d2t"]).tolist() == IDS
    assert torch.nonzero(tensors["t2d"]).flatten().tolist() == IDS
    assert load_draft(tmp_path, *target).head.vocab.ids.tolist() == IDS
    assert not [name for name in tensors if "embed" in name or "lm_head" in name]


def test_a_full_vocabulary_has_no_maps(make: Callable[..., Eagle3Head], tmp_path: Path) -> None:
    save_draft(tmp_path, make(draft_vocab_size=VOCAB), CONTRACT)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.q_proj.weight", "fc_norm.1.weight", "d2t"])
def test_a_missing_a_renamed_and_an_extra_tensor_are_each_refused_by_name(
    name: str, make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    """Catches loading with strict off: random weights are served without a word (speculators #1114)."""
    save_draft(tmp_path, make(), CONTRACT)
    good = load_file(tmp_path / "model.safetensors")
    dropped = {key: tensor for key, tensor in good.items() if key != name}
    for broken, words in (
        (dropped, f"tensor {name} is missing"),
        ({**dropped, f"model.{name}": good[name].clone()}, f"tensor {name} is missing"),
        ({**good, "extra.weight": good[name].clone()}, "tensor extra.weight is not part"),
    ):
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(SpecdecError, match=words):
            load_draft(tmp_path, *target)


def test_a_fusion_of_another_number_of_taps_is_refused_with_both_widths(
    make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    save_draft(tmp_path, make(), CONTRACT)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "fc.weight": torch.randn(16, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecdecError, match=r"fc.weight has shape \[16, 48\], expected \[16, 32\]"):
        load_draft(tmp_path, *target)


@pytest.mark.parametrize("d2t", [[0, 2, 2, 6, 8, 35], [0, 2, 1, 6, 8, 34], [0, 2, 2, 6, 8, -3]])
def test_a_map_that_is_not_ascending_or_leaves_the_vocabulary_is_refused(
    d2t: list[int], make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    save_draft(tmp_path, make(), CONTRACT)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "d2t": torch.tensor(d2t)}, tmp_path / "model.safetensors")
    with pytest.raises(SpecdecError, match="d2t"):
        load_draft(tmp_path, *target)


def test_a_reduced_vocabulary_without_a_map_is_refused(
    make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    """Catches the default of ids 0..N-1: the loss looks fine and most tokens cannot be said."""
    save_draft(tmp_path, make(), CONTRACT)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(SpecdecError, match="d2t is missing"):
        load_draft(tmp_path, *target)


def test_a_draft_of_another_target_is_refused(
    make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    save_draft(tmp_path, make(), CONTRACT)
    with pytest.raises(SpecdecError, match="another target"):
        load_draft(tmp_path, *target, target_fingerprint="0" * 64)
    with pytest.raises(SpecdecError, match=r"\[40, 16\], the target has \[41, 16\]"):
        load_draft(tmp_path, torch.randn(41, 16), torch.randn(41, 16))


@pytest.mark.parametrize(
    "key",
    ["fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "draft_vocab_size", "rms_norm_eps"],
)
def test_a_config_without_a_key_that_readers_disagree_about_is_refused(
    key: str, make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    save_draft(tmp_path, make(), CONTRACT)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(SpecdecError, match=key):
        load_draft(tmp_path, *target)


def test_the_config_spells_boundaries_for_both_families_of_readers(
    make: Callable[..., Eagle3Head], tmp_path: Path
) -> None:
    save_draft(tmp_path, make(), CONTRACT)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 4]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3]
    assert raw["num_aux_hidden_states"] == 2
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 12345.0
    assert raw["specdec"]["boundaries"] == [1, 4]
    assert "quantization_config" not in raw


@pytest.mark.parametrize("rope_type", ROPES)
def test_rotary_parameters_survive_the_folder(
    rope_type: str, make: Callable[..., Eagle3Head], target: Any, tmp_path: Path
) -> None:
    """Catches rope_scaling dropped or theta read at one place only: acceptance falls with position."""
    rope = RopeConfig(
        rope_type=rope_type,
        theta=54321.0,
        head_dim=6,
        max_position_embeddings=8192,
        params=dict(ROPES[rope_type]),
    )
    save_draft(tmp_path, make(rope=rope), CONTRACT)
    loaded = load_draft(tmp_path, *target).head
    assert loaded.config.rope == rope
    positions = torch.tensor([0, 63, 5000])
    for ours, source in zip(
        loaded.rope.cos_sin(positions, 5001), RotaryEmbedding(rope).cos_sin(positions, 5001), strict=True
    ):
        assert torch.equal(ours, source)


def test_a_head_that_does_not_fit_its_dtype_writes_nothing(
    make: Callable[..., Eagle3Head], tmp_path: Path
) -> None:
    head = make()
    with torch.no_grad():
        head.fc.weight[0, 0] = 1e6
    with pytest.raises(SpecdecError, match=r"fc\.weight is not finite in float16"):
        save_draft(tmp_path / "draft", head, CONTRACT)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama"}'])
def test_a_folder_that_is_no_draft_is_refused(content: str, target: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"config\.json"):
        load_draft(tmp_path, *target)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecdecError, match=r"config\.json"):
        load_draft(tmp_path, *target)


def test_truncated_weights_are_named(make: Callable[..., Eagle3Head], target: Any, tmp_path: Path) -> None:
    save_draft(tmp_path, make(), CONTRACT)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(SpecdecError, match=r"model\.safetensors"):
        load_draft(tmp_path, *target)
