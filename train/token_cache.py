"""Tokenised data files, kept so that a large one is tokenised once.

Owns the key, which holds everything that decides the ids (content, template, tokenizer, options), and the
form on disk. A copy that cannot be read is made again. Knows nothing of how records become sequences.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecdecError
from specdec.hf import template_hash, tokenizer_json
from specdec.provenance import cache_home, sha256_file, write_bytes_atomic
from specdec.train.chat_records import ChatData, Dropped
from specdec.train.sequences import TrainSequence

logger = logging.getLogger(__name__)

# raised whenever the same file gives other ids
SCHEMA = "specdec.tokens/1"
# a smaller file is tokenised in the time that reading a copy would save
MIN_BYTES = 4 << 20


def token_key(file: Path, tokenizer: Any, *, max_length: int, vocab_size: int) -> str:
    """Hash of all that the ids of a file depend on."""
    parts = [
        SCHEMA,
        sha256_file(file),
        # the end of the name says how it is read
        file.suffix,
        template_hash(tokenizer),
        hashlib.sha256(tokenizer_json(tokenizer).encode()).hexdigest(),
        max_length,
        vocab_size,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def through_cache(
    file: Path, tokenizer: Any, *, max_length: int, vocab_size: int, make: Callable[[], ChatData]
) -> ChatData:
    """What `make` gives for a file, from the copy where there is one; small files get none."""
    # a tokenizer written in Python has no form that could be hashed
    if file.stat().st_size < MIN_BYTES or not tokenizer.is_fast:
        return make()
    key = token_key(file, tokenizer, max_length=max_length, vocab_size=vocab_size)
    path = cache_home() / "tokens" / f"{key}.npz"
    if path.is_file():
        try:
            found = _unpacked(path.read_bytes())
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("tokenised copy %s cannot be read (%s): made again", path, error)
        else:
            logger.info("tokenised copy %s", path)
            return found
    made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, _packed(made))
    except (OSError, SpecdecError) as error:
        logger.warning("no tokenised copy is kept: %s", error)
    return made


def _packed(data: ChatData) -> bytes:
    about = {
        "ids": [sequence.id for sequence in data.sequences],
        "categories": [sequence.category for sequence in data.sequences],
        "dropped": [[item.line, item.reason] for item in data.dropped],
        "partly_trained": data.partly_trained,
    }
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8),
        lengths=np.array([len(sequence.token_ids) for sequence in data.sequences], dtype=np.int64),
        tokens=np.array([t for sequence in data.sequences for t in sequence.token_ids], dtype=np.int32),
        mask=np.array([on for sequence in data.sequences for on in sequence.assistant_mask], dtype=np.bool_),
    )
    return buffer.getvalue()


def _unpacked(content: bytes) -> ChatData:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        about = json.loads(arrays["about"].tobytes())
        ends = np.cumsum(arrays["lengths"]).tolist()
        tokens, mask = arrays["tokens"].tolist(), arrays["mask"].tolist()
    if not ends or ends[-1] != len(tokens) or len(mask) != len(tokens):
        raise ValueError("its parts do not fit together")
    sequences = tuple(
        TrainSequence(
            id=name,
            token_ids=tuple(tokens[low:high]),
            assistant_mask=tuple(mask[low:high]),
            category=category,
        )
        for name, category, low, high in zip(
            about["ids"], about["categories"], [0, *ends[:-1]], ends, strict=True
        )
    )
    dropped = tuple(Dropped(line, reason) for line, reason in about["dropped"])
    return ChatData(sequences, dropped, about["partly_trained"])
