"""A request's decoding state.

`Sequence` is the one mutable record of the runtime: token ids, block table, how far the KV cache
reaches, and what the drafter has yet to read. Host data only, except the pending feature rows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from specdec.config import SpecConfig
from specdec.errors import SpecdecError
from specdec.exactness import TARGET
from specdec.random_streams import RandomStream
from specdec.request_options import RequestOptions
from specdec.sampling_params import SamplingParams
from specdec.stats import SpecStats

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.detokenize import IncrementalDetokenizer
    from specdec.logprobs import TokenLogprobs
    from specdec.processors import RequestProcessor
    from specdec.simulated import SimulatedAcceptance
    from specdec.speculation import SpeculationController
    from specdec.verification.result import TokenKind
    from specdec.verification.rules import BoundRule


# which rows of a sequence's blocks the prefix cache may give and take: those of the target, also those of a
# drafter that reads taps, or none
PrefixUse = Literal["none", "target", "draft"]


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class Sequence:
    """Decoding state of one request.

    Invariant while decoding: `num_computed == len(token_ids) - 1`; the last committed token is the
    root of the next tree, and its KV row does not exist yet. `rule` verifies its drafts; `needs_whole_trees`
    when its text depends on what was drafted. `processor` is None when nothing but temperature and filters
    changes the target's logits; `simulated` draws accepted lengths in the rule's place, for measurements of
    speed; `logprobs` has an entry per output token when they were asked for; `exact_against`
    says whose plain text it is under an exact rule (`specdec.exactness`).

    Prefix cache: `num_indexed` blocks of the table hold final rows and may be shared, so nothing at or before
    their last row is ever written again; every new row goes behind. `boundary_states` holds the target's taps
    of the last row of blocks that are yet to be indexed, by their place in the table.
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
    rule: BoundRule
    processor: RequestProcessor | None = None
    simulated: SimulatedAcceptance | None = None
    needs_whole_trees: bool = False
    exact_against: str = TARGET
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    draft_computed: int = 0
    pending_states: list[Tensor] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt tokens from the second on
    token_kinds: list[TokenKind] = field(default_factory=list)  # of each output token
    finish_reason: str | None = None
    error: str | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    deadline: float | None = None  # on the engine's clock
    prefix_use: PrefixUse = "none"
    block_hashes: list[bytes] = field(default_factory=list)
    boundary_states: dict[int, Tensor] = field(default_factory=dict)
    num_indexed: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens that came out of the prefix cache when first admitted

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        """Whether its next pass reads text rather than verifies drafts: up to the pass ending the prompt."""
        return self.num_output == 0 or self.num_computed < len(self.token_ids) - 1

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

    def add_states(self, states: Tensor, block_size: int) -> None:
        """Take the taps `[rows, taps, hidden]` of the next committed rows, before they are counted."""
        self.pending_states.append(states)
        if self.prefix_use == "draft":
            first = self.num_computed
            for row in range(first, first + len(states)):
                if (row + 1) % block_size == 0:
                    # a copy, or every row of the step would be kept with it
                    self.boundary_states[row // block_size] = states[row - first].clone()

    def drop_rows_behind_the_text(self) -> None:
        """Uncount rows whose next token was never committed: the end of the text cut the step short."""
        self.num_computed = min(self.num_computed, len(self.token_ids) - 1)

    def reset_cache(self) -> None:
        """Forget all computed rows (preemption); the prefix cache may give some of them back."""
        self.num_computed = 0
        self.draft_computed = 0
        self.pending_states = []
        self.boundary_states = {}
        self.num_indexed = 0


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
