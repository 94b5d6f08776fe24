"""Who asks what and when: the conversations of a load, made before the first request goes out.

Owns turns, shared prefixes, arrivals and pauses; the same seed makes the same traffic. Knows nothing of HTTP
or of clocks: times are seconds after the start. Arrivals are a Poisson process, the first at zero, as in
vLLM's bench with burstiness 1; an agent's pause is exponential: most are short and some long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.cli.datasets import CORPORA, Prompt
from specdec.errors import UsageError

# prefixes come from the beginning of one book; probes from its end; warm-up from another, so that what is
# counted finds nothing of either in the server's prefix cache
_PREFIX_BOOK, _WARM_UP_BOOK = "pride_and_prejudice", "voyage_of_the_beagle"
WARM_UP_WORDS = 32
_PROBED_END = 1000


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One client's turns.

    Attributes:
        id: of the prompt that begins it.
        turns: what the client says, in order.
        arrives_s: when it comes, after the start.
        pauses_s: how long it thinks before each turn but the first.
        seed: of its sampled answers.
    """

    id: str
    turns: tuple[str, ...]
    arrives_s: float
    pauses_s: tuple[float, ...]
    seed: int


def make_traffic(
    prompts: Sequence[Prompt],
    *,
    turns: int,
    prefixes: Sequence[str],
    request_rate: float,
    think_time: float,
    seed: int,
) -> list[Conversation]:
    """A conversation for each prompt.

    Args:
        prompts: what begins each; turns that a prompt lacks are those of the prompts behind it.
        turns: of every conversation.
        prefixes: texts in front of first turns, dealt out in turn; empty for none.
        request_rate: conversations begun a second; `inf` for all at once.
        think_time: mean pause before a later turn, in seconds.
        seed: of arrivals and pauses, and the first conversation's own.
    """
    arrivals, pauses = random.Random(f"arrivals {seed}"), random.Random(f"pauses {seed}")
    now = 0.0
    conversations = []
    for index, prompt in enumerate(prompts):
        if index and not math.isinf(request_rate):
            now += arrivals.expovariate(request_rate)
        said = _turns_from(prompts, index, turns)
        if prefixes:
            said[0] = f"{prefixes[index % len(prefixes)]}\n\n{said[0]}"
        conversations.append(
            Conversation(
                id=prompt.id,
                turns=tuple(said),
                arrives_s=now,
                pauses_s=tuple(
                    pauses.expovariate(1 / think_time) if think_time else 0.0 for _ in range(turns - 1)
                ),
                seed=seed + index,
            )
        )
    return conversations


def _turns_from(prompts: Sequence[Prompt], index: int, turns: int) -> list[str]:
    said: list[str] = []
    while len(said) < turns:
        said += prompts[index % len(prompts)].turns
        index += 1
    return said[:turns]


def prefix_texts(num_words: int, groups: int) -> list[str]:
    """Texts of so many words each, no two alike.

    Raises:
        UsageError: the book is shorter.
    """
    words = _words(CORPORA[_PREFIX_BOOK])[:-_PROBED_END]
    if num_words * groups > len(words):
        raise UsageError(
            f"--shared-prefix needs {num_words * groups} words for all --prefix-groups ({groups}); the "
            f"shipped text has {len(words)}"
        )
    return [" ".join(words[group * num_words :][:num_words]) for group in range(groups)]


def probe_text(num_words: int) -> str:
    """Words of the same book that no prefix holds, to count a server's tokens by."""
    return " ".join(_words(CORPORA[_PREFIX_BOOK])[-num_words:])


def warm_up_text(number: int) -> str:
    """A short text for an uncounted request."""
    words = _words(CORPORA[_WARM_UP_BOOK])
    start = number * WARM_UP_WORDS % (len(words) - WARM_UP_WORDS)
    return " ".join(words[start : start + WARM_UP_WORDS])


def _words(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split()
