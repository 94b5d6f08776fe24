"""Levels C2 and C3: the text with speculation is the plain text, token for token.

C2 compares greedy texts, C3 texts sampled by coupled verification, which depend on seed and target alone. In
fp32 equality is expected outright; in half precision a verify pass rounds otherwise than a pass of one row,
and a difference counts as harmless only where the reference finds a near tie (`triage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from specdec.audit.levels import Figure, LevelResult, level_result
from specdec.audit.reference import MARGIN_SAFETY, Noise, PlainReference
from specdec.audit.triage import Difference, triage_greedy, triage_race
from specdec.requests import GenerationResult


@dataclass
class Trajectories:
    """Pairs of texts of one setting, compared as they come.

    Attributes:
        setting: what wrote the texts.
        reference: the target in fp32.
        noise: how near a tie must be.
        exact: whether every difference fails (fp32), near ties included.
    """

    setting: str
    reference: PlainReference
    noise: Noise
    exact: bool
    texts: int = 0
    tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    # surprise of the texts under the reference
    _surprise: float = 0.0
    _plain_surprise: float = 0.0
    _scored: int = 0
    _plain_scored: int = 0

    def take(
        self,
        names: Sequence[str],
        results: Sequence[GenerationResult],
        plain: Sequence[GenerationResult],
        *,
        sampled: bool = False,
    ) -> None:
        """Compare the texts of some prompts with those of plain decoding."""
        for name, one, other in zip(names, results, plain, strict=True):
            prompt = one.prompt_token_ids
            if sampled:
                found = triage_race(
                    name, prompt, one.token_ids, other.token_ids, one.seed, self.reference, self.noise
                )
            else:
                found = triage_greedy(
                    name, prompt, one.token_ids, other.token_ids, self.reference, self.noise
                )
            self.texts += 1
            self.tokens += len(other.token_ids)
            if found is not None:
                self.differences.append(found)
            surprise = self._surprise_of(other)
            self._plain_surprise += surprise
            self._plain_scored += len(other.token_ids)
            self._surprise += surprise if found is None else self._surprise_of(one)
            self._scored += len(one.token_ids)

    def condemn(self, spoiled: Mapping[str, int]) -> None:
        """Call a difference a bug whose text was chosen from wrong rows (C4) before or at that place.

        A near tie is where equal rows round differently; where the rows are not equal, a small margin excuses
        nothing.

        Args:
            spoiled: prompt -> number of its first token from a wrong row.
        """
        self.differences = [
            replace(found, verdict="bug") if spoiled.get(found.prompt, math.inf) <= found.index else found
            for found in self.differences
        ]

    def _surprise_of(self, result: GenerationResult) -> float:
        text = [*result.prompt_token_ids, *result.token_ids]
        rows = self.reference.logits(text[:-1], len(result.prompt_token_ids) - 1)
        chosen = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        return float((rows.logsumexp(dim=1) - chosen).sum())

    @property
    def bugs(self) -> list[Difference]:
        """Differences that no near tie explains."""
        return [difference for difference in self.differences if difference.verdict == "bug"]

    def figure(self) -> Figure:
        """The setting's line."""
        gaps = [found.gap for found in self.differences if found.gap is not None]
        margins = [found.margin for found in self.differences if found.margin is not None]
        return Figure(
            name=self.setting,
            values={
                "texts": self.texts,
                "tokens": self.tokens,
                "identical": self.texts - len(self.differences),
                "near_ties": len(self.differences) - len(self.bugs),
                "bugs": len(self.bugs),
                "first_difference": min((found.index for found in self.differences), default=None),
                "largest_margin": max(margins, default=None),
                "largest_gap": max(gaps, default=None),
                "perplexity": _perplexity(self._surprise, self._scored),
                "plain_perplexity": _perplexity(self._plain_surprise, self._plain_scored),
            },
            passed=not (self.differences if self.exact else self.bugs),
        )


def _perplexity(surprise: float, tokens: int) -> float | None:
    return math.exp(surprise / tokens) if tokens else None


def trajectory_result(level: str, compared: Sequence[Trajectories], notes: Sequence[str]) -> LevelResult:
    """Collect the settings of one level.

    Args:
        level: "C2" or "C3".
        compared: one entry a setting.
        notes: how the texts were made.
    """
    noise = compared[0].noise
    rule = (
        "fp32: every difference fails"
        if compared[0].exact
        else "half precision: near ties are allowed, anything else fails"
    )
    unit = "logits" if level == "C2" else "lift of a logit that wins the race"
    findings = [
        {"setting": one.setting, **found.to_dict()}
        for one in compared
        for found in sorted(one.differences, key=lambda found: -(found.gap or math.inf))
    ]
    return level_result(
        level,
        [one.figure() for one in compared],
        notes=(
            *notes,
            f"{rule}; a near tie is a gap of at most {noise.near_tie:.3g} ({unit}) in the fp32 reference: "
            f"{MARGIN_SAFETY:g} times the largest change of a leading token's distance to the best one under "
            f"harmless changes ({noise.margin:.3g}, {noise.positions} positions), or the spacing of numbers "
            f"of this dtype at the largest logit ({noise.scale:.3g})"
            + (
                "; and the tree pass must have the plain pass's rows up to there (C4)"
                if level == "C2"
                else ""
            ),
        ),
        findings=findings,
    )
