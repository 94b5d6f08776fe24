"""Random targets and random heads: real shapes, the same numbers each time, text for every id."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.config import EngineConfig, ModelConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.hf import load_hf_model
from specdec.hub import resolve_target
from specdec.provenance import folder_fingerprint
from specdec.random_target import SHAPES, RandomWeights, byte_tokenizer, random_target
from specdec.sampling_params import SamplingParams

# millions of weights, as the models' cards give them
PARAMETERS = {"llama-3.1-8b": 8030, "qwen3-4b": 4022, "smollm2-135m": 134.5}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_published_number_of_weights(name: str) -> None:
    """Catches a wrong layer count, width or tie: the speed of another model would be measured."""
    config = ModelConfig.from_dict(SHAPES[name])
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size + 2)
    layer += 2 * config.head_dim if config.qk_norm else 0
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    total = layer * config.num_layers + tables + config.hidden_size
    assert total / 1e6 == pytest.approx(PARAMETERS[name], rel=0.002)


def test_weights_are_a_function_of_seed_and_name(specdec_home: Path) -> None:
    folder = random_target("random:tiny")
    first, again = RandomWeights(folder, "cpu"), RandomWeights(folder, "cpu")
    one = first.get("model.layers.0.mlp.up_proj.weight", (128, 64))
    first.get("lm_head.weight", (512, 64))
    assert torch.equal(one, again.get("model.layers.0.mlp.up_proj.weight", (128, 64)))
    assert not torch.equal(one, again.get("model.layers.1.mlp.up_proj.weight", (128, 64)))
    assert float(one.float().std()) == pytest.approx(0.02, rel=0.05)
    assert bool((again.get("model.norm.weight", (64,)) == 1).all())
    other = random_target("random:tiny", seed=1)
    assert folder_fingerprint(other) != folder_fingerprint(folder)
    assert not torch.equal(
        one, RandomWeights(other, "cpu").get("model.layers.0.mlp.up_proj.weight", (128, 64))
    )


def test_a_random_target_decodes_text_and_speculates_exactly(specdec_home: Path) -> None:
    prompt = [{"role": "user", "content": "Grüße, 漢字"}]
    params = SamplingParams(max_tokens=24)
    plain = Engine("random:tiny", config=EngineConfig(kv_tokens=1024))
    expected = plain.generate([prompt], params)[0]
    assert len(expected.text) > len(expected.token_ids)
    for draft in ("random", "ngram+random"):
        spec = SpecConfig(max_depth=2, top_k=2, max_nodes=4, adaptive=False)
        engine = Engine(plain, draft=draft, config=EngineConfig(kv_tokens=1024, spec=spec))
        result = engine.generate([prompt], params)[0]
        assert result.token_ids == expected.token_ids
        assert result.stats.drafted > 0


def test_every_id_is_a_text_and_every_text_comes_back(specdec_home: Path) -> None:
    tokenizer = Engine("random:tiny", config=EngineConfig(kv_tokens=64)).encoder.tokenizer
    text = "plain, ümlaut, 漢字 \t\n <|x|>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len({tokenizer.decode([index]) for index in range(260, 510)}) == 250
    assert tokenizer.decode([510, 511], skip_special_tokens=True) == ""


@pytest.mark.parametrize("name", SHAPES)
def test_the_vocabulary_is_the_shape_s(name: str) -> None:
    shape = SHAPES[name]
    content, _ = byte_tokenizer(shape["vocab_size"], shape["bos_token_id"], shape["eos_token_id"])
    vocab = content["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(shape["vocab_size"]))
    assert vocab["<|eos|>"] == shape["eos_token_id"]


def test_names_are_resolved_or_refused_with_the_list(specdec_home: Path) -> None:
    folder = resolve_target("random:tiny")
    assert resolve_target(str(folder)) == folder
    with pytest.raises(SpecdecError, match="random:qwen3-4b"):
        resolve_target("random:gpt-5")
    with pytest.raises(SpecdecError, match="random:tiny"):
        resolve_target("no-such-name")
    with pytest.raises(SpecdecError, match="real folder"):
        load_hf_model(folder)
