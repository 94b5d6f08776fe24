"""A tiny GGUF file, made with the gguf package's own writer from a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

# every row length is a multiple of Q8_0's block of 32
TINY: dict[str, Any] = {
    "family": "llama",
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}


def write_gguf(path: Path, folder: Path, pre_tokenizer: str | None = "smollm") -> Path:
    """Write a tiny Llama as GGUF: matrices as Q8_0, its byte-level tokenizer, a chat template."""
    import gguf

    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = {
        **tokenizer["model"]["vocab"],
        **{item["content"]: item["id"] for item in tokenizer["added_tokens"]},
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    if pre_tokenizer:
        writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(sorted(vocab, key=lambda token: vocab[token]))
    writer.add_token_types(
        [3 if token.startswith("<|") else 1 for token in sorted(vocab, key=lambda t: vocab[t])]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(vocab["<|eot|>"])
    writer.add_chat_template("{{ bos_token }}{{ messages[0]['content'] }}")
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in parts.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        if data.ndim > 1:
            quantised = gguf.quantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(names[name], quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(names[name], data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_model_factory: Callable[..., Path]) -> Path:
    """A whole tiny GGUF."""
    folder = tiny_model_factory(**TINY)
    return write_gguf(tmp_path / "tiny.gguf", folder)


@pytest.fixture
def gguf_of_rule(tmp_path: Path, tiny_model_factory: Callable[..., Path]) -> Callable[[str | None], Path]:
    """Call with a pre-tokenizer's name: the tiny GGUF saying so."""
    folder = tiny_model_factory(**TINY)

    def make(rule: str | None) -> Path:
        return write_gguf(tmp_path / f"{rule or 'none'}.gguf", folder, rule)

    return make


def _answers(name: str, committed: list[int], seconds: float) -> list[dict[str, Any]]:
    steps = [10 if name != "plain" else count for count in committed]
    return [
        {
            "id": f"p{index}",
            "category": "aabb"[index],
            "tokens": 20,
            "seconds": [seconds],
            "verify_steps": verified,
            "committed": count,
            "accepted": 0 if name == "plain" else count - 10,
            "drafted": 0 if name == "plain" else 20,
        }
        for index, (count, verified) in enumerate(zip(committed, steps, strict=True))
    ]


def _row(name: str, rate: float, acceptance: dict[str, Any], **more: Any) -> dict[str, Any]:
    counted = {
        "verify_steps": 40,
        "acceptance_rate_per_node": acceptance["acceptance_rate"],
        "nodes_per_depth": acceptance["steps_per_depth"],
        "acceptance_per_depth": [],
        "acceptance_per_depth_conditional": [],
    }
    return {
        "setting": name,
        "rule": "greedy",
        "lossless": True,
        "prompts": 4,
        "tokens": 80,
        "tokens_per_second": rate,
        "acceptance": counted | acceptance,
        **more,
    }


def made_run() -> dict[str, Any]:
    """A bench of four prompts in two categories whose figures are counted by hand."""
    plain = {
        "drafted": 0,
        "accepted": 0,
        "committed": 40,
        "acceptance_length": 1.0,
        "acceptance_rate": None,
        "steps_per_depth": [],
        "accepted_per_depth": [],
        "acceptance_length_interval": [1.0, 1.0],
        "acceptance_length_by_category": {"a": 1.0, "b": 1.0},
    }
    drafted = {
        "drafted": 80,
        "accepted": 30,
        "committed": 60,
        "acceptance_length": 1.5,
        "acceptance_rate": 0.4,
        "steps_per_depth": [40, 40],
        "accepted_per_depth": [20, 10],
        "acceptance_per_depth": [0.5, 0.25],
        "acceptance_per_depth_conditional": [0.5, 0.5],
        "acceptance_length_interval": [1.35, 1.65],
        "acceptance_length_by_category": {"a": 1.4, "b": 1.6},
    }
    gain = {"speedup": 2.0, "speedup_interval": [1.9, 2.1], "speedup_by_category": {}, "identical": 3}
    return {
        "schema": "specdec.bench/1",
        "target": "tiny",
        "data": "made",
        "settings": [_row("plain", 20.0, plain), _row("draft chain:2", 40.0, drafted, **gain)],
        "run": {
            "schema": "specdec.run/1",
            "command": ["specdec", "bench", "tiny", "--data", "my prompts.jsonl"],
            "started_at": "2026-12-01T00:00:00+00:00",
            "versions": {"python": "3.11", "torch": "2.13"},
            "git": {"revision": "abc123", "dirty": True},
            "hardware": {"cpu": "A CPU", "cores": 2, "memory_gib": 4.0, "torch_threads": 1, "gpus": []},
            "dtype": "float32",
            "seeds": {"sampling": 0},
            "template_hash": "t",
            "data_hash": "d",
            "defaults": {"max_tokens": 20, "batch_size": 1, "temperature": 0.0},
            "extra": {},
        },
        "definitions": {},
        "per_prompt": {
            "plain": _answers("plain", [10, 10, 10, 10], 1.0),
            "draft chain:2": _answers("draft", [13, 15, 15, 17], 0.5),
        },
    }


@pytest.fixture
def bench_record(tmp_path: Path, valid_record: Callable[[dict[str, Any]], None]) -> Callable[..., Path]:
    """Call with (change=None, name="bench.json"): the made run as a file, after `change` had it in hand.

    Without a change it follows the published schema.
    """

    def make(change: Callable[[dict[str, Any]], Any] | None = None, name: str = "bench.json") -> Path:
        body = made_run()
        if change is None:
            valid_record(body)
        else:
            change(body)
        path = tmp_path / name
        path.write_text(json.dumps(body))
        return path

    return make
