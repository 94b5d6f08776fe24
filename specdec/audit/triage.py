"""Near tie or bug: what two texts that should be equal differ by, judged by the fp32 reference.

A near tie is a place where the reference's own logits of the two tokens, and of its best one, lie closer
together than harmless changes move them (`Noise.near_tie`): rounding decides there. Anything else is a bug,
however small the reference's top-2 margin: both figures are given. Whether the rows that chose were right is
not known here (`Trajectories.condemn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch

from specdec.audit.reference import Noise, PlainReference
from specdec.random_streams import RandomStream

Verdict = Literal["near tie", "bug"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where two texts differ.

    Attributes:
        prompt: its name.
        index: number of the token in the answer.
        token: what speculation wrote; None where its text had ended.
        plain_token: what plain decoding wrote; None where its text had ended.
        margin: between the two best logits of the reference (sampled: what the better one lacks to win the
            race of the other text's token).
        gap: from the reference's best down to the lower of the two tokens.
        verdict: near tie or bug.
    """

    prompt: str
    index: int
    token: int | None
    plain_token: int | None
    margin: float | None
    gap: float | None
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Number of the first token in which two texts differ, an end counting as a token; None when equal."""
    for index, (one, two) in enumerate(zip(first, second, strict=False)):
        if one != two:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def triage_greedy(
    prompt: str,
    prompt_ids: Sequence[int],
    text: Sequence[int],
    plain: Sequence[int],
    reference: PlainReference,
    noise: Noise,
) -> Difference | None:
    """Judge the first difference of two greedy texts; None when they are equal."""
    index = first_difference(text, plain)
    if index is None:
        return None
    if index >= min(len(text), len(plain)):
        # equal tokens cannot end a text in one place and not in the other
        return _ended(prompt, index, text, plain)
    context = [*prompt_ids, *plain[:index]]
    row = reference.logits(context, len(context) - 1)[0]
    best = row.topk(2).values
    gap = float(best[0] - torch.minimum(row[text[index]], row[plain[index]]))
    return Difference(
        prompt=prompt,
        index=index,
        token=text[index],
        plain_token=plain[index],
        margin=float(best[0] - best[1]),
        gap=gap,
        verdict="near tie" if gap <= noise.near_tie else "bug",
    )


def triage_race(
    prompt: str,
    prompt_ids: Sequence[int],
    text: Sequence[int],
    plain: Sequence[int],
    seed: int,
    reference: PlainReference,
    noise: Noise,
) -> Difference | None:
    """Judge the first difference of two texts drawn by the same races at temperature 1.

    The gap is the lift that the reference's logit of either token needs to win the race there.
    """
    index = first_difference(text, plain)
    if index is None:
        return None
    if index >= min(len(text), len(plain)):
        return _ended(prompt, index, text, plain)
    context = [*prompt_ids, *plain[:index]]
    law = torch.softmax(reference.logits(context, len(context) - 1)[0].double(), dim=0).numpy()
    stream = RandomStream(seed)
    lifts = [_lift_to_win(stream, len(context) - 1, law, token) for token in (text[index], plain[index])]
    gap = max(lifts)
    return Difference(
        prompt=prompt,
        index=index,
        token=text[index],
        plain_token=plain[index],
        margin=min(lifts),
        gap=gap,
        verdict="near tie" if gap <= noise.near_tie else "bug",
    )


def _ended(prompt: str, index: int, text: Sequence[int], plain: Sequence[int]) -> Difference:
    return Difference(
        prompt=prompt,
        index=index,
        token=text[index] if index < len(text) else None,
        plain_token=plain[index] if index < len(plain) else None,
        margin=None,
        gap=None,
        verdict="bug",
    )


def _lift_to_win(stream: RandomStream, position: int, law: np.ndarray, token: int) -> float:
    """Find how much the token's logit must rise for it to win the race."""
    noise = stream.exponentials(position, len(law))
    with np.errstate(divide="ignore"):
        scores = np.log(law) - np.log(noise)
    return float(scores.max() - scores[token])
