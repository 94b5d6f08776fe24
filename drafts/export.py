"""Writing a draft for another engine, complete or not at all.

Owns which tensors an export holds and the folder it is written to. A head that the format's reader would
serve otherwise than it was trained is refused (`formats`), and a finished export is read back (`foreign`) and
compared with what went in, bit by bit, before it gets its name. Weights are never cast: rows taken from the
target keep the target's dtype.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specdec.drafts.checkpoint import CONFIG_NAME, WEIGHTS_NAME, StoredDraft
from specdec.drafts.export_config import exported_config
from specdec.drafts.foreign import are_targets, read_foreign
from specdec.drafts.formats import DraftFormat, require_representable
from specdec.drafts.target_facts import TargetFacts
from specdec.drafts.vocab import DraftVocab
from specdec.errors import SpecdecError, writing


@dataclass(frozen=True)
class Export:
    """What an export holds: `tensors` by the format's names and its config.json."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


def make_export(draft: StoredDraft, form: DraftFormat, target: TargetFacts) -> Export:
    """The draft in the format.

    Raises:
        SpecdecError: a draft of another target, or a head that the format cannot hold.
    """
    config = draft.config
    if draft.contract.target_fingerprint != target.fingerprint:
        raise SpecdecError(
            f"draft was trained for another target: its fingerprint "
            f"{draft.contract.target_fingerprint[:12]} is not {target.fingerprint[:12]}, {target.folder}'s; "
            "use the target it was trained for"
        )
    assert (config.vocab_size, config.target_hidden_size, config.target_num_layers) == (
        target.vocab_size,
        target.hidden_size,
        target.num_layers,
    ), "a draft with the target's fingerprint has its sizes"
    require_representable(config, form, target.model_type)
    tensors = {
        name.replace("midlayer.", f"{form.layer}."): tensor.contiguous()
        for name, tensor in draft.tensors.items()
    }
    if config.lm_head == "target_rows":
        tensors["lm_head.weight"] = target.lm_head[_vocab(draft).ids].contiguous()
    if form.ships_embeddings and config.embed == "target":
        tensors["embed_tokens.weight"] = target.embed.contiguous()
    return Export(tensors, exported_config(config, draft.dtype, form, target))


def write_export(
    folder: Path,
    export: Export,
    draft: StoredDraft,
    form: DraftFormat,
    target: TargetFacts,
    texts: Mapping[str, str],
) -> None:
    """Write an export to a folder that does not exist yet, with `texts` as files beside it.

    Raises:
        SpecdecError: the folder exists and holds something, or cannot be written.
    """
    require_free(folder)
    scratch = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    with writing(f"export ({folder})"):
        scratch.mkdir(parents=True)
        try:
            try:
                save_file(dict(export.tensors), scratch / WEIGHTS_NAME, metadata={"format": "pt"})
            except SafetensorError as error:
                # a full disk: its text ends in the system's reason
                raise OSError(str(error)) from error
            (scratch / CONFIG_NAME).write_text(
                json.dumps(dict(export.config), indent=2) + "\n", encoding="utf-8"
            )
            # the weights' file is made for its writer alone, and servers run as somebody else
            (scratch / WEIGHTS_NAME).chmod((scratch / CONFIG_NAME).stat().st_mode)
            for name, text in texts.items():
                (scratch / name).write_text(text, encoding="utf-8")
            _assert_reads_back(scratch, draft, form, target)
            if folder.is_dir():
                folder.rmdir()
            os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def require_free(folder: Path) -> None:
    """Refuse an output folder that already holds something."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise SpecdecError(f"--out ({folder}) already exists; name a new folder")


def _vocab(draft: StoredDraft) -> DraftVocab:
    config = draft.config
    if not config.reduced:
        return DraftVocab.full(config.vocab_size)
    return DraftVocab.from_d2t(draft.tensors["d2t"], draft.tensors["t2d"], config.vocab_size)


def _assert_reads_back(folder: Path, draft: StoredDraft, form: DraftFormat, target: TargetFacts) -> None:
    """An export that its own reader here takes for another head is a mistake of ours."""
    found = read_foreign(folder, form, target, draft.contract.template_hash).draft
    assert found.config == with_shared_rows(draft, target).config, (
        f"{form.name} reads back another configuration"
    )
    expected = with_shared_rows(draft, target).tensors
    assert found.tensors.keys() == expected.keys(), f"{form.name} reads back other tensors"
    for name, tensor in expected.items():
        other = found.tensors[name]
        same = other.dtype == tensor.dtype and torch.equal(
            other.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
        )
        assert same, f"{form.name} reads back another {name}"


def with_shared_rows(draft: StoredDraft, target: TargetFacts) -> StoredDraft:
    """The draft without embeddings and output rows that are the target's, as an import sees it."""
    config, tensors = draft.config, dict(draft.tensors)
    if config.embed == "own" and are_targets(tensors["embed_tokens.weight"], target):
        config = replace(config, embed="target")
        del tensors["embed_tokens.weight"]
    head, rows = tensors.get("lm_head.weight"), target.lm_head[_vocab(draft).ids]
    if head is not None and head.dtype == rows.dtype and torch.equal(head, rows):
        config = replace(config, lm_head="target_rows")
        del tensors["lm_head.weight"]
    return StoredDraft(config=config, contract=draft.contract, tensors=tensors)
