"""What a point costs besides time: FLOPs by formula, draft training by its record, memory by its shapes.

Formulas. A pass over one row of the target at context c: 2 P + 4 N H D c FLOPs, P the weights of its matrices
(output head included, embedding table not), N layers, H heads, D their width. A verify step has 1 + drafted
rows, so FLOPs a committed token are that times (verify steps + drafted) / committed, at the mean context.
The draft: the same with its own P, over one row for each committed token (true states) and one for each
drafted one. Training: answer tokens of its record times 1 (the target reads each once, states are kept) and
the tap bytes that takes, 2 k d a token. Memory: weights as stored, KV and taps a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.cli.sweeping.points import PLAIN
from specdec.config import ModelConfig
from specdec.drafts import LOOKUP, draft_folder
from specdec.drafts.checkpoint import expected_shapes
from specdec.drafts.config import Eagle3Config
from specdec.provenance import read_json, sha256_file, sha256_text

FP32_BYTES = 4
STATE_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """What a drafter costs.

    Attributes:
        weights: entries of its matrices, those of the output rows it borrows included.
        attention_width: heads times their width times layers.
        weight_bytes: its own weights in memory.
        kv_bytes_per_token: of its cache.
        tap_bytes_per_token: of the target states it waits for.
        training_target_tokens: tokens the target read for its training; None where no record says.
        training_seconds: of its training; None where no record says.
        training_tap_bytes: of the states kept for its training.
    """

    weights: int = 0
    attention_width: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    tap_bytes_per_token: int = 0
    training_target_tokens: int | None = 0
    training_seconds: float | None = 0.0
    training_tap_bytes: int | None = 0

    def memory_bytes(self, tokens: int) -> int:
        """Weights, and cache and taps of this many tokens."""
        return self.weight_bytes + tokens * (self.kv_bytes_per_token + self.tap_bytes_per_token)


def target_weights(config: ModelConfig) -> int:
    """Entries of the target's matrices that a row is multiplied with."""
    hidden, dim = config.hidden_size, config.head_dim
    attention = hidden * dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    mlp = 3 * hidden * config.intermediate_size
    return config.num_layers * (attention + mlp) + config.vocab_size * hidden


def row_flops(weights: int, attention_width: int, context: float) -> float:
    """FLOPs of one row at a context length."""
    return 2.0 * weights + 4.0 * attention_width * context


def flops_per_token(
    config: ModelConfig,
    draft: DraftCost,
    *,
    verify_steps: int,
    drafted: int,
    committed: int,
    context: float,
) -> tuple[float, float] | None:
    """FLOPs per committed token of target and draft; None when nothing was committed by a verify step."""
    if not committed:
        return None
    width = config.num_layers * config.num_heads * config.head_dim
    target = row_flops(target_weights(config), width, context) * (verify_steps + drafted) / committed
    own = row_flops(draft.weights, draft.attention_width, context) * (committed + drafted) / committed
    return target, own


def head_folder(spelling: str) -> Path | None:
    """Folder of the head a drafter has, None for a lookup alone and for no drafter.

    Raises:
        SpecdecError: no such draft.
    """
    return None if spelling in (PLAIN, LOOKUP) else draft_folder(spelling.removeprefix(f"{LOOKUP}+"))


def draft_fingerprint(spelling: str) -> str | None:
    """Hash of what a drafter drafts with, its weights and its config; None where it has no head.

    Raises:
        SpecdecError: no such draft, or a folder that is none.
    """
    folder = head_folder(spelling)
    if folder is None:
        return None
    return sha256_text(" ".join(sha256_file(folder / name) for name in ("model.safetensors", "config.json")))


def draft_cost(spelling: str) -> DraftCost:
    """Cost of a drafter by its spelling; a lookup costs nothing that is counted here.

    Raises:
        SpecdecError: no such draft.
    """
    folder = head_folder(spelling)
    if folder is None:
        return DraftCost()
    config = Eagle3Config.from_dict(read_json(folder / "config.json"))
    shapes = expected_shapes(config)
    stored = sum(math.prod(shape) for key, shape in shapes.items() if key not in ("d2t", "t2d"))
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    borrowed = 0 if config.lm_head == "own" else config.draft_vocab_size * config.hidden_size
    taps = config.num_taps * config.target_hidden_size
    record = folder / "run.json"
    training: dict[str, Any] = read_json(record).get("extra", {}) if record.exists() else {}
    tokens = training.get("answer_tokens")
    return DraftCost(
        weights=matrices + borrowed,
        attention_width=config.num_heads * config.head_dim,
        weight_bytes=FP32_BYTES * (stored + borrowed),
        kv_bytes_per_token=FP32_BYTES * 2 * config.num_kv_heads * config.head_dim,
        tap_bytes_per_token=FP32_BYTES * taps,
        training_target_tokens=tokens,
        training_seconds=training.get("seconds"),
        training_tap_bytes=None if tokens is None else STATE_BYTES * taps * tokens,
    )
