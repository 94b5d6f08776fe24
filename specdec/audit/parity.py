"""Level C5: exact-match task scores with and without speculation.

Necessary and far from sufficient: a wrong law can score alike. Prompts are paired, so what counts is the
discordant ones, those that one of the two solves alone (McNemar's exact test).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.audit.goodness import sign_test
from specdec.audit.levels import Figure, LevelResult, level_result

# of the test over all tasks together
ALPHA = 0.01


@dataclass(frozen=True, kw_only=True)
class Task:
    """One exact-match question.

    Attributes:
        id: its name.
        category: what it is scored with.
        difficulty: from 1, the easiest.
        token_ids: the rendered prompt.
        is_right: whether an answer's text is right.
    """

    id: str
    category: str
    difficulty: int
    token_ids: list[int]
    is_right: Callable[[str], bool]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer to a task."""

    text: str
    token_ids: list[int]


def by_category(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Places of the tasks of each category, the easiest category first."""
    rows: dict[str, list[int]] = {}
    for index in sorted(range(len(tasks)), key=lambda index: tasks[index].difficulty):
        rows.setdefault(tasks[index].category, []).append(index)
    return rows


def scores(tasks: Sequence[Task], answers: Sequence[Answer]) -> list[bool]:
    """Which tasks were answered right."""
    return [task.is_right(answer.text) for task, answer in zip(tasks, answers, strict=True)]


def score_table(tasks: Sequence[Task], right: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """Right answers and their share, by category."""
    return {
        category: {
            "tasks": len(rows),
            "right": sum(right[row] for row in rows),
            "score": sum(right[row] for row in rows) / len(rows),
        }
        for category, rows in by_category(tasks).items()
    }


def audit_parity(
    tasks: Sequence[Task], plain: Sequence[Answer], speculated: Sequence[Answer], notes: Sequence[str]
) -> LevelResult:
    """Compare the scores of two ways of answering.

    Args:
        tasks: the questions.
        plain: answers without speculation.
        speculated: answers with it.
        notes: how they were made.
    """
    before, after = scores(tasks, plain), scores(tasks, speculated)
    figures = []
    for category, rows in by_category(tasks).items():
        figures.append(_figure(category, rows, before, after, plain, speculated, decides=False))
    everything = list(range(len(tasks)))
    figures.append(_figure("all tasks", everything, before, after, plain, speculated, decides=True))
    return level_result(
        "C5",
        figures,
        notes=(
            *notes,
            f"McNemar's exact test on the discordant tasks; fails below p = {ALPHA:g}. Scores near 0 or 1 "
            "decide little: see right answers and n",
        ),
    )


def _figure(
    name: str,
    rows: list[int],
    before: list[bool],
    after: list[bool],
    plain: Sequence[Answer],
    speculated: Sequence[Answer],
    *,
    decides: bool,
) -> Figure:
    only_plain = sum(before[row] and not after[row] for row in rows)
    only_speculated = sum(after[row] and not before[row] for row in rows)
    p_value = sign_test(only_plain, only_speculated)
    return Figure(
        name=name,
        values={
            "tasks": len(rows),
            "plain_right": sum(before[row] for row in rows),
            "speculated_right": sum(after[row] for row in rows),
            "only_plain": only_plain,
            "only_speculated": only_speculated,
            "p_value": p_value,
            "identical_answers": sum(plain[row].token_ids == speculated[row].token_ids for row in rows),
        },
        passed=p_value >= ALPHA if decides else None,
    )
