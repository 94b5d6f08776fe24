"""What an exported or imported draft takes from its target: shape, ids, embeddings and output rows.

Owns the reading of these from a target's folder, of any family: a config with a `text_config` inside and the
names that families give their embeddings. Rows keep the dtype they are stored in. Knows no draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.errors import SpecdecError
from specdec.models.weights import WeightReader
from specdec.provenance import folder_fingerprint, read_json
from specdec.random_target import is_random

# plain decoders, and text towers inside multimodal ones (transformers 4 and 5 spellings)
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
_OUTPUT_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What a draft's format says of the target.

    Attributes:
        served_as: How an engine is to be told which target it is: a folder, or a hub id.
        folder: Where it lies here.
        model_type: Of its text decoder.
        architectures: As its config.json names them.
        num_layers: Decoder layers N.
        bos_token_id: None where the config names none.
        eos_token_id: The first one; None where the config names none.
        fingerprint: Of its weights and arithmetic.
        embed: Embeddings as stored [vocab, hidden].
        lm_head: Output head as stored [vocab, hidden]; the embeddings where they are tied.
    """

    served_as: str
    folder: Path
    model_type: str
    architectures: tuple[str, ...]
    num_layers: int
    bos_token_id: int | None
    eos_token_id: int | None
    fingerprint: str
    embed: Tensor
    lm_head: Tensor

    @property
    def vocab_size(self) -> int:
        """Rows of the embeddings."""
        return self.embed.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.embed.shape[1]


def read_target_facts(folder: Path, served_as: str | None = None) -> TargetFacts:
    """Read them from a target's folder.

    Raises:
        SpecdecError: a config that does not say, or no embeddings under a known name.
    """
    if is_random(folder):
        raise SpecdecError(f"target ({folder}) has random weights, which no other engine can load")
    raw = read_json(folder / "config.json")
    text: Mapping[str, Any] = raw.get("text_config") or raw
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "model_type"):
        if text.get(key) is None:
            raise SpecdecError(f"target folder ({folder}): config.json lacks {key}; it is not complete")
    shape = (int(text["vocab_size"]), int(text["hidden_size"]))
    reader = WeightReader(folder)
    embed = _first_of(reader, _EMBEDDINGS, shape)
    tied = bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    eos = text.get("eos_token_id", raw.get("eos_token_id"))
    return TargetFacts(
        served_as=served_as or str(folder.absolute()),
        folder=folder,
        model_type=str(text["model_type"]),
        architectures=tuple(raw.get("architectures") or ()),
        num_layers=int(text["num_hidden_layers"]),
        bos_token_id=text.get("bos_token_id", raw.get("bos_token_id")),
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
        fingerprint=folder_fingerprint(folder),
        embed=embed,
        lm_head=embed if tied else _first_of(reader, _OUTPUT_HEADS, shape),
    )


def _first_of(reader: WeightReader, names: tuple[str, ...], shape: tuple[int, int]) -> Tensor:
    return reader.get(next((name for name in names if reader.has(name)), names[0]), shape)
