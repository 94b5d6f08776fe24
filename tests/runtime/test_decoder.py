"""The runtime's decoder against transformers: logits and taps, every family and rope type."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.attention import SequenceAttention, block_slots, causal_mask
from specdec.config import EngineConfig, ModelConfig, RopeConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import BoundaryTap, load_hf_model
from specdec.models.decoder import ForwardBatch
from specdec.models.layers import packing_available
from specdec.paged_kv import PagedKVCache

# logits of an fp32 model of this size carry rounding of about 1e-6; an error of mathematics is far larger
LOGIT_TOLERANCE = 1e-4
# a residual stream grows to tens; its rounding is relative to its size
TAP_TOLERANCE = 1e-5
LENGTH = 75  # crosses the Mistral window of 32 twice and is no multiple of a block

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "rope_type": "longrope",
        "factor": 8.0,
        "short_factor": [1.0 + 0.1 * i for i in range(12)],
        "long_factor": [2.0 + 0.5 * i for i in range(12)],
        "original_max_position_embeddings": 64,
    },
}


def run_decoder(
    folder: Path, ids: list[int], *, packed: bool = False, chunks: list[int] | None = None
) -> Any:
    """Logits [tokens, vocab] and taps [tokens, N + 1, hidden] of our decoder over paged KV, in chunks."""
    engine = Engine(folder, config=EngineConfig(kv_tokens=256, weights="auto" if packed else "plain"))
    decoder, config = engine.decoder, engine.model_config
    cache = PagedKVCache(
        num_layers=config.num_layers,
        num_blocks=16,
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    table = [5, 3, 9, 0, 12, 7, 8, 2]
    logits, taps = [], []
    start = 0
    for length in chunks or [len(ids)]:
        positions = list(range(start, start + length))
        entry = SequenceAttention(
            query_start=0,
            num_queries=length,
            context_len=start,
            num_new=length,
            slots=block_slots(table, 16, start + length),
            mask=causal_mask(length),
            query_positions=positions,
            new_positions=positions,
        )
        batch = ForwardBatch(
            token_ids=torch.tensor(ids[start : start + length]),
            positions=torch.tensor(positions),
            longest=start + length,
            slots=torch.tensor(cache.slots(table, start, start + length)),
            attention=[entry],
        )
        hidden, tapped = decoder.forward(batch, cache, tuple(range(config.num_layers + 1)))
        logits.append(decoder.logits(hidden))
        taps.append(tapped)
        start += length
    return torch.cat(logits), torch.cat(taps)


def hf_reference(folder: Path, ids: list[int]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    model = load_hf_model(folder)
    boundaries = list(range(model.config.num_hidden_layers + 1))
    with BoundaryTap(model, boundaries) as tap:
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        states = {boundary: tap.states[boundary][0] for boundary in boundaries}
    return logits, states


def some_ids(folder: Path, length: int = LENGTH) -> list[int]:
    vocab = ModelConfig.from_folder(folder).vocab_size
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(3)).tolist()


def assert_same_as_hf(folder: Path, **options: Any) -> None:
    ids = some_ids(folder)
    logits, taps = run_decoder(folder, ids, **options)
    expected, states = hf_reference(folder, ids)
    assert (logits - expected).abs().max() < LOGIT_TOLERANCE
    for boundary, state in states.items():
        assert (taps[:, boundary] - state).abs().max() < TAP_TOLERANCE * state.abs().max(), (
            f"tap {boundary} differs"
        )


def test_logits_and_every_tap_equal_transformers(tiny_any_family: Path) -> None:
    """Design decision 2: both ways of running a target agree, tap by tap (b = N before the final norm)."""
    assert_same_as_hf(tiny_any_family)


def test_chunked_prefill_gives_the_same_logits(tiny_any_family: Path) -> None:
    """A chunk's rows must see earlier chunks, inside the window too."""
    ids = some_ids(tiny_any_family)
    whole, _ = run_decoder(tiny_any_family, ids)
    for chunks in ([1] * 5 + [70], [16, 16, 43], [74, 1]):
        parts, _ = run_decoder(tiny_any_family, ids, chunks=chunks)
        assert (whole - parts).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("tied", [True, False])
def test_head_groups_and_tied_heads_equal_transformers(
    tiny_model_factory: Callable[..., Path], heads: int, kv_heads: int, tied: bool
) -> None:
    assert_same_as_hf(
        tiny_model_factory(
            "llama", num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied
        )
    )


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rope_types_equal_transformers(
    tiny_model_factory: Callable[..., Path], name: str, family: str
) -> None:
    rope = {"rope_theta": 5000.0, "rope_type": "default", **ROPES[name]}
    assert_same_as_hf(tiny_model_factory(family, rope_parameters=rope))


def test_biases_equal_transformers(tiny_model_factory: Callable[..., Path]) -> None:
    assert_same_as_hf(tiny_model_factory("llama", attention_bias=True, mlp_bias=True))
    assert_same_as_hf(tiny_model_factory("qwen3", attention_bias=True))


def test_qwen2_windows_follow_layer_types(tiny_model_factory: Callable[..., Path]) -> None:
    folder = tiny_model_factory("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    assert ModelConfig.from_folder(folder).sliding_windows == (None, None, 16, 16)
    assert_same_as_hf(folder)


def test_old_spelling_of_rope_parameters_is_read_alike() -> None:
    """Faults B14: theta and scaling at the old place must not be lost."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = {"max_position_embeddings": 64, "rope_theta": 7.0, "rope_scaling": scaling}
    new = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 7.0, **scaling}}
    assert RopeConfig.from_dict(old, head_dim=8) == RopeConfig.from_dict(new, head_dim=8)


def test_unknown_rope_type_is_refused_by_name() -> None:
    raw = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "spiral"}}
    with pytest.raises(SpecdecError, match=r"spiral.*supported: default"):
        RopeConfig.from_dict(raw, head_dim=8)


def test_unsupported_architecture_is_refused_by_name() -> None:
    with pytest.raises(SpecdecError, match=r"gpt2.*llama, mistral, qwen2, qwen3"):
        ModelConfig.from_dict({"model_type": "gpt2"})


def test_packed_products_equal_plain_ones_on_fp16_weights(
    tiny_model_factory: Callable[..., Path], tmp_path: Path
) -> None:
    """The packed path computes with exactly the stored weights: no quantisation slips in."""
    folder = shutil.copytree(tiny_model_factory("llama"), tmp_path / "half")
    tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = some_ids(folder)
    packed, _ = run_decoder(folder, ids, packed=True)
    plain, _ = run_decoder(folder, ids, packed=False)
    assert (packed - plain).abs().max() < LOGIT_TOLERANCE
    if packing_available():
        engine = Engine(folder, config=EngineConfig(kv_tokens=256))
        assert engine.decoder.num_packed > 0
        assert engine.decoder.num_plain == 0


def test_weights_that_are_no_fp16_numbers_take_the_plain_path_and_it_is_said(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not packing_available():
        pytest.skip("this torch build has no packed fp16 products")
    engine = Engine(tiny_llama, config=EngineConfig(kv_tokens=256))
    assert engine.decoder.num_packed == 0
    assert "no fp16 numbers" in caplog.text
    assert_same_as_hf(tiny_llama, packed=True)
