"""Offline acceptance against a step-by-step engine: draft, verify, commit, draft again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.drafts.eagle3 import Eagle3Head
from specdec.hf import load_hf_model
from specdec.models.rope import apply_rope
from specdec.train.config import TrainConfig
from specdec.train.evaluate import offline_acceptance
from specdec.train.head_init import build_head
from specdec.train.head_start import choose_vocab
from specdec.train.sequences import TrainSequence
from specdec.train.states import TargetStates

DEPTH, PROMPT = 3, 5


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return load_hf_model(tiny_llama)


@pytest.fixture(scope="module")
def sequences(model: Any) -> list[TrainSequence]:
    """Greedy answers of 24 tokens."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for number in range(4):
        prompt = torch.randint(0, 200, (1, PROMPT), generator=generator)
        ids = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)[0].tolist()
        found.append(TrainSequence(f"s{number}", tuple(ids), tuple(i >= PROMPT for i in range(len(ids)))))
    return found


@pytest.fixture(scope="module")
def head(model: Any, sequences: list[TrainSequence], tiny_tokenizer: Any) -> Eagle3Head:
    """A head fitted for a moment, so that chains of every length occur."""
    from specdec.train.batching import pack, sequence_weights
    from specdec.train.loss import LossOptions, Teacher, unrolled_loss

    config = TrainConfig(draft_vocab_size=150, unroll=3, init="random", prompt_rows=False)
    vocab = choose_vocab(sequences, tiny_tokenizer, model, model.config.vocab_size, config)
    source = TargetStates(model, (1, 3, 4))
    head = build_head(model, (1, 3, 4), vocab, config, torch.ones(3))
    batch = pack(sequences, source.fetch(sequences), [sequence_weights(s, config, 0) for s in sequences])
    teacher = Teacher(
        batch.final, batch.log_norm, source.output_rows(vocab.ids), vocab.draft_ids()[batch.argmax.long()]
    )
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-3)
    for _ in range(16):
        optimizer.zero_grad()
        options = LossOptions("kl", 256, torch.float32, False)
        (unrolled_loss(head, batch, teacher, head.head_weight, options).loss / 300).backward()
        optimizer.step()
    return head.requires_grad_(False)


def _propose(head: Eagle3Head, taps: Tensor, ids: list[int], depth: int) -> list[int]:
    """Greedy chain after the committed `ids`: true rows for all but the last token, then its own outputs."""
    features = head.fuse(taps[: len(ids) - 1])
    tokens = torch.tensor(ids[1:])
    q, k, v, residual = head.qkv(head.embed(tokens), features)
    cos, sin = head.rope.cos_sin(torch.arange(len(tokens)), 256)
    keys, values = apply_rope(k, cos, sin), v
    query, last = apply_rope(q, cos, sin)[-1:], residual[-1:]
    group = head.config.num_heads // head.config.num_kv_heads
    proposed: list[int] = []
    for step in range(depth):
        scores = (
            torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) / head.config.head_dim**0.5
        )
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))
        z = head.finish(mixed.flatten(1), last)
        proposed.append(int(head.vocab.ids[int(head.logits(z)[0].argmax())]))
        place = torch.tensor([len(tokens) + step])
        q, k, v, last = head.qkv(head.embed(torch.tensor(proposed[-1:])), head.feedback(z))
        cos, sin = head.rope.cos_sin(place, 256)
        query, keys, values = (
            apply_rope(q, cos, sin),
            torch.cat((keys, apply_rope(k, cos, sin))),
            torch.cat((values, v)),
        )
    return proposed


def _serve(head: Eagle3Head, model: Any, sequence: TrainSequence) -> tuple[int, int, list[int], list[int]]:
    """Steps, committed tokens, and per depth the drafted and the accepted, as an engine counts them."""
    text = list(sequence.token_ids)
    taps = TargetStates(model, head.config.boundaries).fetch([sequence])[0].taps.float()
    done, steps, committed = PROMPT + 1, 0, 0
    drafted, accepted = [0] * DEPTH, [0] * DEPTH
    while done < len(text):
        left = len(text) - done
        proposed = _propose(head, taps, text[:done], min(DEPTH, left))
        choices = model(torch.tensor([text[:done] + proposed])).logits[0, done - 1 :].argmax(-1).tolist()
        run = 0
        while run < len(proposed) and proposed[run] == choices[run]:
            run += 1
        for level in range(len(proposed)):
            drafted[level] += 1
            accepted[level] += level < run
        step = min(run + 1, left)
        assert text[done : done + step] == [*proposed[:run], choices[run]][:step]
        steps, committed, done = steps + 1, committed + step, done + step
    return steps, committed, drafted, accepted


def test_offline_acceptance_counts_what_an_engine_would(
    head: Eagle3Head, model: Any, sequences: list[TrainSequence]
) -> None:
    """Catches a chain that starts one row off, a bonus not counted, or feedback unlike serving's."""
    served = [_serve(head, model, sequence) for sequence in sequences]
    found = offline_acceptance(head, model, sequences, DEPTH)
    assert found.verify_steps == sum(item[0] for item in served)
    assert found.committed == sum(item[1] for item in served)
    drafted = [sum(column) for column in zip(*(item[2] for item in served), strict=True)]
    accepted = [sum(column) for column in zip(*(item[3] for item in served), strict=True)]
    assert found.unconditional == tuple(a / d for a, d in zip(accepted, drafted, strict=True))
    # the case is worth something only when chains of several lengths occur.
    assert 0.1 < accepted[0] / drafted[0] < 0.99
    assert accepted[2] > 0
    assert found.greedy_share == 1.0


def test_depth_zero_text_and_no_text_give_null_not_nan(head: Eagle3Head, model: Any) -> None:
    found = offline_acceptance(head, model, [], DEPTH)
    assert found.acceptance_length is None
    assert found.to_dict()["conditional"] == [None] * DEPTH


def test_a_text_that_is_not_the_targets_own_is_reported(
    head: Eagle3Head, model: Any, sequences: list[TrainSequence], make_other: Callable[..., TrainSequence]
) -> None:
    found = offline_acceptance(head, model, [make_other(sequences[0])], DEPTH)
    assert found.greedy_share is not None
    assert found.greedy_share < 0.9


@pytest.fixture
def make_other() -> Callable[[TrainSequence], TrainSequence]:
    def make(sequence: TrainSequence) -> TrainSequence:
        ids = tuple(
            (token * 7 + 3) % 200 if i >= PROMPT else token for i, token in enumerate(sequence.token_ids)
        )
        return TrainSequence("other", ids, sequence.assistant_mask)

    return make
