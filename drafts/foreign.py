"""Reading drafts that were written for other engines into ours.

Owns what a foreign `config.json` means, per format, and the joining of config, tensors and target into one
checked draft of our own. A head that ours cannot express is refused by what it is; what is put in order, or
assumed because its reader assumes it, is said in a remark. Weights keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.config import RopeConfig
from specdec.drafts.checkpoint import CONFIG_NAME, DraftContract, StoredDraft, check_tensors
from specdec.drafts.config import LLAMA_KIND, NORM_FLAGS, QWEN3_KIND, Eagle3Config, Embed
from specdec.drafts.foreign_tensors import canonical_names, order_taps, order_vocab, read_tensors
from specdec.drafts.format_ids import NESTED, stored_boundaries
from specdec.drafts.formats import EAGLE_SCALED_THETA, DraftFormat
from specdec.drafts.target_facts import TargetFacts
from specdec.drafts.variants import VARIANTS
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError
from specdec.provenance import read_json

# Llama's in every reader when a config names none
_DEFAULT_THETA = 10000.0


@dataclass(frozen=True)
class ForeignDraft:
    """A foreign draft as ours, and what had to be done or assumed for it."""

    draft: StoredDraft
    remarks: tuple[str, ...]


def read_foreign(folder: Path, form: DraftFormat, target: TargetFacts, template_hash: str) -> ForeignDraft:
    """Read the draft in `folder`, written in a format, for a target.

    Args:
        folder: config.json and weights.
        form: the format.
        target: the one it was trained for; the caller vouches for it, since foreign drafts do not say.
        template_hash: of the target's chat template, taken as the one it was trained with.

    Raises:
        SpecdecError: a head that ours cannot express, or a damaged folder.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise SpecdecError(
            f"draft folder ({folder}) has no {CONFIG_NAME}; give a folder that its engine serves"
        )
    where = str(path)
    raw = _flat(read_json(path), form, where)
    _refuse_other_heads(raw, form, target, where)
    tensors, remarks = canonical_names(read_tensors(folder), str(folder))
    listed, remark = stored_boundaries(form.name, raw, target.num_layers, target.model_type, where)
    remarks += [] if remark is None else [remark]
    taps = raw.get("num_aux_hidden_states")
    if taps is not None and taps != len(listed):
        raise SpecdecError(
            f"{where}: num_aux_hidden_states ({taps}) must be {len(listed)}, the number of boundaries "
            f"{listed}; correct the one that is wrong"
        )
    boundaries = order_taps(tensors, listed, where)
    if boundaries != tuple(listed):
        remarks.append(
            f"boundaries {listed} are not ascending: sorted, and the taps of the weights with them"
        )
    flags, assumed = _flags(raw, form, where)
    rope, rope_remarks = _rope(raw, form, where)
    remarks += assumed + rope_remarks
    draft_vocab = raw.get("draft_vocab_size")
    draft_vocab_size = target.vocab_size if draft_vocab is None else int(draft_vocab)
    vocab, vocab_remarks = order_vocab(tensors, target.vocab_size, draft_vocab_size, str(folder))
    remarks += vocab_remarks
    embed = _embeddings(tensors, raw, form, target, str(folder))
    config = Eagle3Config(
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_heads=int(raw["num_attention_heads"]),
        num_kv_heads=int(raw["num_key_value_heads"]),
        head_dim=rope.head_dim,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=rope,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        boundaries=boundaries,
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        attention_bias=bool(raw.get("attention_bias")),
        qk_norm=_has_qk_norm(raw, form, where),
        embed=embed,
        lm_head="target_rows" if _shares_head(tensors, vocab, raw, target, str(folder)) else "own",
        **flags,
    )
    if config.lm_head == "target_rows":
        tensors.pop("lm_head.weight", None)
    if config.reduced:
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    check_tensors(tensors, config, str(folder))
    contract = DraftContract(
        target_fingerprint=target.fingerprint,
        template_hash=template_hash,
        training={"imported_from": form.name, "remarks": remarks},
    )
    return ForeignDraft(StoredDraft(config=config, contract=contract, tensors=tensors), tuple(remarks))


def _flat(raw: dict[str, Any], form: DraftFormat, where: str) -> dict[str, Any]:
    """One level of keys: the speculators package puts those of the layer inside."""
    if form.name != "speculators":
        if "speculators_model_type" in raw:
            raise SpecdecError(f"{where} is a speculators config; import it with --from speculators")
        return raw
    kind, layer = raw.get("speculators_model_type"), raw.get("transformer_layer_config")
    if kind != "eagle3":
        raise SpecdecError(
            f"{where}: speculators_model_type ({kind}) must be eagle3; other heads are not supported"
        )
    if not isinstance(layer, dict):
        raise SpecdecError(f"{where}: transformer_layer_config is missing; the config is not complete")
    return {**layer, **raw}


def _refuse_other_heads(raw: Mapping[str, Any], form: DraftFormat, target: TargetFacts, where: str) -> None:
    """Refuse configs of heads that ours cannot express, or of another target."""
    named = [str(name) for name in raw.get("architectures") or ()]
    if form.accepted and not set(named) & form.accepted:
        raise SpecdecError(
            f"{where}: architectures ({', '.join(named) or 'none'}) must be one of "
            f"{', '.join(sorted(form.accepted))} for --from {form.name}; other heads are not supported"
        )
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "vocab_size",
    ):
        if raw.get(key) is None:
            raise SpecdecError(f"{where}: {key} is missing; the config is not complete")
    aux = (raw.get(NESTED) or {}).get("use_aux_hidden_state", True)
    wanted: tuple[tuple[str, Any, Any, str], ...] = (
        ("num_hidden_layers", raw.get("num_hidden_layers", 1), 1, "engines disagree about later layers"),
        ("hidden_act", raw.get("hidden_act", "silu"), "silu", "other activations are not supported"),
        ("mlp_bias", bool(raw.get("mlp_bias")), False, "biases there are not supported"),
        ("bias", bool(raw.get("bias")) and form.name != "eagle", False, "a bias on fc is not supported"),
        ("use_aux_hidden_state", bool(aux), True, "a head without taps is no EAGLE-3 head"),
        ("quantization_config", raw.get("quantization_config"), None, "import the unquantised head"),
        # readers take the head's own width for the target's where none is stated
        (
            "target_hidden_size",
            raw.get("target_hidden_size") or raw["hidden_size"],
            target.hidden_size,
            "it belongs to another target",
        ),
        ("vocab_size", raw["vocab_size"], target.vocab_size, "it belongs to another target"),
    )
    for name, found, needed, reason in wanted:
        if found != needed:
            raise SpecdecError(f"{where}: {name} ({found}) must be {needed}: {reason}")
    if raw["hidden_size"] != target.hidden_size and form.name not in VARIANTS["hidden_size"].formats:
        raise SpecdecError(
            f"{where}: hidden_size ({raw['hidden_size']}) must be {target.hidden_size}: {form.reader} has no "
            "heads of another width than the target's"
        )


def _has_qk_norm(raw: Mapping[str, Any], form: DraftFormat, where: str) -> bool:
    """Whether the head norms queries and keys, as the model_type says and, in vLLM's format, the class."""
    kind = raw.get("model_type", LLAMA_KIND[1])
    # the repository's loader does not look at it
    if form.name == "eagle" or kind == LLAMA_KIND[1]:
        kind = LLAMA_KIND[1]
    elif kind != QWEN3_KIND[1] or form.name not in VARIANTS["qk_norm"].formats:
        raise SpecdecError(
            f"{where}: model_type ({kind}) must be llama, or qwen3 (norms on queries and keys) where the "
            "format has it; other layers are not supported"
        )
    named = set(raw.get("architectures") or ())
    if form.name == "vllm" and (QWEN3_KIND[0] in named) != (kind == QWEN3_KIND[1]):
        raise SpecdecError(
            f"{where}: architectures ({', '.join(sorted(named))}) and model_type ({kind}) must agree on "
            f"norms on queries and keys: {QWEN3_KIND[0]} with qwen3, or neither"
        )
    return bool(kind == QWEN3_KIND[1])


def _flags(raw: Mapping[str, Any], form: DraftFormat, where: str) -> tuple[dict[str, bool], list[str]]:
    """The four norm flags; an absent one is false, as the readers take it, where they agree on that."""
    flags, remarks = {}, []
    for name in NORM_FLAGS:
        stated = raw.get(name)
        if name == "norm_before_fc" and stated is None:
            stated = (raw.get(NESTED) or {}).get(name)
        if name == "fc_norm" and stated is None:
            stated = raw.get("use_aux_norm")
        if stated is None:
            if form.name == "speculators" and name == "norm_before_residual":
                raise SpecdecError(
                    f"{where}: norm_before_residual is missing, and its readers disagree about the default; "
                    "write true or false, as it was trained"
                )
            if form.name != "eagle":
                remarks.append(f"{name} is not stated: false")
            stated = False
        if stated and form.name not in VARIANTS[name].formats:
            raise SpecdecError(
                f"{where}: {name} (true) is ignored by {form.reader}; if it was trained with it, import it "
                "with --from vllm"
            )
        flags[name] = bool(stated)
    return flags, remarks


def _rope(raw: Mapping[str, Any], form: DraftFormat, where: str) -> tuple[RopeConfig, list[str]]:
    inner = raw.get("rope_parameters") or {}
    thetas = {float(value) for value in (raw.get("rope_theta"), inner.get("rope_theta")) if value is not None}
    if len(thetas) > 1:
        raise SpecdecError(
            f"{where}: rope_theta ({raw['rope_theta']:g}) and rope_parameters.rope_theta "
            f"({inner['rope_theta']:g}) must agree; keep the one it was trained with"
        )
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    settings = dict(raw)
    scaling = raw.get("rope_scaling")
    if form.name == "eagle" and scaling and thetas - {EAGLE_SCALED_THETA}:
        raise SpecdecError(
            f"{where}: rope_theta ({thetas.pop():g}) is ignored by {form.reader} beside rope_scaling; "
            f"write {EAGLE_SCALED_THETA:g}, which it uses, or remove the scaling"
        )
    remarks = [] if thetas else [f"rope_theta is not stated: {_DEFAULT_THETA:g}, which its reader uses"]
    rope = RopeConfig.from_dict(settings, head_dim=int(raw.get("head_dim") or hidden // heads))
    if rope.rope_type not in form.rope_types:
        raise SpecdecError(
            f"{where}: rope_type ({rope.rope_type}) must be one of {', '.join(form.rope_types)}: "
            f"{form.reader} has no other"
        )
    return rope, remarks


def are_targets(embed: Tensor, target: TargetFacts) -> bool:
    """Whether embeddings are the target's, in the dtype they are stored in."""
    return embed.shape == target.embed.shape and torch.equal(embed, target.embed.to(embed.dtype))


def _embeddings(
    tensors: dict[str, Tensor], raw: Mapping[str, Any], form: DraftFormat, target: TargetFacts, where: str
) -> Embed:
    """Whose embeddings the head uses; the target's are taken out, others stay where the reader uses them."""
    embed = tensors.get("embed_tokens.weight")
    if embed is None:
        if raw["hidden_size"] != target.hidden_size:
            raise SpecdecError(
                f"{where}: hidden_size ({raw['hidden_size']}) is not the target's {target.hidden_size}, and "
                "a head of a width of its own needs embed_tokens.weight; or it belongs to another target"
            )
        return "target"
    if are_targets(embed, target):
        del tensors["embed_tokens.weight"]
        return "target"
    # the repository loads them only where its config states the target's width
    used = form.name in VARIANTS["embed"].formats and not (
        form.name == "eagle" and raw.get("target_hidden_size") is None
    )
    if not used:
        raise SpecdecError(
            f"{where}: embed_tokens.weight differs from the target's embeddings, which {form.reader} uses in "
            "their place; if the head was trained with embeddings of its own, import it with --from vllm, or "
            "it belongs to another target"
        )
    return "own"


def _shares_head(
    tensors: Mapping[str, Tensor], vocab: DraftVocab, raw: Mapping[str, Any], target: TargetFacts, where: str
) -> bool:
    """Whether the output rows are the target's, bit by bit, so that ours need not store them."""
    head = tensors.get("lm_head.weight")
    if raw.get("tie_word_embeddings"):
        if head is not None or len(vocab) < target.vocab_size:
            raise SpecdecError(
                f"{where}: tie_word_embeddings (true) contradicts "
                f"{'a draft vocabulary' if head is None else 'the lm_head.weight beside it'}; write false"
            )
        if not torch.equal(target.embed, target.lm_head):
            raise SpecdecError(
                f"{where}: tie_word_embeddings (true) makes the embeddings the output head, which they are "
                "not on this target; such a head is not supported"
            )
        return True
    if head is None:
        if len(vocab) < target.vocab_size:
            raise SpecdecError(f"{where}: tensor lm_head.weight is missing, which a draft vocabulary needs")
        return True
    rows = target.lm_head[vocab.ids]
    return head.dtype == rows.dtype and torch.equal(head, rows)
