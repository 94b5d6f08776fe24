"""Targets of real shapes and random weights, `random:llama-3.1-8b`: speed without anybody's weights.

A random target is a folder with a config, a tokenizer and a seed file in the place of weights; the weights
are made tensor by tensor, on the device that serves them, from the seed and the tensor's name. Nothing is
downloaded and nothing large is written. The numbers are those of half precision, so every storage a real
target's weights may have is open to them. The tokenizer reads bytes and knows a word for every other id, so
any output is a text.

Owns the table of shapes (published configurations, cited beside each), the folder and the weights. Does not
know decoders. Text of such a target means nothing, and its acceptance neither: see `specdec.simulated`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecdecError, writing
from specdec.provenance import RANDOM_WEIGHTS_FILE, cache_home, read_json, write_json_atomic

PREFIX = "random:"
_SCHEMA = "specdec.random-weights/1"
# the width of a fresh Llama's matrices: keeps the residual stream and the logits finite at any depth
_INIT_STD = 0.02

# from meta-llama/Llama-3.1-8B's config.json
_LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}
# from Qwen/Qwen3-4B's config.json
_QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# from HuggingFaceTB/SmolLM2-135M-Instruct's config.json
_SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# a moment's work anywhere: for tests and first tries
_TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 510,
    "eos_token_id": 511,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA_8B,
    "qwen3-4b": _QWEN3_4B,
    "smollm2-135m": _SMOLLM2_135M,
    "tiny": _TINY,
}


def random_names() -> list[str]:
    """What users write: `random:tiny` and the others."""
    return [PREFIX + name for name in SHAPES]


def is_random(folder: str | Path) -> bool:
    """Whether a folder is a random target's."""
    return (Path(folder) / RANDOM_WEIGHTS_FILE).is_file()


def random_target(spelling: str, *, seed: int = 0) -> Path:
    """The folder of a random target, made in the cache if it is not there.

    Raises:
        SpecdecError: no such shape.
    """
    name = spelling.removeprefix(PREFIX)
    if name not in SHAPES:
        raise SpecdecError(f"TARGET ({spelling}) must be one of {', '.join(random_names())}")
    shape = SHAPES[name]
    # a changed table or tokenizer makes another folder, so an old one is never half right
    version = hashlib.sha256(json.dumps([shape, seed, _SCHEMA], sort_keys=True).encode()).hexdigest()[:8]
    folder = cache_home() / "random" / f"{name}-{version}"
    if not is_random(folder):
        with writing(f"random target ({folder})"):
            folder.mkdir(parents=True, exist_ok=True)
            _write_folder(folder, shape, seed)
    return folder


def _write_folder(folder: Path, shape: dict[str, Any], seed: int) -> None:
    config = {"architectures": [_ARCHITECTURES[shape["model_type"]]], "hidden_act": "silu", **shape}
    write_json_atomic(folder / "config.json", {**config, "torch_dtype": "float16"})
    tokenizer, settings = byte_tokenizer(shape["vocab_size"], shape["bos_token_id"], shape["eos_token_id"])
    write_json_atomic(folder / "tokenizer.json", tokenizer)
    write_json_atomic(folder / "tokenizer_config.json", settings)
    # last: a folder without it is made anew
    write_json_atomic(folder / RANDOM_WEIGHTS_FILE, {"schema": _SCHEMA, "seed": seed})


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class RandomWeights:
    """Weights of a random target by name, made on a device: what `WeightReader` is to other targets."""

    def __init__(self, folder: str | Path, device: str) -> None:
        self.folder, self.device = Path(folder), device
        self._seed = int(read_json(self.folder / RANDOM_WEIGHTS_FILE)["seed"])

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`: norms are ones, biases zeros, matrices uniform with a fresh model's width."""
        tensor = torch.empty(shape, dtype=torch.float16, device=self.device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        if name.endswith("bias"):
            return tensor.zero_()
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator(device=self.device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        bound = _INIT_STD * 3**0.5
        return tensor.uniform_(-bound, bound, generator=generator)


def byte_tokenizer(vocab_size: int, bos: int, eos: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tokenizer that reads text as bytes and can write every id.

    Returns:
        The content of `tokenizer.json` (the `tokenizers` library's format) and of `tokenizer_config.json`.
    """
    special = {bos: "<|bos|>", eos: "<|eos|>"}
    words = iter([*_byte_letters(), *(_word(index) for index in range(vocab_size))])
    vocab = {special.get(index) or next(words): index for index in range(vocab_size)}
    added = [
        {"id": index, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, text in sorted(special.items())
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": "{{ bos_token }}{% for message in messages %}"
        "{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    }
    return tokenizer, settings


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _word(index: int) -> str:
    """A nonsense word with a space before it (GPT-2's letter for one), another for every index."""
    letters = ""
    for _ in range(5):
        index, letter = divmod(index, 26)
        letters += chr(ord("a") + letter)
    return "\u0120" + letters
