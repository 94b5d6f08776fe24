"""Configuration of an EAGLE-3 draft head.

Owns the shape of a head and its flags, and the two spellings of it: the frozen dataclass used inside, and the
portable `config.json` that other engines read too (`EAGLE-3 checkpoint formats`: boundaries b at top level,
b - 1 under `eagle_config`). Knows nothing of tensors or training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from specdec.config import RopeConfig
from specdec.errors import SpecdecError

LmHead = Literal["own", "target_rows"]
LM_HEADS: tuple[LmHead, ...] = ("own", "target_rows")
Embed = Literal["own", "target"]
EMBEDS: tuple[Embed, ...] = ("target", "own")
# engines build another class for norms on queries and keys
LLAMA_KIND = ("LlamaForCausalLMEagle3", "llama")
QWEN3_KIND = ("Eagle3Qwen3ForCausalLM", "qwen3")
NORM_FLAGS = ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc")


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shape and flags of one head.

    The norm flags have no hidden default on disk: `config.json` always writes all four, because readers
    disagree about what an absent one means. `attention_bias` is on all four projections of attention, as in
    Hugging Face's Llama; `qk_norm` norms every head's queries and keys before they are rotated, as in Qwen3.
    `boundaries` are the taps, ascending, in 0..N of the target. A head of another width than the target's
    needs a projection wherever it uses the target's embeddings or output rows (`projects_embeddings`,
    `projects_output`).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    target_hidden_size: int
    target_num_layers: int
    fc_norm: bool = True
    norm_output: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    lm_head: LmHead = "target_rows"
    embed: Embed = "target"

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "target_hidden_size",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SpecdecError(f"{name} ({value}) must be a positive whole number")
        if self.num_heads % self.num_kv_heads:
            raise SpecdecError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        check_draft_vocab_size(self.draft_vocab_size, self.vocab_size)
        if not self.boundaries:
            raise SpecdecError("boundaries (none) must name at least one tap")
        if any(left >= right for left, right in pairwise(self.boundaries)):
            raise SpecdecError(f"boundaries ({list(self.boundaries)}) must be ascending and distinct")
        if self.boundaries[0] < 0 or self.boundaries[-1] > self.target_num_layers:
            raise SpecdecError(
                f"boundaries ({list(self.boundaries)}) must lie in 0..{self.target_num_layers}, "
                "the target's number of layers"
            )
        if self.fc_norm and self.norm_before_fc:
            raise SpecdecError("fc_norm (true) and norm_before_fc (true) exclude each other; choose one")
        if self.lm_head not in LM_HEADS:
            raise SpecdecError(f"lm_head ({self.lm_head!r}) must be one of {', '.join(LM_HEADS)}")
        if self.embed not in EMBEDS:
            raise SpecdecError(f"embed ({self.embed!r}) must be one of {', '.join(EMBEDS)}")
        if self.rope.head_dim != self.head_dim:
            raise SpecdecError(f"rope head_dim ({self.rope.head_dim}) must equal head_dim ({self.head_dim})")

    @property
    def num_taps(self) -> int:
        """Taps fused into a feature."""
        return len(self.boundaries)

    @property
    def projects_embeddings(self) -> bool:
        """Whether the target's embeddings are brought to the head's width."""
        return self.embed == "target" and self.hidden_size != self.target_hidden_size

    @property
    def projects_output(self) -> bool:
        """Whether the head's output is brought to the target's width, to be read by the target's rows."""
        return self.lm_head == "target_rows" and self.hidden_size != self.target_hidden_size

    @property
    def reduced(self) -> bool:
        """Whether the draft speaks fewer tokens than the target, so that d2t and t2d exist."""
        return self.draft_vocab_size < self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        """The portable `config.json` content, without the `specdec` object and the dtype."""
        rope = {**self.rope.params, "rope_type": self.rope.rope_type, "rope_theta": self.rope.theta}
        scaling = (
            None
            if self.rope.rope_type == "default"
            else {**self.rope.params, "rope_type": self.rope.rope_type}
        )
        architecture, model_type = QWEN3_KIND if self.qk_norm else LLAMA_KIND
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "max_position_embeddings": self.rope.max_position_embeddings,
            "rope_theta": self.rope.theta,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "use_cache": True,
            "target_hidden_size": self.target_hidden_size,
            "num_aux_hidden_states": self.num_taps,
            "eagle_aux_hidden_state_layer_ids": list(self.boundaries),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in self.boundaries],
            },
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Eagle3Config:
        """Read the portable `config.json` with its `specdec` object.

        Raises:
            SpecdecError: a key is missing (named) or two keys contradict each other.
        """
        own = _need(raw, "specdec")
        heads, hidden = int(_need(raw, "num_attention_heads")), int(_need(raw, "hidden_size"))
        head_dim = int(raw.get("head_dim") or hidden // heads)
        boundaries = tuple(int(value) for value in _need(own, "boundaries", "specdec."))
        listed = tuple(int(value) for value in _need(raw, "eagle_aux_hidden_state_layer_ids"))
        if listed != boundaries:
            raise SpecdecError(
                f"draft config: eagle_aux_hidden_state_layer_ids ({list(listed)}) must equal "
                f"specdec.boundaries "
                f"({list(boundaries)})"
            )
        if int(_need(raw, "num_aux_hidden_states")) != len(boundaries):
            raise SpecdecError(
                f"draft config: num_aux_hidden_states ({raw['num_aux_hidden_states']}) must be "
                f"{len(boundaries)}, "
                f"the number of boundaries {list(boundaries)}"
            )
        if raw.get("tie_word_embeddings"):
            raise SpecdecError(
                "draft config: tie_word_embeddings (true) must be false: a draft's output rows are "
                "its own or the target's"
            )
        flags = {name: bool(_need(raw, name)) for name in NORM_FLAGS}
        return cls(
            hidden_size=hidden,
            intermediate_size=int(_need(raw, "intermediate_size")),
            num_heads=heads,
            num_kv_heads=int(_need(raw, "num_key_value_heads")),
            head_dim=head_dim,
            rms_norm_eps=float(_need(raw, "rms_norm_eps")),
            rope=RopeConfig.from_dict(dict(raw), head_dim=head_dim),
            vocab_size=int(_need(raw, "vocab_size")),
            draft_vocab_size=int(_need(raw, "draft_vocab_size")),
            boundaries=boundaries,
            target_hidden_size=int(_need(raw, "target_hidden_size")),
            target_num_layers=int(_need(own, "target_num_layers", "specdec.")),
            attention_bias=bool(raw.get("attention_bias")),
            qk_norm=bool(own.get("qk_norm")),
            embed=own.get("embed", "target"),
            lm_head=_need(own, "lm_head", "specdec."),
            **flags,
        )


def check_draft_vocab_size(value: Any, vocab_size: int) -> None:
    """Refuse anything but a whole number in 1..vocab_size."""
    if type(value) is not int or not 1 <= value <= vocab_size:
        raise SpecdecError(
            f"draft_vocab_size ({value}) must be a whole number in 1..{vocab_size}, the target's vocabulary"
        )


def _need(raw: Mapping[str, Any], key: str, prefix: str = "") -> Any:
    if key not in raw or raw[key] is None:
        raise SpecdecError(
            f"draft config: {prefix}{key} is missing; the folder is not a complete specdec draft"
        )
    return raw[key]
