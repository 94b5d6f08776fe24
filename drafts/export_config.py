"""The `config.json` of an exported draft, in each of the four formats.

Owns which keys a format's config has and what they say. All of them state the four norm flags, the number of
taps, and rotary parameters in both spellings, since readers disagree about what an absent key means. Knows no
tensors. Source: the readers named in `formats`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.drafts.config import NORM_FLAGS, QWEN3_KIND, Eagle3Config
from specdec.drafts.format_ids import IDS, NESTED, nested_ids
from specdec.drafts.formats import DraftFormat
from specdec.drafts.target_facts import TargetFacts

# drafts of a chain that a config recommends where it has to name a number, as the reader's own examples do
SPECULATIVE_TOKENS = 3
# the release whose config class the format was read from
SPECULATORS_VERSION = "0.9.0"

# keys that mean the same in our portable config, in vLLM's and in SGLang's
_SHARED_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "initializer_range",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "vocab_size",
    "draft_vocab_size",
    "tie_word_embeddings",
    "use_cache",
    "target_hidden_size",
    "num_aux_hidden_states",
    *NORM_FLAGS,
)
# what the speculators package says beside its layer, not in it
_OUTSIDE_LAYER = ("draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", *NORM_FLAGS)


def exported_config(
    config: Eagle3Config, dtype: str, form: DraftFormat, target: TargetFacts
) -> dict[str, Any]:
    """The config of this head in the format; `dtype` is what its weights are stored in."""
    shared = {key: value for key, value in config.to_dict().items() if key in _SHARED_KEYS}
    return _MAKERS[form.name](
        {"architectures": [form.architecture], **shared, "torch_dtype": dtype, "dtype": dtype},
        config,
        target,
    )


def _vllm(shared: dict[str, Any], config: Eagle3Config, target: TargetFacts) -> dict[str, Any]:
    if config.qk_norm:
        shared = shared | {"architectures": [QWEN3_KIND[0]]}
    return shared | {IDS: list(config.boundaries)}


def _sglang(shared: dict[str, Any], config: Eagle3Config, target: TargetFacts) -> dict[str, Any]:
    ids = nested_ids(config.boundaries, config.target_num_layers, target.model_type)
    return shared | {NESTED: {"use_aux_hidden_state": True, IDS: ids}}


def _speculators(shared: dict[str, Any], config: Eagle3Config, target: TargetFacts) -> dict[str, Any]:
    layer = {key: value for key, value in shared.items() if key not in (*_OUTSIDE_LAYER, "architectures")}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": SPECULATIVE_TOKENS,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": shared["architectures"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.served_as, "architectures": list(target.architectures)},
        },
        "transformer_layer_config": layer,
        **{key: shared[key] for key in _OUTSIDE_LAYER},
        IDS: list(config.boundaries),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": shared["torch_dtype"],
        "dtype": shared["dtype"],
    }


def _eagle(shared: dict[str, Any], config: Eagle3Config, target: TargetFacts) -> dict[str, Any]:
    # its mere presence makes this reader expect embeddings in the file
    dropped = () if config.embed == "own" else ("target_hidden_size",)
    kept = {key: value for key, value in shared.items() if key not in dropped}
    if config.rope.rope_type != "default":
        kept["rope_scaling"] = {"type": config.rope.rope_type, "factor": config.rope.params["factor"]}
    return kept | {
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": 0,
    }


_MAKERS: dict[str, Callable[[dict[str, Any], Eagle3Config, TargetFacts], dict[str, Any]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "speculators": _speculators,
    "eagle": _eagle,
}
