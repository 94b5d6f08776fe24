"""The tensors of a draft that somebody else wrote, under our names and in our order.

Owns how such files are read (safetensors whole or in shards, or a pytorch_model.bin without running what it
holds), which foreign names are ours, which name a kind of head that ours is not, and the putting in order of
taps and of the draft vocabulary. Values are never cast. Does not know configs beyond the numbers it is given.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.drafts.checkpoint import STORAGE_DTYPES, WEIGHTS_NAME
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError
from specdec.provenance import read_json

_INDEX_NAME = "model.safetensors.index.json"
_PICKLE_NAME = "pytorch_model.bin"
_PREFIX = "model."
_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
# SGLang's other spelling of the first three
_AUX_NORMS = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
# tensors of heads that ours is not, with what such a head is
_OTHER_HEADS: tuple[tuple[str, str], ...] = (
    (r"^layers\.[1-9]\d*\.", "several decoder layers; engines disagree about the norms of the later ones"),
    (
        r"^midlayers?\.[1-9]\d*\.",
        "several decoder layers; engines disagree about the norms of the later ones",
    ),
    (r"^mask_hidden$", "parallel drafting (P-EAGLE)"),
    (r"^fc\.bias$", "a bias on the fusion of the taps"),
    (r"\.mlp\..*\.bias$", "biases in the feed-forward block"),
    (r"\.mlp\.(experts|gate\.)", "experts in the feed-forward block"),
    (r"(_scale|_zero_point|\.qweight|\.scales)$", "quantised weights; export the unquantised head"),
)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a foreign draft folder, by its own name.

    Raises:
        SpecdecError: no weights, weights twice, or a file that cannot be read.
    """
    single, index, pickled = folder / WEIGHTS_NAME, folder / _INDEX_NAME, folder / _PICKLE_NAME
    found = [path.name for path in (single, index, pickled) if path.is_file()]
    if not found:
        raise SpecdecError(f"draft folder ({folder}) has no {WEIGHTS_NAME} and no {_PICKLE_NAME}")
    if len(found) > 1:
        raise SpecdecError(
            f"draft folder ({folder}) has {' and '.join(found)}, and readers take different ones; keep one"
        )
    if pickled.is_file():
        return _read_pickle(pickled)
    files = [single]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise SpecdecError(f"{index} has no weight_map")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise SpecdecError(f"{file} cannot be read: {error}") from error
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        # weights_only: a pickle may otherwise run any program
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise SpecdecError(
            f"{path} cannot be read as tensors alone, and nothing else in it is run: "
            f"{str(error).splitlines()[0]}; convert it to {WEIGHTS_NAME} where you trust it"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise SpecdecError(f"{path} must hold named tensors and nothing else; convert it to {WEIGHTS_NAME}")
    return {str(name): value.contiguous() for name, value in loaded.items()}


def canonical_names(tensors: Mapping[str, Tensor], where: str) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under our names, and remarks; those of another kind of head are refused."""
    remarks = []
    if any(name.startswith(_PREFIX) for name in tensors):
        remarks.append("tensor names carry the prefix model., as NeMo writes them: taken off")
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(_PREFIX)
        for pattern, kind in _OTHER_HEADS:
            if re.search(pattern, bare):
                raise SpecdecError(f"{where}: tensor {name} belongs to a head with {kind}: not supported")
        ours = _LAYER.sub("midlayer.", _AUX_NORMS.get(bare, bare))
        if ours in renamed:
            raise SpecdecError(f"{where}: two tensors are {ours}, one of them named {name}; keep one")
        if ours not in ("d2t", "t2d") and tensor.dtype not in STORAGE_DTYPES.values():
            raise SpecdecError(
                f"{where}: tensor {name} ({tensor.dtype}) must be one of {', '.join(STORAGE_DTYPES)}"
            )
        renamed[ours] = tensor
    return renamed, remarks


def order_taps(tensors: dict[str, Tensor], boundaries: Sequence[int], where: str) -> tuple[int, ...]:
    """Put what reads the taps into ascending order of boundaries, in place; returns the order.

    Engines capture in ascending depth whatever a config lists, so columns of the fusion move with the ids.
    """
    if len(set(boundaries)) != len(boundaries):
        raise SpecdecError(
            f"{where}: boundaries {list(boundaries)} must be distinct; engines drop repeated ones"
        )
    order = sorted(range(len(boundaries)), key=lambda tap: boundaries[tap])
    ascending = tuple(boundaries[tap] for tap in order)
    if ascending == tuple(boundaries):
        return ascending
    for name in ("fc.weight", "input_norm.weight"):
        if name in tensors:
            tensor = tensors[name]
            if tensor.shape[-1] % len(order):
                raise SpecdecError(
                    f"{where}: tensor {name} has shape {list(tensor.shape)}, which {len(order)} taps do "
                    "not divide"
                )
            blocks = tensor.chunk(len(order), dim=-1)
            tensors[name] = torch.cat([blocks[tap] for tap in order], dim=-1)
    norms = {
        f"fc_norm.{place}.weight": tensors[f"fc_norm.{tap}.weight"]
        for place, tap in enumerate(order)
        if f"fc_norm.{tap}.weight" in tensors
    }
    tensors.update(norms)
    return ascending


def order_vocab(
    tensors: dict[str, Tensor], vocab_size: int, draft_vocab_size: int, where: str
) -> tuple[DraftVocab, list[str]]:
    """Take the maps of the draft vocabulary out and bring it into ascending order of target ids, in place.

    Raises:
        SpecdecError: maps that are missing where needed, disagree, or lead out of the vocabulary.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if draft_vocab_size < vocab_size:
            raise SpecdecError(
                f"{where}: tensor d2t is missing and the head says {draft_vocab_size} of {vocab_size} "
                "tokens; engines would take ids 0.. for it, so get the checkpoint with its map"
            )
        return DraftVocab.full(vocab_size), []
    if d2t.shape != (draft_vocab_size,) or d2t.dtype not in (torch.int64, torch.int32):
        raise SpecdecError(
            f"{where}: tensor d2t ({d2t.dtype}, {list(d2t.shape)}) must be int64 [{draft_vocab_size}]"
        )
    ids = d2t.long() + torch.arange(draft_vocab_size)
    remarks = []
    order = torch.argsort(ids, stable=True)
    if not torch.equal(order, torch.arange(draft_vocab_size)):
        if "lm_head.weight" not in tensors:
            raise SpecdecError(
                f"{where}: d2t is not ascending and there is no lm_head.weight to reorder with it"
            )
        head = tensors["lm_head.weight"]
        if head.shape[0] != draft_vocab_size:
            raise SpecdecError(f"{where}: lm_head.weight has {head.shape[0]} rows, d2t {draft_vocab_size}")
        tensors["lm_head.weight"] = head[order].contiguous()
        remarks.append(
            "d2t is not in ascending order (Model-Optimizer writes it by frequency): rows of "
            "lm_head sorted with it"
        )
    vocab = DraftVocab(ids[order], vocab_size)
    if t2d is None:
        if len(vocab) < vocab_size:
            remarks.append("t2d is missing: made from d2t")
    elif t2d.dtype != torch.bool or t2d.shape != (vocab_size,) or not torch.equal(t2d, vocab.t2d):
        raise SpecdecError(
            f"{where}: t2d must be true at exactly the {len(vocab)} of {vocab_size} target ids that d2t gives"
        )
    return vocab, remarks
