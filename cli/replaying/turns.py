"""Conversations that go on, turn by turn, on an engine that keeps prefixes and on one that does not.

Owns their texts, their order and what one turn gave. Both engines answer the same prompts, batch by batch,
and go first in turn; a batch's prompts all arrive at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.cli.datasets import Prompt
from specdec.engine import Engine
from specdec.errors import SpecdecError
from specdec.prefix_index import common_length
from specdec.sequence import SamplingParams, Sequence
from specdec.stats import SpecStats

# more than there are conversations, so that no two answers share a seed
SEEDS_PER_TURN = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn on one engine."""

    token_ids: list[int]
    text: str
    cached: int
    ttft_s: float
    stats: SpecStats


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a conversation on both engines."""

    id: str
    number: int
    batch: int
    prompt_tokens: int
    repeated: int
    rendered_differently: bool
    warm: Answer
    cold: Answer

    @property
    def recomputed(self) -> int:
        return max(0, self.repeated - self.warm.cached)

    def to_dict(self) -> dict[str, Any]:
        """One record for the report's details."""
        return {
            "id": self.id,
            "turn": self.number,
            "batch": self.batch,
            "prompt_tokens": self.prompt_tokens,
            "repeated_tokens": self.repeated,
            "cached_tokens": self.warm.cached,
            "recomputed_tokens": self.recomputed,
            "rendered_differently": self.rendered_differently,
            "identical": self.warm.token_ids == self.cold.token_ids,
            **{
                side: {
                    "tokens": len(answer.token_ids),
                    "ttft_s": round(answer.ttft_s, 5),
                    "verify_steps": answer.stats.verify_steps,
                    "committed": answer.stats.committed,
                    "drafted": answer.stats.drafted,
                    "accepted": answer.stats.accepted,
                }
                for side, answer in (("warm", self.warm), ("cold", self.cold))
            },
        }


@dataclass
class Conversation:
    """A talk as it grows: messages, and the ids of its last prompt and answer."""

    id: str
    asks: list[str]
    seed: int
    messages: list[dict[str, str]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)


def conversations_of(prompts: list[Prompt], limit: int, turns: int, seed: int) -> list[Conversation]:
    """The first prompts of a set with `turns` turns each.

    Turns a prompt lacks are the last turns of those that follow it in the set, each another one.
    """
    asked = [prompt.turns[-1] for prompt in prompts]
    made = []
    for index, prompt in enumerate(prompts[:limit]):
        lent = (asked[(index + step) % len(asked)] for step in range(1, turns))
        asks = [*prompt.turns, *lent][:turns]
        made.append(Conversation(id=prompt.id, asks=asks, seed=seed + index))
    return made


def answer_batch(engine: Engine, batch: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
    """Answer prompts that arrive at once; notes when each has its first token.

    Raises:
        SpecdecError: a request that ended in an error.
    """
    started = time.perf_counter()
    sequences = [engine.add(token_ids, params) for token_ids, params in batch]
    first: dict[int, float] = {}
    while not all(seq.is_finished for seq in sequences):
        engine.step()
        now = time.perf_counter() - started
        for seq in sequences:
            if seq.num_output:
                first.setdefault(seq.seq_id, now)
    for seq in sequences:
        if seq.error is not None:
            raise SpecdecError(f"an answer failed: {seq.error}; nothing was measured")
    return [_answer(seq, first[seq.seq_id]) for seq in sequences]


def _answer(seq: Sequence, ttft: float) -> Answer:
    return Answer(
        token_ids=seq.output_ids,
        text=seq.detokenizer.text,
        cached=seq.num_cached_tokens,
        ttft_s=ttft,
        stats=seq.stats,
    )


def replay_turns(
    warm: Engine,
    cold: Engine,
    talks: list[Conversation],
    params: SamplingParams,
    batch_size: int,
    advance: Callable[[int], None],
) -> list[Turn]:
    """Every conversation's first turn, then every second one, and so on.

    Args:
        warm: keeps prefixes; its answers are the history.
        cold: does not.
        talks: conversations, each with as many turns as the others.
        params: how answers are sampled, but for seeds.
        batch_size: conversations answered at once.
        advance: is told how many turns were answered.
    """
    done: list[Turn] = []
    for number in range(len(talks[0].asks)):
        for first in range(0, len(talks), batch_size):
            talking = talks[first : first + batch_size]
            batch = []
            for talk in talking:
                talk.messages.append({"role": "user", "content": talk.asks[number]})
                token_ids = warm.encoder.encode(talk.messages)
                batch.append((token_ids, replace(params, seed=talk.seed + SEEDS_PER_TURN * number)))
            sides = {}
            order = ("warm", "cold") if first // batch_size % 2 else ("cold", "warm")
            for side in order:
                sides[side] = answer_batch(warm if side == "warm" else cold, batch)
            for talk, (token_ids, _), ours, theirs in zip(
                talking, batch, sides["warm"], sides["cold"], strict=True
            ):
                repeated = common_length(token_ids, talk.before)
                done.append(
                    Turn(
                        id=talk.id,
                        number=number + 1,
                        batch=first // batch_size,
                        prompt_tokens=len(token_ids),
                        repeated=repeated,
                        rendered_differently=repeated < len(talk.before),
                        warm=ours,
                        cold=theirs,
                    )
                )
                talk.before = [*token_ids, *ours.token_ids]
                talk.messages.append({"role": "assistant", "content": ours.text})
            advance(len(talking))
    return done
