"""Configuration of the runtime: the target's architecture, the engine, and speculation.

Owns every default of the runtime. Reads the target's `config.json` directly, in both spellings that
transformers has used for rotary parameters, so that serving does not depend on a transformers version.
Knows nothing of tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.provenance import read_json

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
KERNEL_SETTINGS = ("auto", "triton", "reference")
WEIGHTS = ("auto", "fp16-packed", "bf16-packed", "plain", "int8")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters in one canonical spelling.

    `params` holds what the rope type needs beyond theta (factor, low_freq_factor, ...), under the
    names of the Hugging Face configuration.
    """

    rope_type: str
    theta: float
    head_dim: int
    max_position_embeddings: int
    params: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, head_dim: int) -> RopeConfig:
        """Read theta and scaling from a Hugging Face config dict (old or transformers-5 spelling).

        Raises:
            SpecdecError: the rope type is not supported, or rotates only a part of each head.
        """
        merged: dict[str, Any] = dict(raw.get("rope_scaling") or {})
        merged.update(raw.get("rope_parameters") or {})
        theta = float(merged.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
        rope_type = str(merged.pop("rope_type", None) or merged.pop("type", None) or "default")
        merged.pop("type", None)
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise SpecdecError(
                f"rope_type ({rope_type!r}) is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        partial = float(merged.pop("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0))
        if partial != 1.0:
            raise SpecdecError(
                f"partial_rotary_factor ({partial}) must be 1.0: partial rotation is not supported"
            )
        max_positions = int(raw["max_position_embeddings"])
        original = merged.get("original_max_position_embeddings") or raw.get(
            "original_max_position_embeddings"
        )
        if original is not None:
            merged["original_max_position_embeddings"] = int(original)
        return cls(
            rope_type=rope_type,
            theta=theta,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            params=merged,
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the decoder needs to know of a target, from its Hugging Face `config.json`."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def max_position_embeddings(self) -> int:
        return self.rope.max_position_embeddings

    def served_length(self, wanted: int | None) -> int:
        """The longest text to serve: what is wanted, else the whole context.

        Raises:
            SpecdecError: more than the context.
        """
        limit = self.max_position_embeddings
        if wanted is not None and wanted > limit:
            raise SpecdecError(f"max_model_len ({wanted}) exceeds the target's context ({limit})")
        return wanted or limit

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for the EOS list) of a target folder.

        Raises:
            SpecdecError: a missing or unreadable config, or an architecture the runtime lacks.
        """
        path, generation = Path(folder) / "config.json", Path(folder) / "generation_config.json"
        if not path.exists():
            raise SpecdecError(f"target folder ({folder}) has no config.json; give a Hugging Face folder")
        raw = read_json(path)
        eos = raw.get("eos_token_id")
        if generation.exists():
            eos = read_json(generation).get("eos_token_id", eos)
        try:
            return cls.from_dict(raw, eos=eos)
        except (KeyError, TypeError) as error:
            raise SpecdecError(f"{path} lacks or misstates {error}; it is not a complete config") from error

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, eos: int | list[int] | None = None) -> ModelConfig:
        """Build from a Hugging Face config dict; `eos` overrides the dict's own EOS ids."""
        model_type = str(raw.get("model_type"))
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise SpecdecError(
                f"model_type ({model_type!r}) cannot be served by this runtime; supported: "
                f"{', '.join(SUPPORTED_MODEL_TYPES)}. Layer selection and training still work on it"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise SpecdecError(f"hidden_act ({raw['hidden_act']!r}) must be 'silu'")
        if raw.get("quantization_config"):
            raise SpecdecError(
                "a quantised target cannot be served; run `specdec pull` on it to convert its weights"
            )
        heads = int(raw["num_attention_heads"])
        head_dim = int(raw.get("head_dim") or raw["hidden_size"] // heads)
        layers = int(raw["num_hidden_layers"])
        attention_bias = bool(raw.get("attention_bias", False))
        ids = raw.get("eos_token_id") if eos is None else eos
        return cls(
            model_type=model_type,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope=RopeConfig.from_dict(raw, head_dim=head_dim),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2" or (attention_bias and model_type in ("llama", "qwen3")),
            out_bias=attention_bias and model_type in ("llama", "qwen3"),
            mlp_bias=bool(raw.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            sliding_windows=_sliding_windows(raw, model_type, layers),
            eos_token_ids=() if ids is None else tuple(ids) if isinstance(ids, list) else (int(ids),),
            bos_token_id=raw.get("bos_token_id"),
        )


def _sliding_windows(raw: dict[str, Any], model_type: str, layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if window is None or model_type == "llama":
        return (None,) * layers
    if model_type == "mistral":
        return (int(window),) * layers
    if not raw.get("use_sliding_window", False):
        return (None,) * layers
    types = raw.get("layer_types")
    if types is None:
        first = int(raw.get("max_window_layers", layers))
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True, kw_only=True)
class SpecConfig:
    """How a sequence speculates.

    A step drafts a tree of at most `max_nodes` nodes, `max_depth` deep, keeping `top_k` children of
    a node while growing (top_k = 1 is a chain). `adaptive` lets a sequence stop speculating while
    its measured acceptance does not pay for the rows it verifies (see `specdec.speculation`).
    """

    max_depth: int = 4
    top_k: int = 1
    max_nodes: int = 4
    adaptive: bool = True
    ngram_max: int = 4
    ngram_min: int = 2

    def __post_init__(self) -> None:
        _check_types(self)
        _check_range("max_depth", self.max_depth, 1, 32)
        _check_range("top_k", self.top_k, 1, 32)
        _check_range("max_nodes", self.max_nodes, 1, 64)
        if self.max_nodes < self.max_depth:
            raise SpecdecError(
                f"max_nodes ({self.max_nodes}) must be at least max_depth ({self.max_depth}); "
                "raise the one or lower the other"
            )
        _check_range("ngram_max", self.ngram_max, 1, 16)
        _check_range("ngram_min", self.ngram_min, 1, self.ngram_max)

    def check_simulated(self, length: float) -> None:
        """Refuse a simulated acceptance length that no rate gives at this depth.

        Raises:
            SpecdecError: outside 1 .. max_depth + 1.
        """
        if not 1 <= length <= self.max_depth + 1:
            raise SpecdecError(
                f"simulate_acceptance ({length:g}) must be in 1..{self.max_depth + 1}: a step over drafts of "
                f"depth {self.max_depth} commits at least 1 and at most {self.max_depth + 1} tokens"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine.

    `prefix_cache` keeps the KV blocks of finished requests for later ones that begin with the same tokens.
    Blocks given up by the pool go to `host_cache_gb` of the host's memory, then to `disk_cache_gb` of files
    in `disk_cache_dir`, where these are given. `max_kv_ttl_s` caps how long a request may have its blocks
    kept.

    `kv_tokens` is the capacity of the KV pool in tokens (rounded up to blocks); None sizes it for
    `max_num_seqs` sequences of `max_model_len`, at most `kv_memory_bytes`. `max_batch_tokens` is the budget
    of one step and counts tree nodes as well as prompt tokens; a tree that a request's rule needs whole
    goes over it if it is the first of its step. `allow_lossy` lets requests name rules that change the
    text's law. `deterministic` makes a row's numbers independent of what else the pass carries, so that
    greedy speculative text is plain text in every dtype, at a cost in speed. `simulate_acceptance` draws
    how many drafts a step accepts, so that it commits that many tokens on average (see
    `specdec.simulated`): for measurements of speed, the text is meaningless. `kernels` says what computes:
    Triton ("auto" on a card; on the cpu only interpreted, for tests), its references in plain torch, or
    ("auto" on the cpu) the processor's own path. On a card the KV pool takes what is free of
    `gpu_memory_utilization` of its memory, unless `kv_tokens` is given, and decoding steps are captured as
    CUDA graphs if `cuda_graphs` says so. `overlap` launches a decoding step through kernels before the host
    has read the one before it (see `specdec.device.pipeline`). `weights` says how matrices are held on the
    cpu: as packed fp16 numbers ("fp16-packed"; "auto" does so where that is exact, and takes the compute
    dtype elsewhere), in the compute dtype ("plain"), or rounded, with the activations of every product, to
    bf16 ("bf16-packed", where the processor multiplies bf16 numbers; everything else stays fp32) or to eight
    bits ("int8"): another model than the one that was named. `draft_weights` says the same of a draft head;
    "auto" is int8 there, which costs no exactness, unless `weights` are "plain". `kv_cache_dtype` says
    how the target's keys and values are kept: in the compute dtype ("auto"), or as eight-bit codes with a
    scale for each row and head ("int8", "fp8"; through kernels only): half the memory of 16-bit rows and
    another model's numbers, the same ones with and without drafts. `pass_costs` says by which costs of a
    pass the adaptive policy decides:
    those "measured" on the cpu when the engine starts (a second, kept in the user's cache), or the "fixed"
    ones of the program.
    """

    prefix_cache: bool = True
    max_kv_ttl_s: float = 600.0
    host_cache_gb: float = 0.0
    disk_cache_dir: str | None = None
    disk_cache_gb: float = 4.0
    block_size: int = 16
    max_num_seqs: int = 32
    max_batch_tokens: int = 1024
    max_model_len: int | None = None
    kv_tokens: int | None = None
    kv_memory_bytes: int = 2 << 30
    device: str = "cpu"
    dtype: str = "float32"
    weights: str = "auto"
    draft_weights: str = "auto"
    kv_cache_dtype: str = "auto"
    pass_costs: str = "measured"
    allow_lossy: bool = False
    deterministic: bool = False
    kernels: str = "auto"
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    overlap: bool = True
    simulate_acceptance: float | None = None
    spec: SpecConfig = field(default_factory=SpecConfig)

    def __post_init__(self) -> None:
        _check_types(self)
        if self.block_size not in (4, 8, 16, 32, 64):
            raise SpecdecError(f"block_size ({self.block_size}) must be one of 4, 8, 16, 32, 64")
        _check_range("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_range("max_batch_tokens", self.max_batch_tokens, 16, 1 << 20)
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 2, 1 << 24)
        for name in ("max_kv_ttl_s", "host_cache_gb", "disk_cache_gb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise SpecdecError(f"{name} ({value!r}) must be a number, 0 or more")
        if self.disk_cache_dir is not None and not self.disk_cache_dir:
            raise SpecdecError("disk_cache_dir is empty; name a folder, or leave it out")
        if not self.prefix_cache and (self.host_cache_gb or self.disk_cache_dir is not None):
            raise SpecdecError(
                "host_cache_gb and disk_cache_dir keep blocks of the prefix cache; leave prefix_cache on, or "
                "drop them"
            )
        if self.kv_tokens is not None:
            _check_range("kv_tokens", self.kv_tokens, self.block_size, 1 << 32)
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise SpecdecError(f"device ({self.device!r}) must be 'cpu', 'cuda' or 'cuda:N'")
        if not 0.05 <= self.gpu_memory_utilization <= 1.0:
            raise SpecdecError(
                f"gpu_memory_utilization ({self.gpu_memory_utilization!r}) must be a share in 0.05..1"
            )
        if self.kernels not in KERNEL_SETTINGS:
            raise SpecdecError(f"kernels ({self.kernels!r}) must be one of {', '.join(KERNEL_SETTINGS)}")
        _check_range("kv_memory_bytes", self.kv_memory_bytes, 1, 1 << 50)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise SpecdecError(
                f"kv_cache_dtype ({self.kv_cache_dtype!r}) must be one of {', '.join(KV_CACHE_DTYPES)}"
            )
        if self.pass_costs not in ("measured", "fixed"):
            raise SpecdecError(f"pass_costs ({self.pass_costs!r}) must be measured or fixed")
        for name, value in (("weights", self.weights), ("draft_weights", self.draft_weights)):
            if value not in WEIGHTS:
                raise SpecdecError(f"{name} ({value!r}) must be one of {', '.join(WEIGHTS)}")
        if self.weights not in ("auto", "plain") and (self.device, self.dtype) != ("cpu", "float32"):
            raise SpecdecError(
                f"weights ({self.weights!r}) need device 'cpu' and dtype 'float32', not {self.device!r} and "
                f"{self.dtype!r}; use 'auto'"
            )
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise SpecdecError(f"dtype ({self.dtype!r}) must be float32, bfloat16 or float16")
        if self.simulate_acceptance is not None:
            self.spec.check_simulated(self.simulate_acceptance)

    def check_draft(self, *, drafts: bool) -> None:
        """Refuse settings about drafts where nothing drafts."""
        if self.simulate_acceptance is not None and not drafts:
            raise SpecdecError(
                f"simulate_acceptance ({self.simulate_acceptance:g}) needs a draft: without one nothing is "
                "drafted. Give one, such as 'random', or leave it out"
            )

    @property
    def resolved_draft_weights(self) -> str:
        """`draft_weights`, where "auto" follows `weights` if these are asked to be plain."""
        return "plain" if (self.weights, self.draft_weights) == ("plain", "auto") else self.draft_weights


def check_shared(ours: EngineConfig, length: int, theirs: EngineConfig, their_length: int) -> None:
    """Refuse settings under which another engine's weights and rotary tables would not be ours.

    Args:
        ours: the new engine's.
        length: its longest text.
        theirs: of the engine whose target is shared.
        their_length: its longest text.

    Raises:
        SpecdecError: a setting that differs, or a longer text.
    """
    for name in ("dtype", "device", "weights", "deterministic"):
        mine, given = getattr(ours, name), getattr(theirs, name)
        if mine != given:
            raise SpecdecError(f"{name} ({mine}) must be {given}, as in the engine whose target is shared")
    if length > their_length:
        raise SpecdecError(
            f"max_model_len ({length}) must be at most {their_length}, as in the engine that is shared"
        )


# what a field annotated so takes, and how to say it; whole numbers are checked with their range
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a string"),
    "SpecConfig": ((SpecConfig,), "a SpecConfig"),
}


def _check_types(record: SpecConfig | EngineConfig) -> None:
    """Refuse a value of another kind than its field's, before anything is done with it."""
    for each in fields(record):
        kind, _, optional = str(each.type).partition(" | ")
        value = getattr(record, each.name)
        if kind not in _KINDS or (optional and value is None):
            continue
        types, meaning = _KINDS[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise SpecdecError(f"{each.name} ({value!r}) must be {meaning}")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecdecError(f"{name} ({value!r}) must be an integer in {low}..{high}")
