"""Draft folders: `config.json` and `model.safetensors`, read and written strictly.

Owns what a draft folder holds and every check on it. A missing, renamed, extra or mis-shaped tensor is an
error that names the tensor and both shapes, and a failed save leaves no folder: loaders that ignore unknown
names serve random weights without a word (speculators #1114). Does not know targets: the caller passes the
target's embeddings, output head and fingerprint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError, writing

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
STORAGE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class DraftContract:
    """What a head was trained against: checked when it is served."""

    target_fingerprint: str
    template_hash: str
    training: Mapping[str, Any]


@dataclass(frozen=True)
class LoadedDraft:
    """A head read from disk and the contract it carries."""

    head: Eagle3Head
    contract: DraftContract


@dataclass(frozen=True, kw_only=True)
class StoredDraft:
    """A draft as it lies in its folder: tensors by our names, in the dtypes they are stored in."""

    config: Eagle3Config
    contract: DraftContract
    tensors: Mapping[str, Tensor]

    @property
    def dtype(self) -> str:
        """What the weights are stored in, by its name."""
        found = self.tensors["fc.weight"].dtype
        names = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
        if found not in names:
            raise SpecdecError(f"tensor fc.weight ({found}) must be one of {', '.join(STORAGE_DTYPES)}")
        return names[found]


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a draft folder of this configuration holds."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    target_hidden = config.target_hidden_size
    taps = config.num_taps * target_hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if config.attention_bias:
        attention = {"q_proj": heads, "k_proj": kv, "v_proj": kv, "o_proj": hidden}
        shapes |= {f"midlayer.self_attn.{name}.bias": (size,) for name, size in attention.items()}
    if config.qk_norm:
        shapes |= {f"midlayer.self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (target_hidden,) for tap in range(config.num_taps)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps,)
    if config.lm_head == "own":
        shapes["lm_head.weight"] = (vocab, hidden)
    if config.projects_output:
        shapes["out_proj.weight"] = (target_hidden, hidden)
    if config.embed == "own":
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.projects_embeddings:
        shapes["embed_proj.weight"] = (hidden, target_hidden)
    if config.reduced:
        shapes |= {"d2t": (vocab,), "t2d": (config.vocab_size,)}
    return shapes


def check_tensors(tensors: Mapping[str, Tensor], config: Eagle3Config, where: str) -> None:
    """Refuse a tensor set that is not exactly what `config` asks for."""
    expected = expected_shapes(config)
    missing = sorted(expected.keys() - tensors.keys())
    extra = sorted(tensors.keys() - expected.keys())
    if missing:
        hint = f"; it has {', '.join(extra)} instead" if extra else ""
        raise SpecdecError(f"{where}: tensor {missing[0]} is missing{hint}")
    if extra:
        raise SpecdecError(
            f"{where}: tensor {extra[0]} is not part of this head; remove it or correct config.json"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise SpecdecError(
                f"{where}: tensor {name} has shape {list(tensors[name].shape)}, expected {list(shape)}"
            )


def head_tensors(head: Eagle3Head, dtype: str) -> dict[str, Tensor]:
    """The tensors of a head as stored: weights cast to `dtype`, and the maps of a reduced vocabulary."""
    if dtype not in STORAGE_DTYPES:
        raise SpecdecError(f"dtype ({dtype}) must be one of {', '.join(STORAGE_DTYPES)}")
    tensors: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        cast = tensor.detach().to("cpu", STORAGE_DTYPES[dtype]).contiguous()
        if not bool(torch.isfinite(cast).all()):
            raise SpecdecError(
                f"tensor {name} is not finite in {dtype} (largest {float(tensor.abs().max()):.3g}); "
                "save as bfloat16 or check the training run"
            )
        tensors[name] = cast
    if head.config.reduced:
        tensors |= {"d2t": head.vocab.d2t, "t2d": head.vocab.t2d}
    return tensors


def cast_head(head: Eagle3Head, dtype: str) -> None:
    """Round the weights in place to what `save_draft` stores, so that what is measured is what is served."""
    tensors = head_tensors(head, dtype)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])


def save_draft(
    folder: str | Path, head: Eagle3Head, contract: DraftContract, *, dtype: str = "float16"
) -> Path:
    """Write a draft folder's config and weights, each file complete or absent.

    Other files already in the folder (`run.json`, `metrics.jsonl`) stay.
    """
    return write_draft(
        folder, StoredDraft(config=head.config, contract=contract, tensors=head_tensors(head, dtype))
    )


def write_draft(folder: str | Path, draft: StoredDraft) -> Path:
    """Write a stored draft as it is; see `save_draft`."""
    target, config = Path(folder), draft.config
    tensors, dtype, contract = dict(draft.tensors), draft.dtype, draft.contract
    check_tensors(tensors, config, "save")
    written = config.to_dict()
    written |= {"torch_dtype": dtype, "dtype": dtype}
    written["specdec"] = {
        "boundaries": list(config.boundaries),
        "target_num_layers": config.target_num_layers,
        "target_fingerprint": contract.target_fingerprint,
        "template_hash": contract.template_hash,
        "lm_head": config.lm_head,
        "embed": config.embed,
        "qk_norm": config.qk_norm,
        "training": dict(contract.training),
    }
    with writing(f"draft folder ({target})"):
        target.mkdir(parents=True, exist_ok=True)
        scratch = target / f".partial-{os.getpid()}"
        scratch.mkdir(exist_ok=True)
        try:
            try:
                save_file(tensors, scratch / WEIGHTS_NAME, metadata={"format": "pt"})
            except SafetensorError as error:
                # a full disk: its text ends in the system's reason
                raise OSError(str(error)) from error
            (scratch / CONFIG_NAME).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
            # weights first: a folder without config.json is not taken for a draft.
            for name in (WEIGHTS_NAME, CONFIG_NAME):
                os.replace(scratch / name, target / name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def read_draft_config(folder: str | Path) -> tuple[Eagle3Config, DraftContract]:
    """Read and check `config.json` of a draft folder, without its weights."""
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        raise SpecdecError(
            f"draft folder ({folder}) has no {CONFIG_NAME}; give a folder written by specdec train"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecdecError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("specdec"), dict):
        raise SpecdecError(f"{path} is not the config of a specdec draft: it has no specdec object")
    config = Eagle3Config.from_dict(raw)
    own = raw["specdec"]
    for key in ("target_fingerprint", "template_hash"):
        if not isinstance(own.get(key), str):
            raise SpecdecError(
                f"{path}: specdec.{key} is missing; the folder is not a complete specdec draft"
            )
    contract = DraftContract(
        target_fingerprint=own["target_fingerprint"],
        template_hash=own["template_hash"],
        training=own.get("training") or {},
    )
    return config, contract


def read_stored(folder: str | Path) -> StoredDraft:
    """Read a draft folder as it is stored, every tensor checked."""
    config, contract = read_draft_config(folder)
    path = Path(folder) / WEIGHTS_NAME
    if not path.is_file():
        raise SpecdecError(
            f"draft folder ({folder}) has no {WEIGHTS_NAME}; give a folder written by specdec train"
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise SpecdecError(f"{path} cannot be read: {error}") from error
    check_tensors(tensors, config, str(path))
    return StoredDraft(config=config, contract=contract, tensors=tensors)


def load_draft(
    folder: str | Path, target_embed: Tensor, target_lm_head: Tensor, *, target_fingerprint: str | None = None
) -> LoadedDraft:
    """Read a draft folder into an fp32 head in eval mode.

    Args:
        folder: written by `save_draft`.
        target_embed: the target's embeddings [vocab, hidden].
        target_lm_head: the target's output head [vocab, hidden].
        target_fingerprint: of the target at hand; a head of another target is refused. None skips the check.
    """
    config, contract = read_draft_config(folder)
    if target_fingerprint is not None and target_fingerprint != contract.target_fingerprint:
        raise SpecdecError(
            f"draft ({folder}) was trained for another target: its fingerprint "
            f"{contract.target_fingerprint[:12]} is "
            f"not {target_fingerprint[:12]}; use the target it was trained for"
        )
    shape = (config.vocab_size, config.target_hidden_size)
    if tuple(target_lm_head.shape) != shape or tuple(target_embed.shape) != shape:
        raise SpecdecError(
            f"draft ({folder}) expects a target of vocabulary and width {list(shape)}, the target has "
            f"{list(target_lm_head.shape)}"
        )
    tensors = dict(read_stored(folder).tensors)
    if config.reduced:
        vocab = DraftVocab.from_d2t(tensors.pop("d2t"), tensors.pop("t2d"), config.vocab_size)
    else:
        vocab = DraftVocab.full(config.vocab_size)
    head = Eagle3Head(config, vocab, target_embed, target_lm_head)
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    head.requires_grad_(False)
    return LoadedDraft(head.eval(), contract)
