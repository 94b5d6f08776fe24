"""A request's sampling parameters and its decoding state.

`Sequence` is the one mutable record of the runtime: token ids, block table, how far the KV cache
reaches, and what the drafter has yet to read. Host data only, except the pending feature rows.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec.config import SpecConfig
from specdec.errors import SpecdecError
from specdec.random_streams import RandomStream
from specdec.stats import SpecStats

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.detokenize import IncrementalDetokenizer
    from specdec.speculation import SpeculationController

GREEDY_TEMPERATURE = 1e-5  # at and below this, sampling is greedy on every path
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature 0 (up to 1e-5) is greedy; top_k 0 or -1 means off. `max_tokens` None runs to the
    context's end. `seed` None draws a fresh one, recorded in the result.
    `spec` overrides the engine's speculation settings for this request; `speculate` False turns
    speculation off for it.

    Raises:
        SpecdecError: a value out of range, NaN included; the message names field, value and range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    speculate: bool = True
    spec: SpecConfig | None = None

    def __post_init__(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 1 << 30)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 1 << 30)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if len(self.stop) > MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in self.stop):
            raise SpecdecError(
                f"stop ({len(self.stop)} entries) must be at most {MAX_STOP_STRINGS} non-empty strings"
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, 1 << 31)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE


def _check_float(name: str, value: Any, low: float, high: float, exclude_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (exclude_low and value == low):
        bracket = "(" if exclude_low else "["
        raise SpecdecError(f"{name} ({value!r}) must be a number in {bracket}{low}, {high}]")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise SpecdecError(f"{name} ({value!r}) must be an integer in {low}..{high}")


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Sequence:
    """Decoding state of one request.

    Invariant while decoding: `num_computed == len(token_ids) - 1`; the last committed token is the
    root of the next tree, and its KV row does not exist yet.
    """

    seq_id: int
    prompt_len: int
    token_ids: list[int]
    params: SamplingParams
    spec: SpecConfig | None
    stream: RandomStream
    max_len: int
    stop_ids: frozenset[int]
    detokenizer: IncrementalDetokenizer
    controller: SpeculationController
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    draft_computed: int = 0
    pending_states: list[Tensor] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < len(self.token_ids) - 1

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def remaining_tokens(self) -> int:
        """Tokens this sequence may still commit (max_tokens and context end)."""
        return self.max_len - len(self.token_ids)

    def finish(self, reason: str, error: str | None = None) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.error = error

    def reset_cache(self) -> None:
        """Forget all computed rows (preemption by recomputation)."""
        self.num_computed = 0
        self.draft_computed = 0
        self.pending_states = []


def check_prompt(token_ids: SequenceOf[int], vocab_size: int, max_model_len: int) -> None:
    """Refuse a prompt the engine cannot decode.

    Raises:
        SpecdecError: empty, too long for the context, or ids outside the vocabulary.
    """
    if not token_ids:
        raise SpecdecError("prompt is empty: at least one token is needed")
    if len(token_ids) >= max_model_len:
        raise SpecdecError(
            f"prompt ({len(token_ids)} tokens) must be shorter than the context ({max_model_len} tokens)"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise SpecdecError(f"prompt token ids ({low}..{high}) must lie in 0..{vocab_size - 1}")
