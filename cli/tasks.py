"""Exact-match questions of rising difficulty, and how an answer is scored.

Owns small questions that a small model can answer (written here, by rule: copying a word, sums of one and two
digits), GSM8K problems by the steps their worked solution takes, and the two scorers: the last number of an
answer, and a word it must contain. GSM8K: MIT, see ``cli/data/README.md``; the small questions are our own.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence

from specdec.audit.parity import Task
from specdec.cli.datasets import prompt_file
from specdec.errors import UsageError

# easiest first; the number is the difficulty that reports sort by
CATEGORIES = {
    "copy": 1,
    "sum of one digit": 2,
    "sum of two digits": 3,
    "gsm8k, 2 steps": 4,
    "gsm8k, 3-4 steps": 5,
    "gsm8k, 5+ steps": 6,
}
EASY, GSM8K = "easy", "gsm8k"
SETS = (EASY, GSM8K)
# fmt: off
_WORDS = (
    "river", "lemon", "window", "garden", "silver", "candle", "mountain", "pencil", "orange", "winter",
    "bridge", "turtle", "music", "forest", "basket", "planet", "coffee", "island", "mirror", "ladder",
    "butter", "camera", "dragon", "feather", "hammer", "jacket", "kettle", "magnet", "needle", "ocean",
)
# fmt: on
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# a worked solution marks each computation as <<2+3=5>>
_COMPUTATION = "<<"

Encode = Callable[[str], list[int]]


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separators dropped; None without one."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def says_number(expected: float) -> Callable[[str], bool]:
    """Right when the last number is the expected one."""
    return lambda text: last_number(text) == expected


def says_word(expected: str) -> Callable[[str], bool]:
    """Right when the word occurs, in any case."""
    pattern = re.compile(rf"\b{re.escape(expected)}\b", re.IGNORECASE)
    return lambda text: pattern.search(text) is not None


def exact_match_tasks(names: Sequence[str], count: int, encode: Encode) -> list[Task]:
    """Questions of some sets, as many of each category as `count` allows, evenly.

    Args:
        names: sets, of `SETS`.
        count: questions of each set.
        encode: from a user's turn to token ids.

    Raises:
        UsageError: an unknown set, or none.
    """
    if not names:
        raise UsageError(f"--tasks () must be some of {', '.join(SETS)}")
    unknown = [name for name in names if name not in SETS]
    if unknown:
        raise UsageError(f"--tasks ({', '.join(unknown)}) must be some of {', '.join(SETS)}")
    tasks: list[Task] = []
    if EASY in names:
        tasks += _easy(count, encode)
    if GSM8K in names:
        tasks += _gsm8k(count, encode)
    return tasks


def _task(id_: str, category: str, prompt: str, is_right: Callable[[str], bool], encode: Encode) -> Task:
    return Task(
        id=id_,
        category=category,
        difficulty=CATEGORIES[category],
        token_ids=encode(prompt),
        is_right=is_right,
    )


def _easy(count: int, encode: Encode) -> list[Task]:
    numbers = random.Random(0)
    tasks = []
    for index in range(count):
        category = list(CATEGORIES)[index % 3]
        if category == "copy":
            word = _WORDS[(index // 3) % len(_WORDS)]
            prompt, is_right = f'Repeat this word and nothing else: "{word}"', says_word(word)
        else:
            low, high = (1, 9) if category == "sum of one digit" else (10, 99)
            left, right = numbers.randint(low, high), numbers.randint(low, high)
            prompt = f"What is {left} + {right}? Answer with the number only."
            is_right = says_number(left + right)
        tasks.append(_task(f"easy-{index}", category, prompt, is_right, encode))
    return tasks


def _gsm8k(count: int, encode: Encode) -> list[Task]:
    queues: dict[str, list[Task]] = {}
    lines = prompt_file(GSM8K).read_text(encoding="utf-8").split("\n")
    for row in (json.loads(line) for line in lines if line):
        solution = str(row["reference"])
        steps = solution.count(_COMPUTATION)
        name = "gsm8k, 2 steps" if steps <= 2 else "gsm8k, 3-4 steps" if steps <= 4 else "gsm8k, 5+ steps"
        answer = last_number(solution.rsplit("####", 1)[-1])
        assert answer is not None, f"{row['id']}: a GSM8K solution ends in its answer"
        if len(queues.setdefault(name, [])) < count:
            queues[name].append(_task(str(row["id"]), name, str(row["prompt"]), says_number(answer), encode))
    # the easiest first, categories taking turns
    tasks: list[Task] = []
    order = sorted(queues, key=lambda name: CATEGORIES[name])
    for place in range(count):
        tasks += [queues[name][place] for name in order if place < len(queues[name])]
    return tasks[:count]
