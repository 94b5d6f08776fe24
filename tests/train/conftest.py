"""Tiny heads, targets and sequences of the training tests; everything from seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specdec.config import RopeConfig
from specdec.drafts.config import Eagle3Config
from specdec.drafts.eagle3 import Eagle3Head
from specdec.drafts.vocab import DraftVocab
from specdec.train.batching import RowBatch, SequenceStates, pack, sequence_weights
from specdec.train.config import TrainConfig
from specdec.train.sequences import TrainSequence

VOCAB, HIDDEN = 40, 16


def tiny_config(**overrides: Any) -> Eagle3Config:
    """A head of width 16 whose head_dim is not hidden / heads."""
    rope = RopeConfig(rope_type="default", theta=1e4, head_dim=6, max_position_embeddings=256)
    config = Eagle3Config(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        rms_norm_eps=1e-6,
        rope=rope,
        vocab_size=VOCAB,
        draft_vocab_size=12,
        boundaries=(1, 3, 4),
        target_hidden_size=HIDDEN,
        target_num_layers=4,
    )
    return replace(config, **overrides)


@pytest.fixture
def make_head(target_rows: torch.Tensor) -> Callable[..., Eagle3Head]:
    """Call with config overrides: a random head in fp64, every norm away from one."""

    def make(**overrides: Any) -> Eagle3Head:
        config = tiny_config(**overrides)
        generator = torch.Generator().manual_seed(1)
        step = VOCAB // config.draft_vocab_size
        vocab = DraftVocab(torch.arange(config.draft_vocab_size) * step, VOCAB)
        embed = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        head = Eagle3Head(config, vocab, embed, target_rows).double()
        with torch.no_grad():
            for parameter in head.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
        return head

    return make


@dataclass(frozen=True)
class Batch:
    """Random sequences with target outputs that agree with each other under the head's target rows."""

    sequences: list[TrainSequence]
    states: list[SequenceStates]

    def packed(self, unroll: int, **options: Any) -> RowBatch:
        """All of it in one batch."""
        return pack(self.sequences, self.states, self.weights(unroll, **options))

    def weights(self, unroll: int, **options: Any) -> list[torch.Tensor]:
        """Slot weights of each sequence."""
        config = TrainConfig(unroll=unroll, **options)
        return [sequence_weights(sequence, config, 0) for sequence in self.sequences]


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """Call with a head and (length, prompt length) pairs."""

    def make(rows_weight: torch.Tensor, shapes: list[tuple[int, int]], seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        sequences, states = [], []
        for number, (length, prompt) in enumerate(shapes):
            ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
            mask = tuple(place >= prompt for place in range(length))
            sequences.append(TrainSequence(f"s{number}", tuple(ids), mask))
            taps = torch.randn(length - 1, 3, HIDDEN, generator=generator, dtype=torch.float64)
            final = torch.randn(length - 1, HIDDEN, generator=generator, dtype=torch.float64)
            logits = final @ rows_weight.T
            states.append(SequenceStates(taps, final, logits.argmax(-1).int(), torch.logsumexp(logits, -1)))
        return Batch(sequences, states)

    return make


@pytest.fixture
def target_rows() -> torch.Tensor:
    """A random output head [vocab, hidden] of the imagined target, fp64."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
