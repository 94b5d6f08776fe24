"""The points of a bench: which settings, on which prompts, at which batch size and temperature.

Owns the spelling of several values in one option, the settings that drafts, shapes and rules make, and the
conversations of a data set with the turns that follow on the target's own answers. Measures nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.cli.benching.measure import PLAIN, BenchPrompt, Follow, Measured, Setting
from specdec.cli.datasets import Prompt, choose_prompts, load_prompts
from specdec.cli.shapes import parse_shape
from specdec.config import SpecConfig
from specdec.drafts import check_spelling
from specdec.errors import SpecdecError, UsageError
from specdec.requests import PromptEncoder
from specdec.verification.registry import rule_named

# rendered again, an answer may have more tokens than it was written with
_RENDERED_AGAIN = 4


@dataclass(frozen=True, kw_only=True)
class BenchPoint:
    """Where all settings are measured side by side."""

    data: str
    batch_size: int
    temperature: float

    @property
    def coordinates(self) -> dict[str, Any]:
        """As rows and records name them."""
        return {"data": self.data, "batch_size": self.batch_size, "temperature": self.temperature}

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.data}, batch {self.batch_size}, temperature {self.temperature:g}"


def points_of(
    data: Sequence[str], batch_sizes: Sequence[int], temperatures: Sequence[float]
) -> list[BenchPoint]:
    """Every combination, set by set.

    Raises:
        UsageError: the same set twice.
    """
    if len(set(data)) != len(data):
        raise UsageError("--data must not name the same set twice")
    return [
        BenchPoint(data=name, temperature=temperature, batch_size=size)
        for name, temperature, size in itertools.product(data, temperatures, batch_sizes)
    ]


def settings_of(
    drafts: Sequence[str],
    shapes: Sequence[str],
    rules: Sequence[str],
    knobs: dict[str, float | str],
    base: SpecConfig,
) -> list[Setting]:
    """Plain decoding and every drafter in every shape, or in its own (DRAFT@SHAPE), under every rule.

    Raises:
        SpecdecError: an unknown rule or knob, or one setting twice.
    """
    parsed = {shape: parse_shape(shape, base) for shape in shapes}
    settings = [Setting(name=PLAIN, draft=None, spec=None)]
    for spelled in drafts:
        draft, own = split_draft(spelled)
        chosen = {own: parse_shape(own, base)} if own else parsed
        for shape, spec in chosen.items():
            settings.append(Setting(name=f"{draft} {shape}", draft=draft, spec=spec, shape=shape))
    if rules:
        labels = {rule: rule_named(rule, knobs).label for rule in rules}
        settings[1:] = [
            replace(setting, name=f"{setting.name} {label}", rule=rule, knobs=knobs)
            for setting in settings[1:]
            for rule, label in labels.items()
        ]
    names = {setting.name for setting in settings}
    if len(names) != len(settings) or len(set(rules)) != len(rules):
        raise SpecdecError("--draft, --shape and --rule must not name the same setting twice")
    return settings


def check_drafts(settings: Sequence[Setting]) -> None:
    """Refuse a draft that is none before the target is loaded.

    Raises:
        SpecdecError: naming what there is.
    """
    for draft in {setting.draft for setting in settings} - {None}:
        assert draft is not None, "the settings without a draft are left out"
        check_spelling(draft)


def split_draft(spelled: str) -> tuple[str, str | None]:
    """`DRAFT@SHAPE` as both; a path may hold an @ of its own."""
    draft, at, shape = spelled.rpartition("@")
    return (draft, shape) if at and shape.startswith(("chain:", "tree:")) else (spelled, None)


@dataclass(frozen=True, kw_only=True)
class BenchData:
    """One set's prompts: as text for the turns to come, as ids for the first ones."""

    name: str
    prompts: list[Prompt]
    first: list[BenchPrompt]

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of each first turn, by id."""
        return {row.id: len(row.token_ids) for row in self.first}

    def longest(self, encoder: PromptEncoder, turns: int, max_tokens: int) -> int:
        """A bound on the tokens of a conversation's last prompt."""
        if turns == 1:
            return max(self.lengths.values())
        between = (turns - 1) * max_tokens * _RENDERED_AGAIN
        return between + max(
            sum(len(encoder.encode([_said(turn)])) for turn in prompt.turns[:turns])
            for prompt in self.prompts
        )


def bench_data(
    encoder: PromptEncoder, data: str, limit: int | None, *, spread: bool = False, seed: int = 0
) -> BenchData:
    """A prompt set, its first turns rendered with the target's chat template.

    Args:
        encoder: the target's.
        data: name or file.
        limit: how many prompts; None for all.
        spread: take them at even distances.
        seed: of the first prompt's answer; the others follow it.
    """
    prompts = choose_prompts(load_prompts(data), limit, spread=spread)
    first = [
        BenchPrompt(
            id=prompt.id,
            category=prompt.category,
            token_ids=encoder.encode([_said(prompt.turns[0])]),
            seed=seed + index,
        )
        for index, prompt in enumerate(prompts)
    ]
    return BenchData(name=data, prompts=prompts, first=first)


def follower(
    data: BenchData, encoder: PromptEncoder, turns: int, room: int, left_out: list[dict[str, Any]]
) -> Follow:
    """How conversations go on: what was written, then the user's next turn.

    Args:
        data: their texts.
        encoder: the target's.
        turns: most turns of a conversation; one with fewer ends with its own.
        room: most tokens of a prompt.
        left_out: is told of turns that are longer.
    """
    texts = {prompt.id: prompt.turns for prompt in data.prompts}
    said = {prompt.id: [_said(prompt.turns[0])] for prompt in data.prompts}

    def follow(row: BenchPrompt, answer: Measured) -> BenchPrompt | None:
        turn = row.turn + 1
        if turn >= min(turns, len(texts[row.id])):
            return None
        messages = [*said[row.id], {"role": "assistant", "content": answer.text}, _said(texts[row.id][turn])]
        said[row.id] = messages
        token_ids = encoder.encode(messages)
        if len(token_ids) > room:
            reason = f"its prompt ({len(token_ids)} tokens) leaves no room in {room}"
            entry = {"data": data.name, "id": row.id, "turn": turn, "reason": reason}
            if entry not in left_out:
                left_out.append(entry)
            return None
        return replace(row, token_ids=token_ids, turn=turn)

    return follow


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
